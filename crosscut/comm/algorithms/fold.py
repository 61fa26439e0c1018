"""Numbers of ranks that are no power of two: fold the rest in before, and out after.

Of n = p + r ranks, p the largest power of two, the first 2r stand in pairs; the odd one of a pair (a guest) hands what
it has to the even one and waits for the result. The p others and hosts of guests are the core. n = 6: p = 4, r = 2

    ranks      0 <- 1   2 <- 3   4   5        in: one message in each pair
    core       0        1        2   3        the algorithm for a power of two
    ranks      0 -> 1   2 -> 3   4   5        out: the result, to the guests

Guests stand beside their hosts, so that core ranks in order cover all ranks in order.

Cost for S bytes: 2 (a + S b) more than for p ranks. Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
collective communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

import torch

from crosscut.comm.algorithms.wire import Wire, combine

Tensor = torch.Tensor


def power(n: int) -> tuple[int, int]:
    """(p, r): n = p + r, p the largest power of two up to n."""
    p = 1 << (n.bit_length() - 1)
    return p, n - p


def core_ranks(n: int) -> list[int]:
    """The rank of every member of the core."""
    p, r = power(n)
    return [2 * c if c < r else c + r for c in range(p)]


def fold_in(wire: Wire, x: Tensor, op: str) -> Wire:
    """Reduce the guests' `x` into their hosts'. Returns the wire of the core, whose rank is -1 on a guest."""
    _, r = power(wire.size)
    if wire.rank < 2 * r:
        if wire.rank % 2:
            wire.send(x, wire.rank - 1, "all, to fold in")
        else:
            combine(op, x, wire.recv(torch.empty_like(x), wire.rank + 1), x)
    return wire.part(core_ranks(wire.size))


def fold_out(wire: Wire, x: Tensor) -> None:
    """Send the result to the guests."""
    _, r = power(wire.size)
    if wire.rank < 2 * r:
        if wire.rank % 2:
            wire.recv(x, wire.rank - 1)
        else:
            wire.send(x, wire.rank + 1, "all, folded out")


def cost_fold(n: int, size: float, alpha: float, beta: float) -> float:
    """Seconds for folding in and out."""
    return 2 * (alpha + beta * size) if power(n)[1] else 0.0
