"""Pairwise exchange: in step s every rank deals with one other rank, directly; after n - 1 steps with all of them.

All-to-all on 4 ranks (`12`: the piece of rank 1 for rank 2), partner = rank XOR step:

            rank 0         rank 1         rank 2         rank 3
    step 1  01 to 1        10 to 0        23 to 3        32 to 2       0 <-> 1, 2 <-> 3
    step 2  02 to 2        13 to 3        20 to 0        31 to 1       0 <-> 2, 1 <-> 3
    step 3  03 to 3        12 to 2        21 to 1        30 to 0       0 <-> 3, 1 <-> 2

Where n is no power of two there are no such pairs: a rank sends to rank + s and receives from rank - s.
Reduce-scatter is the same, with what arrives added to one's own piece.

Cost of n ranks and S bytes of one rank's input, its own piece included, any n:
    all_to_all, reduce_scatter    (n-1) a + (n-1)/n S b       the fewest bytes: nothing passes through a third rank
(all_to_all with splits: each step takes as long as its longest message.)

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from crosscut.comm.algorithms import calls
from crosscut.comm.algorithms.wire import Wire, combine, named
from crosscut.comm.group import Group

Tensor = torch.Tensor


def all_to_all(
    group: Group,
    x: Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    tag: str = "",
    kind: str = "step",
) -> Tensor:
    """As `Group.all_to_all`, with or without splits: a new tensor."""

    def steps(wire: Wire, ins: list[Tensor], outs: list[Tensor]) -> None:
        outs[wire.rank].copy_(ins[wire.rank])
        for to, source in partners(wire.rank, wire.size):
            wire.exchange(ins[to], to, outs[source], source, named(to, to + 1))

    return calls.all_to_all("pairwise", group, x, input_splits, output_splits, tag, kind, steps)


def reduce_scatter(
    group: Group, x: Tensor, dim: int = 0, op: str = "sum", *, tag: str = "", kind: str = "step"
) -> Tensor:
    """As `Group.reduce_scatter`: a new tensor; the number of ranks divides `dim`."""

    def steps(wire: Wire, pieces: Tensor) -> Tensor:
        own = pieces[wire.rank]
        came = torch.empty_like(own)
        for to, source in partners(wire.rank, wire.size):
            wire.exchange(pieces[to], to, came, source, named(to, to + 1))
            combine(op, own, came, own)
        return own

    return calls.reduce_scatter("pairwise", group, x, dim, op, tag, kind, steps)


def partners(rank: int, n: int) -> Iterator[tuple[int, int]]:
    """(whom to send to, whom to receive from), a pair a step."""
    for step in range(1, n):
        yield (rank ^ step, rank ^ step) if n & (n - 1) == 0 else ((rank + step) % n, (rank - step) % n)


def cost_all_to_all(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of one rank's input, its own piece included."""
    return (n - 1) * (alpha + beta * size / n)


def cost_reduce_scatter(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of one rank's whole input."""
    return cost_all_to_all(n, size, alpha, beta)
