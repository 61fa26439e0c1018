"""Binomial tree: whoever has the data passes it on, so that the number of those who have it doubles every step.

The tree on 8 ranks, root 0 (other roots: all ranks turned by that much). A rank's parent is its number without the
lowest 1 in binary, so the ranks of a subtree follow one another:

    000 ─┬─ 001                     broadcast   down the tree, the largest subtree first; everyone sends all of x
         ├─ 010 ─── 011             scatter     down; a child gets what belongs to its subtree
         └─ 100 ─┬─ 101             gather      up, the smallest subtree first; a child sends its subtree's blocks
                 └─ 110 ─── 111     reduce      up; a child sends its subtree's reduction

    broadcast   step 1  0 -> 4      step 2  0 -> 2, 4 -> 6      step 3  0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7

Cost of n ranks and S bytes, k = ceil(log2(n)), any n:
    broadcast, reduce    k (a + S b)
    scatter, gather      k a + (n-1)/n S b            S = the whole array, at the root

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crosscut.comm.algorithms import calls
from crosscut.comm.algorithms.wire import Wire, combine, named
from crosscut.comm.group import Group

Tensor = torch.Tensor


def parent(place: int) -> int:
    """The parent of a place in the tree that is not the root's (0)."""
    return place & (place - 1)


def children(place: int, n: int) -> list[tuple[int, int]]:
    """The children of a place, each as the range of its subtree (the child first), the smallest first."""
    out = []
    distance = 1
    while not place & distance and place + distance < n:
        out.append((place + distance, min(place + 2 * distance, n)))
        distance *= 2
    return out


def broadcast(group: Group, x: Tensor, src: int = 0, *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.broadcast`: in place, returns `x`."""

    def steps(wire: Wire, x: Tensor) -> None:
        n, place = wire.size, (wire.rank - src) % wire.size
        if place:
            wire.recv(x, (parent(place) + src) % n)
        for child, _ in reversed(children(place, n)):
            wire.send(x, (child + src) % n, "all")

    return calls.broadcast("binomial", group, x, src, tag, kind, steps)


def reduce(group: Group, x: Tensor, dst: int = 0, op: str = "sum", *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.reduce`: in place at `dst`, returns `x`."""

    def steps(wire: Wire, x: Tensor) -> None:
        n, place = wire.size, (wire.rank - dst) % wire.size
        below = children(place, n)
        came = torch.empty_like(x) if below else x
        for child, _ in below:
            combine(op, x, wire.recv(came, (child + dst) % n), x)
        if place:
            wire.send(x, (parent(place) + dst) % n, "all")

    return calls.reduce("binomial", group, x, dst, op, tag, kind, steps)


def gather(group: Group, x: Tensor, dst: int = 0, *, tag: str = "", kind: str = "step") -> list[Tensor] | None:
    """As `Group.gather`: the list of all ranks' `x` at `dst`, None elsewhere."""

    def steps(wire: Wire, x: Tensor) -> Tensor | None:
        n, place = wire.size, (wire.rank - dst) % wire.size
        below = children(place, n)
        stop = below[-1][1] if below else place + 1
        blocks = x.new_empty(stop - place, x.numel())  # of the subtree, in the order of the tree
        blocks[0] = x
        for child, end in below:
            wire.recv(blocks[child - place : end - place].view(-1), (child + dst) % n)
        if place:
            wire.send(blocks.view(-1), (parent(place) + dst) % n, _blocks(place, stop, dst, n))
            return None
        return blocks.roll(dst, 0)

    return calls.gather("binomial", group, x, dst, tag, kind, steps)


def scatter(
    group: Group,
    parts: Sequence[Tensor] | None = None,
    src: int = 0,
    *,
    out: Tensor,
    tag: str = "",
    kind: str = "step",
) -> Tensor:
    """As `Group.scatter`: `out` becomes `parts[r]` of rank `src` on rank r; returns `out`."""

    def steps(wire: Wire, blocks: Tensor | None, out: Tensor) -> None:
        n, place = wire.size, (wire.rank - src) % wire.size
        below = children(place, n)
        if blocks is None:
            stop = below[-1][1] if below else place + 1
            blocks = out.new_empty(stop - place, out.numel())
            wire.recv(blocks.view(-1), (parent(place) + src) % n)
        else:
            blocks = blocks.roll(-src, 0)
        for child, end in reversed(below):
            rows = blocks[child - place : end - place].reshape(-1)
            wire.send(rows, (child + src) % n, _blocks(child, end, src, n))
        out.copy_(blocks[0])

    return calls.scatter("binomial", group, parts, src, out, tag, kind, steps)


def _blocks(start: int, stop: int, root: int, n: int) -> str:
    """The ranks whose blocks stand at places start:stop."""
    if root == 0:
        return named(start, stop)
    ranks = [(place + root) % n for place in range(start, stop)]
    return f"piece{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"


def cost_broadcast(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds for `size` bytes on n ranks."""
    return (n - 1).bit_length() * (alpha + beta * size)


def cost_reduce(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds for `size` bytes on n ranks."""
    return cost_broadcast(n, size, alpha, beta)


def cost_gather(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of the whole, as it is at the root."""
    return (n - 1).bit_length() * alpha + (n - 1) / n * beta * size


def cost_scatter(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of the whole, as it is at the root."""
    return cost_gather(n, size, alpha, beta)
