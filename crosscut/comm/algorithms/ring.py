"""Ring: every rank sends to the next one only, a piece at a time, so that all links are busy all the time.

Reduce-scatter on 4 ranks, x cut into pieces 0 to 3 (`2+`: piece 2 with what was added on the way):

            rank 0         rank 1         rank 2         rank 3
    step 1  3 ->           0 ->           1 ->           2 ->          each to the right, the last to rank 0
    step 2  2+ ->          3+ ->          0+ ->          1+ ->
    step 3  1++ ->         2++ ->         3++ ->         0++ ->        rank r now holds all of piece r

All-gather goes on in the same way with whole pieces: rank r sends piece r, then what it has just received. All-reduce
is the one after the other. Each piece is added up along the ring and finished on one rank: all ranks get the same bits.

Cost of n ranks and S bytes, message start-up a and b seconds a byte (S = the whole array):
    reduce_scatter, all_gather   (n-1) a + (n-1)/n S b
    all_reduce                   2(n-1) a + 2(n-1)/n S b      the fewest bytes possible, the most steps

Any number of ranks. Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crosscut.comm.algorithms import calls
from crosscut.comm.algorithms.wire import Wire, bounds, combine, named
from crosscut.comm.group import Group

Tensor = torch.Tensor


def all_reduce(group: Group, x: Tensor, op: str = "sum", *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.all_reduce`: in place, returns `x`."""

    def steps(wire: Wire, x: Tensor) -> None:
        reduce_steps(wire, x, bounds(x.numel(), wire.size), op)
        gather_steps(wire, x, bounds(x.numel(), wire.size))

    return calls.all_reduce("ring", group, x, op, tag, kind, steps)


def reduce_scatter(
    group: Group, x: Tensor, dim: int = 0, op: str = "sum", *, tag: str = "", kind: str = "step"
) -> Tensor:
    """As `Group.reduce_scatter`: a new tensor; the number of ranks divides `dim`."""

    def steps(wire: Wire, pieces: Tensor) -> Tensor:
        reduce_steps(wire, pieces.view(-1), bounds(pieces.numel(), wire.size), op)
        return pieces[wire.rank]

    return calls.reduce_scatter("ring", group, x, dim, op, tag, kind, steps)


def all_gather(group: Group, x: Tensor, dim: int = 0, *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.all_gather`: a new tensor."""

    def steps(wire: Wire, blocks: Tensor) -> None:
        gather_steps(wire, blocks.view(-1), bounds(blocks.numel(), wire.size))

    return calls.all_gather("ring", group, x, dim, tag, kind, steps)


def reduce_steps(wire: Wire, x: Tensor, cuts: Sequence[int], op: str) -> None:
    """Reduce piece r of the flat `x` onto rank r of the wire; the other pieces end up partly reduced."""
    n, rank = wire.size, wire.rank
    room = x.new_empty(max(cuts[i + 1] - cuts[i] for i in range(n)))
    for step in range(n - 1):
        away, here = (rank - 1 - step) % n, (rank - 2 - step) % n
        own = x[cuts[here] : cuts[here + 1]]
        came = room[: own.numel()]
        piece = x[cuts[away] : cuts[away + 1]]
        wire.exchange(piece, (rank + 1) % n, came, (rank - 1) % n, named(away, away + 1))
        combine(op, came, own, own)


def gather_steps(wire: Wire, x: Tensor, cuts: Sequence[int]) -> None:
    """Fill the flat `x`, of which rank r of the wire has piece r."""
    n, rank = wire.size, wire.rank
    for step in range(n - 1):
        away, here = (rank - step) % n, (rank - 1 - step) % n
        piece, room = x[cuts[away] : cuts[away + 1]], x[cuts[here] : cuts[here + 1]]
        wire.exchange(piece, (rank + 1) % n, room, (rank - 1) % n, named(away, away + 1))


def cost_all_reduce(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds for `size` bytes on n ranks."""
    return 2 * cost_all_gather(n, size, alpha, beta)


def cost_all_gather(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of the whole output."""
    return (n - 1) * (alpha + beta * size / n)


def cost_reduce_scatter(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of one rank's whole input."""
    return cost_all_gather(n, size, alpha, beta)
