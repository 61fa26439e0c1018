"""Hierarchical: inside each host first, then across the hosts, so that little goes over the slow links between them.

All-reduce on 2 hosts of 2 ranks, x cut into pieces 0 and 1; each phase is a ring:

            host 0: rank 0   rank 1        host 1: rank 2   rank 3
    inside  1 ->             <- 0          1 ->             <- 0         reduce-scatter: the host's sum of a piece
    across  0 <-----------------------------> 0                          all-reduce among the ranks that have the same
                             1 <---------------------------> 1           piece: only 1/g of x goes between hosts
    inside  0 ->             <- 1          0 ->             <- 1         all-gather

Hosts may differ in size: x is cut into as many pieces as the smallest host has ranks, and the other ranks of a larger
host take part inside it alone. Each piece is finished on one rank: all ranks get the same bits.

Cost of S bytes on k hosts of up to g ranks, m on the smallest, a and b inside, A and B across:
    all_reduce    2(g-1) (a + S/m b) + 2(k-1) (A + S/(m k) B)

Source: M. Cho, U. Finkler, D. Kung, H. Hunter, "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
network hierarchy", MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crosscut.comm.algorithms import calls
from crosscut.comm.algorithms.ring import gather_steps, reduce_steps
from crosscut.comm.algorithms.wire import Wire, bounds
from crosscut.comm.group import Group

Tensor = torch.Tensor
Hosts = int | Sequence[Sequence[int]] | None


def all_reduce(
    group: Group, x: Tensor, op: str = "sum", *, hosts: Hosts = None, tag: str = "", kind: str = "step"
) -> Tensor:
    """As `Group.all_reduce`: in place, returns `x`. `hosts`: see `host_lists`; the same on all ranks."""
    lists = host_lists(hosts, group.size)

    def steps(wire: Wire, x: Tensor) -> None:
        host = next(ranks for ranks in lists if wire.rank in ranks)
        inside = wire.part(host, "inside, {}")
        num_pieces = min(map(len, lists))
        # The ranks beyond the smallest host's number get empty pieces: the ring goes through them all the same.
        cuts = bounds(x.numel(), num_pieces) + [x.numel()] * (len(host) - num_pieces)
        reduce_steps(inside, x, cuts, op)
        if inside.rank < num_pieces:
            across = wire.part([ranks[inside.rank] for ranks in lists], f"across, {{}} of {inside.rank}")
            piece = x[cuts[inside.rank] : cuts[inside.rank + 1]]
            reduce_steps(across, piece, bounds(piece.numel(), across.size), op)
            gather_steps(across, piece, bounds(piece.numel(), across.size))
        gather_steps(inside, x, cuts)

    return calls.all_reduce("hierarchical", group, x, op, tag, kind, steps)


def host_lists(hosts: Hosts, n: int) -> list[list[int]]:
    """The ranks of each host. hosts: the lists themselves, or a number of hosts that hold ranks in order, as evenly as
    they can (default 2). Raises ValueError unless every rank of n is on one host.
    """
    if hosts is None:
        hosts = min(2, n)
    if isinstance(hosts, int):
        if not 1 <= hosts <= n:
            raise ValueError(f"hosts={hosts} cannot hold {n} ranks; use 1 to {n}")
        size, more = divmod(n, hosts)
        begins = [h * size + min(h, more) for h in range(hosts + 1)]
        return [list(range(begins[h], begins[h + 1])) for h in range(hosts)]
    lists = [list(ranks) for ranks in hosts]
    if not all(lists) or sorted(rank for ranks in lists for rank in ranks) != list(range(n)):
        raise ValueError(f"hosts={lists} must name each of the ranks 0 to {n - 1} once, and no empty host")
    return lists


def cost_all_reduce(
    n: int,
    size: float,
    alpha: float,
    beta: float,
    *,
    hosts: Hosts = None,
    across: tuple[float, float] | None = None,
) -> float:
    """Seconds for `size` bytes on n ranks. across: (alpha, beta) between hosts, by default as inside."""
    lists = host_lists(hosts, n)
    k, g, m = len(lists), max(map(len, lists)), min(map(len, lists))
    alpha_across, beta_across = across or (alpha, beta)
    inside = 2 * (g - 1) * (alpha + beta * size / m)
    return inside + 2 * (k - 1) * (alpha_across + beta_across * size / (m * k))
