"""Recursive halving and doubling (Rabenseifner): each exchange moves half of what the one before it moved.

Reduce-scatter by halving, then all-gather by doubling, on 4 ranks, x cut into pieces 0 to 3:

            rank 0         rank 1         rank 2         rank 3
    step 1  2:4 to 2       2:4 to 3       0:2 to 0       0:2 to 1      the half that the other will finish
    step 2  1 to 1         0 to 0         3 to 3         2 to 2        rank r now holds all of piece r
    step 3  0 to 1         1 to 0         2 to 3         3 to 2
    step 4  0:2 to 2       0:2 to 3       2:4 to 0       2:4 to 1

Each piece is finished on one rank: all ranks get the same bits.

Cost of n ranks and S bytes, n a power of two:
    all_reduce    2 log2(n) a + 2(n-1)/n S b          the bytes of the ring in far fewer steps, to far neighbours
Other n: p pieces on p ranks and 2 (a + S b) more, for folding the rest in and out (`fold`).

Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, LNCS 3036.
"""

from __future__ import annotations

import torch

from crosscut.comm.algorithms import calls
from crosscut.comm.algorithms.fold import cost_fold, fold_in, fold_out, power
from crosscut.comm.algorithms.wire import Wire, bounds, combine, named
from crosscut.comm.group import Group

Tensor = torch.Tensor


def all_reduce(group: Group, x: Tensor, op: str = "sum", *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.all_reduce`: in place, returns `x`."""

    def steps(wire: Wire, x: Tensor) -> None:
        core = fold_in(wire, x, op)
        if core.rank >= 0:
            cuts = bounds(x.numel(), core.size)
            _halving(core, x, cuts, op)
            _doubling(core, x, cuts)
        fold_out(wire, x)

    return calls.all_reduce("rabenseifner", group, x, op, tag, kind, steps)


def _halving(core: Wire, x: Tensor, cuts: list[int], op: str) -> None:
    """Reduce piece r onto rank r. Pieces start:stop are still this rank's to reduce."""
    start, stop = 0, core.size
    room = torch.empty_like(x)
    distance = core.size // 2
    while distance:
        peer, middle = core.rank ^ distance, start + distance
        lower = core.rank < peer
        keep, give = ((start, middle), (middle, stop)) if lower else ((middle, stop), (start, middle))
        own = x[cuts[keep[0]] : cuts[keep[1]]]
        came = room[: own.numel()]
        core.exchange(x[cuts[give[0]] : cuts[give[1]]], peer, came, peer, named(*give))
        combine(op, *((own, came) if lower else (came, own)), own)
        start, stop = keep
        distance //= 2


def _doubling(core: Wire, x: Tensor, cuts: list[int]) -> None:
    """Fill `x`, of which rank r has piece r."""
    distance = 1
    while distance < core.size:
        peer, first = core.rank ^ distance, core.rank & ~(distance - 1)
        other = first ^ distance
        own = x[cuts[first] : cuts[first + distance]]
        room = x[cuts[other] : cuts[other + distance]]
        core.exchange(own, peer, room, peer, named(first, first + distance))
        distance *= 2


def cost_all_reduce(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds for `size` bytes on n ranks."""
    p, _ = power(n)
    return 2 * ((p.bit_length() - 1) * alpha + (p - 1) / p * beta * size) + cost_fold(n, size, alpha, beta)
