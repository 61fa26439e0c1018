"""`data_parallel`: the gradients of any module averaged over the ranks, in any training loop.

The module stays what it is, under its own names: hooks on its parameters fill flat buckets while backward still runs,
and each bucket is averaged as soon as it is full (crosscut/parallel/data.py). When `loss.backward()` returns, every
`.grad` is the average over the ranks, as DDP leaves it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crosscut.comm.group import Group
from crosscut.parallel.data import Bucket, BucketReducer, Owed
from crosscut.parallel.standalone.backward import at_end_of_backward, in_backward, when_backward_reaches
from crosscut.parallel.standalone.ranks import Ranks, check_module, own, owner, prepare

M = TypeVar("M", bound=nn.Module)
WRAP = "_crosscut_wrap"  # where a module keeps what its hooks share, for no_sync to find


def data_parallel(module: M, group: Ranks = None, *, bucket_bytes: int = 25_000_000) -> M:
    """Make every backward through `module` average its gradients over the ranks. Collective; returns the module.

    group: a crosscut Group or Context, or None for the world of torch.distributed (any back end; without one, a single
    rank). bucket_bytes: how much is averaged in one call.

    All parameters and buffers, frozen ones too, become rank 0's; buffers are each rank's own from then on. A gradient
    is the sum over the ranks divided by their number, so the result is that of one device if each rank's loss is the
    mean over equally many rows. A parameter that only some ranks use counts as zeros on the others; one that no rank
    uses keeps `.grad` None, so that weight decay leaves it alone. Forward may run several times before backward, and
    backward several times before a step: gradients add up, and what is averaged already stays as it is.
    `with crosscut.no_sync(module):` around a backward keeps its gradients to the rank until the next one outside.
    `.grad` is a view of its bucket: clone what is to outlive the next backward.

    Raises ValueError for a module that is wrapped already, in whole or in part, for modules that differ between ranks
    (the first name, with both values), for sparse gradients, and in backward for a parameter whose gradient comes
    twice (reentrant checkpointing).
    """
    check_module("data_parallel", module)
    _refuse(module)
    joined = prepare("data_parallel", module, group)
    for p in module.parameters():
        own(p, "data_parallel")
    wrap = _Wrap(module, joined, bucket_bytes)
    module.register_forward_pre_hook(wrap.before_forward)
    module.register_forward_hook(wrap.after_forward)
    module.__dict__[WRAP] = wrap
    return module


def _refuse(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        if owner(p):
            raise ValueError(f"data_parallel: parameter {name!r} is {owner(p)}'s already; wrap a module once")
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(f"data_parallel: {name!r} makes sparse gradients, which no bucket holds; use sparse=False")


class _Wrap:
    """What a module's hooks share."""

    def __init__(self, module: nn.Module, group: Group, bucket_bytes: int) -> None:
        self.module, self.group, self.bucket_bytes = module, group, bucket_bytes
        self.sync = True
        self._seen = self._trained()
        self.reducer = self._new_reducer()

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Parameters may have been frozen, thawed or converted; the last backward may have ended in an error."""
        if in_backward() or not torch.is_grad_enabled():
            return
        if module is not self.module:
            if any(p.requires_grad for p in module.parameters()):
                raise ValueError(
                    "this is a copy of a module under data_parallel, and nothing averages its gradients; copy first, "
                    "then wrap both"
                )
            return
        self.reducer.abandon()
        if self._trained() != self._seen:
            self.reducer.close()
            self._seen, self.reducer = self._trained(), self._new_reducer()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """A rank takes part in a backward also if none of its parameters gets a gradient in it."""
        if torch.is_grad_enabled():
            when_backward_reaches(output, self._begin)

    def __deepcopy__(self, memo: Any) -> _Wrap:
        """A copy of the module (an average of weights, say) keeps its hooks: they tell the two apart."""
        return self

    def _begin(self) -> None:
        self.reducer.begin()

    def _trained(self) -> list[tuple[int, torch.dtype, torch.device]]:
        return [(id(p), p.dtype, p.device) for p in self.module.parameters() if p.requires_grad]

    def _new_reducer(self) -> AverageReducer:
        trained = [Owed(name, p, self.group) for name, p in self.module.named_parameters() if p.requires_grad]
        return AverageReducer(trained, self.bucket_bytes, lambda: self.sync)


class AverageReducer(BucketReducer):
    """Buckets that are averaged, begin with the backward by themselves and leave a gradient None where all ranks do.

    A bucket carries one number more for each parameter: 1 where this rank has a gradient.
    """

    op = "avg"
    marked = True

    def __init__(self, owed: list[Owed], bucket_bytes: int, sync: Callable[[], bool]) -> None:
        self._sync = sync
        self._absent: list[tuple[Bucket, int]] = []  # what this rank has no gradient of
        super().__init__(owed, bucket_bytes)

    def begin(self) -> None:
        """A backward runs: its gradients are complete when they arrive, and at its end all buckets are."""
        if self._sync() and not self._armed and self.buckets:
            self.last_backward()
            at_end_of_backward(self.finish)

    def last_backward(self) -> None:
        """Every gradient is still to come."""
        super().last_backward()
        self._absent.clear()
        for bucket in self.buckets:
            bucket.marks.fill_(1)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all; a gradient that no rank has is None again."""
        super().finish()
        for bucket, index in self._absent:
            if not bucket.marks[index]:
                bucket.owed[index].param.grad = None

    def abandon(self) -> None:
        """Forget a backward that did not come to its end."""
        for bucket in self.buckets:
            if self._armed and bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
        self._armed = False

    def _take(self, bucket: Bucket, index: int) -> None:
        if bucket.owed[index].param.grad is None:
            bucket.marks[index] = 0
            self._absent.append((bucket, index))
        super()._take(bucket, index)

    def _hook(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        take = super()._hook(bucket, index)

        @torch.no_grad()
        def ready(param: Tensor) -> None:
            self.begin()
            if self._armed and index not in bucket.missing:
                raise ValueError(
                    f"parameter {bucket.owed[index].name!r} got its gradient twice in one backward; use checkpoint("
                    f"..., use_reentrant=False)"
                )
            take(param)

        return ready


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Within it a backward through `module` (under data_parallel or fully_shard) leaves each rank its own gradients,
    which add up; the first backward outside takes them along. What counts is where backward runs, not forward.
    """
    wraps = [m.__dict__[WRAP] for m in module.modules() if WRAP in m.__dict__]
    if not wraps:
        raise ValueError(f"no_sync: {type(module).__name__} is not wrapped; call data_parallel or fully_shard first")
    before = [wrap.sync for wrap in wraps]
    for wrap in wraps:
        wrap.sync = False
    try:
        yield
    finally:
        for wrap, sync in zip(wraps, before, strict=True):
            wrap.sync = sync
