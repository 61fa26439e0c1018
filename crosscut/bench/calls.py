"""One call of an operation on fixed buffers: through `Group`, through torch.distributed, or by a named algorithm.

All variants of one size share the buffers, so that none finds its data warmer in a cache than another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from crosscut.bench import data
from crosscut.bench.definitions import CUT
from crosscut.comm.algorithms.registry import find
from crosscut.comm.group import Group

Tensor = torch.Tensor
Call = Callable[[], Any]  # makes the call, blocks until this rank is done, returns what this rank gets
_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Buffers:
    """What a rank hands in (`x`) and where torch's calls put the result (`out`), flat."""

    op: str
    rank: int
    n: int
    count: int
    x: Tensor
    out: Tensor

    @classmethod
    def make(cls, op: str, rank: int, n: int, count: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        """For S of `count` numbers."""
        width = count // n if op in CUT else count
        is_root = rank == 0
        in_count = {"all_gather": width, "gather": width, "scatter": count if is_root else 0}.get(op, count)
        out_count = {
            "all_gather": count,
            "all_to_all": count,
            "send_recv": count,
            "reduce_scatter": width,
            "scatter": width,
            "gather": count if is_root else 0,
        }.get(op, 0)
        x = torch.empty(in_count, dtype=dtype, device=device)
        out = torch.zeros(out_count, dtype=dtype, device=device)
        return cls(op, rank, n, count, x, out)

    def fill(self) -> None:
        """Put the rank's data in."""
        data.fill(self.x, self.rank, self.n)

    def rest(self) -> None:
        """For the timed calls: sums of sums would overflow, zeros stay zeros."""
        self.x.zero_()


def by_group(group: Group, b: Buffers, algorithm: str = "") -> Call:
    """Through a `Group`: its own call, or one of `crosscut.comm.algorithms`."""
    op, x, out, n = b.op, b.x, b.out, b.n
    if op == "send_recv":
        after, before = (b.rank + 1) % n, (b.rank - 1) % n
        return lambda: group.exchange(x, after, out, before)
    call: Callable[..., Any] = getattr(group, op)
    if algorithm:
        function = find(op, algorithm)

        def call(*args: Any, **options: Any) -> Any:
            return function(group, *args, **options)

    if op == "scatter":
        parts = list(x.chunk(n)) if b.rank == 0 else None
        return lambda: call(parts, 0, out=out)
    if op in ("all_gather", "reduce_scatter", "all_to_all") and not algorithm:
        return lambda: call(x, out=out)  # as torch's calls: else the time of new memory would be measured with it
    return lambda: call(x)


def by_torch(group: Any, b: Buffers) -> Call:
    """Through torch.distributed."""
    op, x, out, n = b.op, b.x, b.out, b.n

    def returning(result: Any, call: Callable[..., Any], *args: Any, **options: Any) -> Call:
        def run() -> Any:
            call(*args, group=group, **options)
            return result

        return run

    if op in ("all_reduce", "broadcast", "reduce"):
        root = () if op == "all_reduce" else (0,)
        return returning(x, getattr(dist, op), x, *root)
    if op == "all_gather":
        return returning(out, _gather_single, out, x)
    if op == "reduce_scatter":
        return returning(out, _scatter_single, out, x)
    if op == "all_to_all":
        return returning(out, dist.all_to_all_single, out, x)
    if op == "gather":
        rows = list(out.chunk(n)) if b.rank == 0 else None
        return returning(rows, dist.gather, x, rows, 0)
    if op == "scatter":
        parts = list(x.chunk(n)) if b.rank == 0 else None
        return returning(out, dist.scatter, out, parts, 0)
    after, before = (b.rank + 1) % n, (b.rank - 1) % n

    def exchange() -> Tensor:
        ops = [dist.P2POp(dist.isend, x, after, group=group), dist.P2POp(dist.irecv, out, before, group=group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    return exchange


def by_copying(b: Buffers) -> Call:
    """The copy limit, a yardstick for an all_reduce through memory: this rank reads n*S and writes n*S by memcpy, while
    all others do the same. One that stages less than that through shared memory can be faster.
    """
    to = torch.zeros_like(b.x)

    def copy() -> None:
        for _ in range(b.n):
            to.copy_(b.x)

    return copy
