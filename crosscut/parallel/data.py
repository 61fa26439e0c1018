"""Data parallelism: the gradients of a step, summed over the ranks that saw other data.

Two ways to do the same: `NaiveReducer`, an all_reduce for each parameter after backward (the lectures' form), and
`BucketReducer`, which sums flat buckets while backward still runs.

Every reduction is a SUM: the loss was divided by the number of tokens of the whole batch, so gradients need no average.
A parameter that got no gradient counts as zeros, since another rank may have one; its `.grad` is then the sum.
Gradients may travel in another dtype than the parameters', `reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from crosscut.comm.group import Group, Handle

TAG = "gradients/step"
ALONE_BYTES = 4_000_000  # copying so much into a bucket and back costs more than a call of its own, also on Gloo


@dataclass(frozen=True)
class Owed:
    """A parameter and the group over which its gradient is summed. used: what the module computes with where that is a
    copy: when its gradient comes it is that of the parameter already (masters.py)."""

    name: str
    param: nn.Parameter
    group: Group
    used: nn.Parameter | None = None


class Reducer(Protocol):
    """Sums gradients once a step. `last_backward()` announces the backward after which they are complete."""

    def last_backward(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class NaiveReducer:
    """One all_reduce a parameter, after backward, in registration order."""

    def __init__(self, owed: Sequence[Owed], reduce: torch.dtype | None = None) -> None:
        self.owed, self.reduce = [o for o in owed if o.group.size > 1], reduce

    def last_backward(self) -> None:
        """Nothing to prepare: all is done in `finish`."""

    def finish(self) -> None:
        for o in self.owed:
            if o.param.grad is None:
                o.param.grad = torch.zeros_like(o.param)
            sum_over(o.group, o.param.grad, self.reduce, TAG)

    def close(self) -> None:
        """Nothing to undo."""


def sum_over(group: Group, grad: Tensor, reduce: torch.dtype | None, tag: str) -> None:
    """Make `grad` the sum over the ranks of `group`; it travels in the dtype `reduce` (default: its own)."""
    put_back(group.all_reduce(grad.to(reduce or grad.dtype), tag=tag), grad)


def put_back(arrived: Tensor, into: Tensor) -> None:
    """What was reduced in another dtype goes back to where it came from; in the same one it is there already."""
    if arrived.dtype != into.dtype:
        into.copy_(arrived)


@dataclass
class Bucket:
    """A flat buffer of gradients that are summed together over one group; None: of one, which is summed where it is.

    marks: its last numbers, one a parameter, for a reducer whose ranks agree on which of them have a gradient at all;
    else empty.
    """

    group: Group
    owed: list[Owed]
    flat: Tensor | None
    views: list[Tensor]
    marks: Tensor
    missing: set[int] = field(default_factory=set)  # indices whose gradient has not come yet
    handle: Handle | None = None

    @property
    def content(self) -> Tensor:
        """What is summed, once all gradients have come."""
        content = self.owed[0].param.grad if self.flat is None else self.flat
        assert content is not None
        return content


class BucketReducer:
    """Flat buckets in about the order in which backward makes gradients (the reverse of registration), each summed by
    an asynchronous all_reduce as soon as its last gradient is there (Li et al. 2020, "PyTorch Distributed", section
    3.2). A gradient that fills a bucket is not copied into one.

    Buckets start strictly in order on every rank, or ranks that finish gradients in another order would mix them up.
    Those that a parameter without a gradient keeps from completing start in `finish`.
    """

    op = "sum"
    marked = False

    def __init__(self, owed: Sequence[Owed], bucket_bytes: int = 25_000_000, reduce: torch.dtype | None = None) -> None:
        if bucket_bytes < 1:
            raise ValueError(
                f"bucket_bytes={bucket_bytes} must be at least 1; use NaiveReducer for one call a parameter"
            )
        several = [o for o in reversed(owed) if o.group.size > 1]
        self.buckets = _fill_buckets(several, bucket_bytes, self.marked, reduce)
        self._armed = False
        self._next = 0  # the first bucket that has not started
        self._hooks = [
            (o.param if o.used is None else o.used).register_post_accumulate_grad_hook(self._hook(bucket, i))
            for bucket in self.buckets
            for i, o in enumerate(bucket.owed)
        ]

    def last_backward(self) -> None:
        """From now on a gradient that arrives is complete: called before the backward of the last micro-batch."""
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.owed)))
        self._armed, self._next = True, 0

    def finish(self) -> None:
        """Start what backward did not complete, wait for all; every `.grad` is then summed: a view of its bucket, or a
        copy of it in the parameter's dtype."""
        if not self._armed:
            self.last_backward()  # no backward ran here (a rank without work): it still takes part
        for bucket in self.buckets:
            for i in sorted(bucket.missing):
                self._take(bucket, i)
        self._start_ready()
        for bucket in self.buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
            bucket.handle = None
            for o, view in zip(bucket.owed, bucket.views, strict=bucket.flat is not None):
                if view.dtype != o.param.dtype:
                    o.param.grad = view.to(o.param.dtype)
        self._armed = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: Bucket, index: int):  # type: ignore[no-untyped-def]
        def ready(param: Tensor) -> None:
            if self._armed:
                self._take(bucket, index)
                self._start_ready()

        return ready

    def _take(self, bucket: Bucket, index: int) -> None:
        """Move one gradient into the bucket; `.grad` becomes the view, so the sum needs no copy back."""
        param = bucket.owed[index].param
        bucket.missing.discard(index)
        if bucket.flat is None:
            param.grad = torch.zeros_like(param) if param.grad is None else _own_memory(param.grad)
            return
        view = bucket.views[index]
        if param.grad is None:
            view.zero_()
        elif param.grad is not view:
            view.copy_(param.grad)
        param.grad = view if view.dtype == param.dtype else None

    def _start_ready(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            bucket = self.buckets[self._next]
            bucket.handle = bucket.group.all_reduce(bucket.content, self.op, async_op=True, tag=TAG)
            self._next += 1


def _own_memory(grad: Tensor) -> Tensor:
    """A gradient that may be changed: autograd can leave one that shares its memory with another tensor."""
    alone = grad.is_contiguous() and grad.untyped_storage().nbytes() == grad.nbytes
    return grad if alone else grad.clone(memory_format=torch.contiguous_format)


def _fill_buckets(owed: Sequence[Owed], bucket_bytes: int, marked: bool, reduce: torch.dtype | None) -> list[Bucket]:
    """Consecutive parameters of one group, dtype and device share a bucket until it is full."""

    def alone(o: Owed) -> bool:
        fills = o.param.nbytes >= min(bucket_bytes, ALONE_BYTES)
        return fills and not marked and reduce in (None, o.param.dtype)

    runs: list[list[Owed]] = []
    open_runs: dict[tuple, tuple[list[Owed], int]] = {}
    for o in owed:
        key = (o.group.label, o.param.dtype, o.param.device)
        size = o.param.numel() * (reduce or o.param.dtype).itemsize
        if alone(o):
            runs.append([o])
            continue
        run, filled = open_runs.get(key, ([], 0))
        if not run or filled + size > bucket_bytes:
            run, filled = [], 0
            runs.append(run)
        run.append(o)
        open_runs[key] = (run, filled + size)
    buckets = []
    for run in runs:
        first = run[0].param
        if alone(run[0]):
            buckets.append(Bucket(run[0].group, run, None, [], torch.empty(0)))
            continue
        sizes = [o.param.numel() for o in run]
        numbers = sum(sizes) + len(run) * marked
        flat = torch.zeros(numbers, dtype=reduce or first.dtype, device=first.device)
        *pieces, marks = flat.split([*sizes, len(run) * marked])
        views = [piece.view(o.param.shape) for piece, o in zip(pieces, run, strict=True)]
        buckets.append(Bucket(run[0].group, run, flat, views, marks))
    return buckets
