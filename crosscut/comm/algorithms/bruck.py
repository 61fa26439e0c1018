"""Bruck: messages to ever farther ranks, with blocks in an order of each rank's own, so that any n takes ceil(log2 n).

All-gather on 5 ranks; a rank keeps its own block first and the following ranks' after it:

            rank 0         rank 1         rank 2         rank 3         rank 4
            0              1              2              3              4
    step 1  0 1            1 2            2 3            3 4            4 0        the first 1 block to rank - 1
    step 2  0 1 2 3        1 2 3 4        2 3 4 0        3 4 0 1        4 0 1 2    the first 2 to rank - 2
    step 3  0 1 2 3 4      1 2 3 4 0      ...                                      the missing 1 to rank - 4
    end     turn the blocks by the rank

All-to-all: the block that has to go d ranks on travels by the 1s of d in binary: in the step of 1, 2, 4, ... all blocks
whose d has that bit go on by that many ranks, packed into one message.

Cost of n ranks and S bytes, k = ceil(log2(n)), any n (S: all_gather, the output; all_to_all, one rank's input):
    all_gather    k a + (n-1)/n S b
    all_to_all    k a + (bits set in all of 0 to n-1)/n S b, for n a power of two: log2(n) (a + S/2 b)

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crosscut.comm.algorithms import calls
from crosscut.comm.algorithms.wire import Wire
from crosscut.comm.group import Group

Tensor = torch.Tensor


def all_gather(group: Group, x: Tensor, dim: int = 0, *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.all_gather`: a new tensor."""
    return calls.all_gather("bruck", group, x, dim, tag, kind, _gather_steps)


def all_to_all(
    group: Group,
    x: Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    tag: str = "",
    kind: str = "step",
) -> Tensor:
    """As `Group.all_to_all` with equal pieces: a new tensor. Raises ValueError for splits: a rank that passes a block
    on would have to know its length.
    """
    if input_splits is not None or output_splits is not None:
        raise ValueError(
            f"all_to_all over {group.label}: bruck takes equal pieces, not input_splits={input_splits}, "
            f"output_splits={output_splits}; use pairwise"
        )
    return calls.all_to_all("bruck", group, x, None, None, tag, kind, _all_to_all_steps)


def _gather_steps(wire: Wire, blocks: Tensor) -> None:
    n, rank = wire.size, wire.rank
    mine = torch.empty_like(blocks)  # row d: the block of rank + d
    mine[0] = blocks[rank]
    distance = 1
    while distance < n:
        count = min(distance, n - distance)
        what = _listed([(rank + d) % n for d in range(count)])
        room = mine[distance : distance + count]
        wire.exchange(mine[:count].view(-1), (rank - distance) % n, room.view(-1), (rank + distance) % n, what)
        distance *= 2
    blocks.copy_(mine.roll(rank, 0))


def _all_to_all_steps(wire: Wire, ins: list[Tensor], outs: list[Tensor]) -> None:
    n, rank = wire.size, wire.rank
    mine = torch.stack([ins[(rank + d) % n] for d in range(n)])  # row d: what has to go d ranks on in all
    distance = 1
    while distance < n:
        moving = [d for d in range(n) if d & distance]
        packed = mine[moving]
        to = (rank + distance) % n
        came = wire.exchange(
            packed.view(-1),
            to,
            torch.empty_like(packed).view(-1),
            (rank - distance) % n,
            f"to go on by {_listed(moving)}",
        )
        mine[moving] = came.view(packed.shape)
        distance *= 2
    for d in range(n):
        outs[(rank - d) % n].copy_(mine[d])


def _listed(places: Sequence[int]) -> str:
    return f"block{'s' if len(places) > 1 else ''} {','.join(map(str, places))}"


def cost_all_gather(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of the whole output."""
    return (n - 1).bit_length() * alpha + (n - 1) / n * beta * size


def cost_all_to_all(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of one rank's input, its own piece included."""
    bits = sum(bin(d).count("1") for d in range(n))
    return (n - 1).bit_length() * alpha + bits / n * beta * size
