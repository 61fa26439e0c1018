"""`fully_shard`: parameters, gradients and optimizer state of any module kept in parts, in any training loop.

ZeRO-3 (Rajbhandari et al., 2020, arXiv:1910.02054), also known as fully sharded data parallelism (Zhao et al., 2023,
arXiv:2304.11277). Between uses the module holds shards under its own names. A block (a child of a ModuleList, say) is
gathered before its forward, let go after it, gathered again when backward comes to its output, and let go when
backward comes to the next block. Then its gradients are reduced too, unless the block is to come again. Where that
cannot be known (several forwards before a backward, a backward repeated), they are reduced at the end of backward. All
of this depends on which modules run, and not on which gradients there are: ranks that use other parameters of a block
still communicate in one order. How a shard is gathered and reduced is said in shard.py and units.py; here is when.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from crosscut.comm.errors import CommError
from crosscut.comm.group import Group
from crosscut.parallel.data import Owed
from crosscut.parallel.standalone.backward import at_end_of_backward, in_backward, when_backward_reaches
from crosscut.parallel.standalone.data_parallel import WRAP, AverageReducer
from crosscut.parallel.standalone.ranks import Ranks, check_module, prepare
from crosscut.parallel.standalone.units import AverageUnit, find_blocks, make_units, watch_optimizers

M = TypeVar("M", bound=nn.Module)
FORWARD, BACKWARD, GRADIENTS = "parameters/forward", "parameters/backward", "gradients/step"


def fully_shard(
    module: M,
    compute_dtype: torch.dtype | None = None,
    group: Ranks = None,
    *,
    units: Sequence[nn.Module] | None = None,
) -> M:
    """Keep every parameter of `module` cut over the ranks along its first dim. Collective; returns the module.

    compute_dtype: the dtype that parameters are gathered in and floating inputs are cast to (fp16, bf16): shards,
    gradients and optimizer state keep the module's own, and gradients are reduced in it (in fp32 at least). group: a
    crosscut Group or Context, or None for the world of torch.distributed (without one, a single rank). units: the
    submodules that are gathered each by itself; by default every child of a ModuleList. The rest, and whatever several
    of them share, is gathered for the whole forward. Every rank runs the same units in the same order, each through
    its forward, and what it computes leaves by its outputs.

    Make the optimizer afterwards, over `module.parameters()`: any that updates each number by itself (others are
    refused at their first step). When `loss.backward()` returns, each shard's `.grad` is the average over the ranks,
    as after data_parallel, in the shard's shape and dtype; a parameter that no rank used keeps `.grad` None.
    `no_sync`, `full_parameters`, `full_state_dict`, `load_full_state_dict` and `clip_grad_norm_` of crosscut take the
    module. 0-d parameters stay whole. Wrapping parts first and the whole afterwards works; the parts are then its
    units.

    Raises ValueError for a module wrapped already, for modules that differ between ranks (the first name, with both
    values), and at its first step for an optimizer that holds the parameters from before.
    """
    check_module("fully_shard", module)
    if compute_dtype is not None and not isinstance(compute_dtype, torch.dtype):
        raise ValueError(f"fully_shard: compute_dtype={compute_dtype!r} is no torch.dtype (the group is group=...)")
    if WRAP in module.__dict__:
        raise ValueError(f"fully_shard: this {type(module).__name__} is wrapped already; wrap a module once")
    joined = prepare("fully_shard", module, group)
    inner = [m.__dict__[WRAP] for m in module.modules() if WRAP in m.__dict__]
    for wrap in inner:
        if not isinstance(wrap, _Wrap):
            raise ValueError("fully_shard: a part of the module is under data_parallel already; wrap it once")
        wrap.close()
    chosen = find_blocks(module, units, [(w.module, [b.module for b in w.blocks]) for w in inner])
    made, replicated = make_units(module, chosen, joined, compute_dtype, [u for w in inner for u in w.units])
    watch_optimizers()
    homes: list[nn.Module] = [*chosen, module]
    blocks = [_Block(m, u) for m, u in zip(homes, made, strict=True) if u or m is module]
    module.__dict__[WRAP] = _Wrap(module, joined, blocks[:-1], blocks[-1], replicated, compute_dtype)
    return module


@dataclass(eq=False)
class _Block:
    """A module whose units are gathered together. `done`: the backward at hand will not come to it (again)."""

    module: nn.Module
    units: list[AverageUnit]
    next_forward: _Block | None = None  # which block ran after it in the first forward, and in the first backward
    next_backward: _Block | None = None
    done: bool = False

    def gather(self, following: _Block | None, tag: str) -> None:
        """Make all of its parameters whole, while those of the following block begin."""
        for unit in [*self.units, *(following.units if following is not None else ())]:
            unit.start_gather(tag)
        for unit in self.units:
            unit.gather(tag)

    def release(self) -> None:
        for unit in self.units:
            unit.release()


class _Wrap:
    """Drives a module's blocks through forward and backward. `rest`: the module itself, in use from end to end."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        blocks: list[_Block],
        rest: _Block,
        replicated: list[tuple[str, nn.Parameter]],
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.module, self.group, self.blocks, self.rest, self.compute_dtype = module, group, blocks, rest, compute_dtype
        self.sync, self.full = True, False
        self.units = [unit for block in [*blocks, rest] for unit in block.units]
        self.order = [*reversed(blocks), rest]  # gradients are reduced in one order on every rank, about backward's
        self._next = 0  # the first of them that is not reduced yet
        self._running: weakref.ref[_EndOfBackward] | None = None  # the backward at hand
        self._current: _Block | None = None  # whose backward or, in the first forward, forward runs
        self._inside: _Block | None = None  # whose forward runs
        self._reducing: deque[AverageUnit] = deque()
        self._forwards = 0  # of the module, since the last backward
        self._uses: Counter[_Block] = Counter()  # of each block in the last of them, that backward has not come to
        self._exact = False  # the backward at hand is that of one forward
        self._replicated, self._flags = replicated, [False] * len(replicated)
        self._reducer = AverageReducer([], 1, lambda: True)
        self.release()
        self._hooks: list[Any] = []
        for block in [*blocks, rest]:
            for unit in block.units:
                unit.when_gradient(partial(self._arrived, block))
            self._hooks += [
                block.module.register_forward_pre_hook(self._enter(block), with_kwargs=True),
                block.module.register_forward_hook(self._leave(block), with_kwargs=True, always_call=block is rest),
            ]

    def close(self) -> None:
        """Let another wrap have the units."""
        for hook in self._hooks:
            hook.remove()
        del self.module.__dict__[WRAP]

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("a module under fully_shard cannot be copied: copy before, or keep its full_state_dict")

    # -- forward ------------------------------------------------------------------------------------------------------

    def _enter(self, block: _Block) -> Callable[..., Any]:
        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.full:
                return None
            if in_backward():  # computed again: stays whole until backward has gone on
                block.gather(None, BACKWARD)
            else:
                self._begin_forward(block)
            if self.compute_dtype is None:
                return None
            return tree_map_only(Tensor, self._cast, args), tree_map_only(Tensor, self._cast, kwargs)

        return before_forward

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype) if x.is_floating_point() else x

    def _begin_forward(self, block: _Block) -> None:
        if block is self.rest:
            self.release()  # also what a backward without an end has left
            self._current, self._uses = None, Counter()
            self._forwards += torch.is_grad_enabled()
            for unit in self.units:
                unit.refresh()
            if self._flags != (flags := [p.requires_grad for _, p in self._replicated]):
                self._flags, self._reducer = flags, self._new_reducer()
        elif self._inside is not None and self._inside is not block:
            names = [next(n for n, m in self.module.named_modules() if m is b.module) for b in (block, self._inside)]
            raise ValueError(f"fully_shard: {names[0]!r} runs inside {names[1]!r}; name only one of them in units=")
        else:
            self._inside = block
        if self._current is not None and self._current.next_forward is None and self._current is not block:
            self._current.next_forward = block
        self._current = block
        block.gather(block.next_forward, FORWARD)

    def _leave(self, block: _Block) -> Callable[..., None]:
        def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.full:
                return
            reached = partial(self._begin_backward, block)
            watched = torch.is_grad_enabled() and when_backward_reaches(output, reached, but_not=(args, kwargs))
            if not in_backward():
                self._inside = None
                self._uses[block] += watched
                block.release()
                if block is self.rest and sys.exc_info()[0] is not None:
                    self.release()

        return after_forward

    # -- backward -----------------------------------------------------------------------------------------------------

    def _begin_backward(self, block: _Block) -> None:
        """Backward has come to a block's output: what it needs is gathered, and the block before it is let go."""
        if self._running is None:
            end = _EndOfBackward(self)
            self._running = end.ref
            at_end_of_backward(end)
            self._exact = self._forwards == 1
            self._next, self._current = 0, None
            for other in self.blocks:
                other.done = self._exact and not self._uses[other]
            self.rest.gather(None, BACKWARD)
        if block is self.rest:
            return
        before, self._current = self._current, block
        self._uses[block] -= 1
        if before is not None and before is not block:
            if before.next_backward is None:
                before.next_backward = block
            before.done = self._exact and self._uses[before] <= 0
        for unit in (u for other in self.blocks if other is not block for u in other.units):
            if unit.is_whole:  # and not on its way
                unit.release()
        block.gather(block.next_backward, BACKWARD)
        while self._next < len(self.blocks) and self.order[self._next].done:
            self._reduce(self.order[self._next])
            self._next += 1

    def _arrived(self, block: _Block, param: int) -> None:
        """A parameter's gradient has come."""
        self._begin_backward(self.rest)
        if block in self.order[: self._next]:
            raise ValueError(
                "fully_shard: a gradient came after those of its block were reduced; use checkpoint(..., "
                "use_reentrant=False), and no graph from before the last step"
            )

    def _reduce(self, block: _Block) -> None:
        for unit in block.units:
            if unit.trained() and self.sync:
                unit.start_reduce(GRADIENTS)
                self._reducing.append(unit)
                while len(self._reducing) > 2:  # so that the gradients of few units are in flight at a time
                    self._reducing.popleft().finish_reduce()
            else:
                unit.keep()

    def end_backward(self) -> None:
        """Reduce what has not been, wait for all, let all parameters go."""
        for block in self.order[self._next :]:
            self._reduce(block)
        if self.sync:
            self._reducer.finish()
        self._forwards = 0
        self.release()

    def _new_reducer(self) -> AverageReducer:
        """For 0-d parameters. Without hooks: it runs at the end, so that ranks keep one order."""
        trained = [Owed(name, p, self.group) for name, p in self._replicated if p.requires_grad]
        reducer = AverageReducer(trained, 25_000_000, lambda: True)
        reducer.close()
        return reducer

    def release(self) -> None:
        """Let everything go; also mends what an error has left."""
        while self._reducing:
            self._reducing.popleft().finish_reduce()
        self._running = self._inside = None
        for unit in self.units:
            unit.release()


class _EndOfBackward:
    """Called when a backward has ended. One that an error ends lets it go uncalled, and gathered storage with it: only
    autograd holds this object."""

    def __init__(self, wrap: _Wrap) -> None:
        self._wrap: _Wrap | None = wrap
        self.ref = weakref.ref(self)

    def __call__(self) -> None:
        wrap, self._wrap = self._wrap, None
        if wrap is not None:
            wrap.end_backward()

    def __del__(self) -> None:
        if self._wrap is not None and self._wrap._running is self.ref:
            with contextlib.suppress(CommError):
                self._wrap.release()
