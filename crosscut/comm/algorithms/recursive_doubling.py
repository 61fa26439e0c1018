"""Recursive doubling: ranks at distance 1, then 2, then 4 exchange all they have; what each knows doubles every step.

All-reduce of a, b, c, d on 4 ranks:

            rank 0         rank 1         rank 2         rank 3
            a              b              c              d
    step 1  a+b   <->      a+b            c+d   <->      c+d
    step 2  a+b+c+d        a+b+c+d        a+b+c+d        a+b+c+d       0 <-> 2, 1 <-> 3

Both ranks of an exchange combine the same two values, the lower ranks' first: all ranks get the same bits. All-gather
is the same with blocks put side by side instead of added.

Cost of n ranks and S bytes (S = the whole array), n a power of two:
    all_reduce    log2(n) (a + S b)                   the fewest steps, many bytes: for small tensors
    all_gather    log2(n) a + (n-1)/n S b

Other n: r = n - p ranks are guests of the p others (`fold`). The all_reduce costs 2 (a + S b) more. In the all_gather a
guest's block is taken in first (a + S/n b), the block of a host counts twice, and all of S goes to the guests at the
end (a + S b).

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

import torch

from crosscut.comm.algorithms import calls
from crosscut.comm.algorithms.fold import cost_fold, fold_in, fold_out, power
from crosscut.comm.algorithms.wire import Wire, combine, named
from crosscut.comm.group import Group

Tensor = torch.Tensor


def all_reduce(group: Group, x: Tensor, op: str = "sum", *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.all_reduce`: in place, returns `x`."""

    def steps(wire: Wire, x: Tensor) -> None:
        core = fold_in(wire, x, op)
        if core.rank >= 0:
            _reduce_steps(core, x, op)
        fold_out(wire, x)

    return calls.all_reduce("recursive_doubling", group, x, op, tag, kind, steps)


def all_gather(group: Group, x: Tensor, dim: int = 0, *, tag: str = "", kind: str = "step") -> Tensor:
    """As `Group.all_gather`: a new tensor."""
    return calls.all_gather("recursive_doubling", group, x, dim, tag, kind, _gather_steps)


def _reduce_steps(core: Wire, x: Tensor, op: str) -> None:
    came = torch.empty_like(x)
    distance = 1
    while distance < core.size:
        peer = core.rank ^ distance
        core.exchange(x, peer, came, peer, "all")
        combine(op, *((x, came) if core.rank < peer else (came, x)), x)
        distance *= 2


def _gather_steps(wire: Wire, blocks: Tensor) -> None:
    """Fill `blocks` (size, block). A range of the core is a range of all ranks, so what is sent lies in one piece."""
    p, r = power(wire.size)
    rank = wire.rank
    if rank < 2 * r:  # a host takes in its guest's block
        if rank % 2:
            wire.send(blocks[rank], rank - 1, named(rank, rank + 1))
        else:
            wire.recv(blocks[rank + 1], rank + 1)
    if rank >= 2 * r or rank % 2 == 0:
        begins = [min(c, r) + c for c in range(p + 1)]  # the first block of every member of the core, and the end
        c = begins.index(rank)
        distance = 1
        while distance < p:
            first = c & ~(distance - 1)  # this rank has the blocks of the core from `first`, its peer from `other`
            other = first ^ distance
            own = blocks[begins[first] : begins[first + distance]]
            room = blocks[begins[other] : begins[other + distance]]
            peer = begins[c ^ distance]
            wire.exchange(own.view(-1), peer, room.view(-1), peer, named(begins[first], begins[first + distance]))
            distance *= 2
    fold_out(wire, blocks.view(-1))


def cost_all_reduce(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds for `size` bytes on n ranks."""
    p, _ = power(n)
    return (p.bit_length() - 1) * (alpha + beta * size) + cost_fold(n, size, alpha, beta)


def cost_all_gather(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds; `size` is the bytes of the whole output."""
    p, r = power(n)
    total = 2 * alpha + beta * (size + size / n) if r else 0.0
    distance = 1
    while distance < p:  # the first members of the core have the guests: their messages are the longest
        total += alpha + beta * size / n * (distance + min(r, distance))
        distance *= 2
    return total
