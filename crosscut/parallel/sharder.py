"""When sharded parameters are whole: gathered before a use, prefetched, let go after it; gradients reduced on the way.

Forward gathers a block's units before the block runs, and begins the gather of the block that ran next last time.
Backward does the same from the other end. A block's backward is over when that of the next one begins: autograd runs
what was made later first, so nothing of the block is left by then. Its parameters are let go at once, and the reduction
of its gradients runs beside the backward of the blocks before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from crosscut.parallel.shard import Unit

FORWARD, BACKWARD, GRADIENTS = "parameters/forward", "parameters/backward", "gradients/step"


@dataclass(eq=False)
class Block:
    """A module and the units of its parameters. `rest`: what is in no other block, in use from end to end."""

    units: list[Unit]
    module: nn.Module | None = None  # None: whoever runs the block calls before_forward and after_forward
    next_forward: Block | None = None  # which block ran after it in the first forward, and in the first backward
    next_backward: Block | None = None
    done: bool = False  # its backward is over, or it has none


class Sharder:
    """Drives the units of a model through forward and backward.

    blocks: in the order of registration; rest: the block around them.
    release_after_use: what is kept cut is let go after each use, and gathered again in backward; else at `release`.
    reduce_always: gradients are reduced after every backward; else only after one announced by `last_backward`.
    """

    def __init__(self, blocks: Sequence[Block], rest: Block, *, release_after_use: bool, reduce_always: bool) -> None:
        self.blocks, self.rest = list(blocks), rest
        self.release_after_use, self.reduce_always = release_after_use, reduce_always
        self.units = [unit for block in [*self.blocks, rest] for unit in block.units]
        # Gradients are reduced in one order on every rank, about that of backward, whichever are there first.
        self._order = [*reversed(self.blocks), rest]
        self._next = 0  # the first of them whose reduction has not begun
        self._last = False  # the backward that comes is the last of this step
        self._running = False  # a backward is
        self._reduced = 0  # backwards since `finish` that reduced gradients
        self._at: Block | None = None  # the block that began last, in the pass at hand
        self._current: Block | None = None  # the block whose backward runs
        self._uses: Counter[Block] = Counter()  # of each block, in the forward at hand, that backward must go through
        self._in_flight: tuple[Unit, bool] | None = None  # whose reduction is under way, and whether it is the last
        for block in [*self.blocks, rest]:
            if block.module is not None:
                self._watch(block, block.module)
        self.release()

    def _watch(self, block: Block, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: self.before_forward(block))
        module.register_forward_hook(lambda _, args, output: self.after_forward(block, output, args))

    # ---- forward --------------------------------------------------------------------------------------------------

    def before_forward(self, block: Block) -> None:
        """Make the block's parameters whole, and begin to make the next block's."""
        if self._running or not self.units:  # recomputed for a backward, which has gathered it
            return
        if block is self.rest:
            self._uses, self._at = Counter(), None
            self._check_fresh()
        if self._at is not None and self._at.next_forward is None:
            self._at.next_forward = block
        self._at = block
        _gather(block, block.next_forward, FORWARD)

    def after_forward(self, block: Block, output: Any, inputs: Sequence[Any] = ()) -> None:
        """Let the block's parameters go, and see to it that they are there for its backward."""
        if self._running or not self.units:
            return
        # A block that hands its input on has computed nothing: the gradient of its output says nothing of it.
        outputs = [t for t in _tensors(output) if t.requires_grad and not any(t is x for x in inputs)]
        if self.release_after_use or not torch.is_grad_enabled():
            _release(block)
        if outputs:
            uses = self._uses
            uses[block] += 1
            register_multi_grad_hook(outputs, lambda _: self._before_backward(block, uses), mode="any")

    # ---- backward -------------------------------------------------------------------------------------------------

    def last_backward(self) -> None:
        """The next backward completes the gradients of the step."""
        self._last = True

    def _before_backward(self, block: Block, uses: Counter[Block]) -> None:
        if not self._running:
            self._running, self._at, self._current = True, None, None
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self._at is not None and self._at.next_backward is None:
            self._at.next_backward = block
        self._at = block
        uses[block] -= 1
        if block is not self.rest:  # whose backward goes on to the end
            before, self._current = self._current, block
            if before is not None and not uses[before]:
                self._done(before)
        _gather(block, block.next_backward, BACKWARD)

    def _done(self, block: Block) -> None:
        """The backward of a block is over."""
        block.done = True
        if self.release_after_use:
            _release(block)
        while self._next < len(self._order) and self._order[self._next].done:
            if self.reduce_always or self._last:
                self._reduce(self._order[self._next])
            else:
                for unit in self._order[self._next].units:
                    unit.keep_narrow()
            self._next += 1

    def _end_backward(self) -> None:
        """All backwards are over, also of blocks that had none."""
        for block in self._order:
            if not block.done:
                self._done(block)
        self._reduced += self.reduce_always or self._last
        for block in self._order:
            block.done = False
        self._next, self._running = 0, False

    # ---- gradients ------------------------------------------------------------------------------------------------

    def _reduce(self, block: Block) -> None:
        for unit in block.units:
            if unit.requires_grad:
                self._settle()
                unit.start_reduce(GRADIENTS)
                self._in_flight = unit, self._last

    def _settle(self) -> None:
        """Wait for the reduction under way. One at a time: it had the backward of a block to run beside, and more
        would hold more whole gradients."""
        if self._in_flight is not None:
            (unit, last), self._in_flight = self._in_flight, None
            unit.finish_reduce()
            if last:
                unit.start_sums(GRADIENTS)

    def finish(self, backwards: int = 1) -> None:
        """End a step of as many reductions: wait for all. A rank that ran fewer backwards takes part with zeros.

        Each unit's `grad` is then complete; `publish` makes them the shards' `.grad`.
        """
        while self._reduced < backwards:
            self._last = self._last or self._reduced == backwards - 1
            self._end_backward()
        self._settle()
        for unit in self.units:
            unit.finish_sums()
        self._reduced, self._last = 0, False
        self.release()

    def publish(self) -> None:
        """Add the reduced gradients to the shards' `.grad`."""
        for unit in self.units:
            unit.publish()

    # ---- parameters -----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let all go that is kept cut."""
        for unit in self.units:
            unit.release()

    def reset(self) -> None:
        """Forget what an error in an earlier step has left: gradients half reduced, parameters gathered."""
        self._settle()
        for unit in self.units:
            unit.forget_gradients()
        for block in self._order:
            block.done = False
        self._next = self._reduced = 0
        self._last = self._running = False
        self.release()

    def regather(self, tag: str = "parameters/step") -> None:
        """The shards were updated: make what is kept whole whole again, all units at once."""
        stale = [unit for unit in self.units if unit.keeps_whole and unit.requires_grad]
        for unit in stale:
            unit.shards_changed()
            unit.start_gather(tag)
        for unit in stale:
            unit.gather(tag)

    def _check_fresh(self) -> None:
        changed = next((name for unit in self.units if (name := unit.changed()) is not None), None)
        if changed is not None:
            raise ValueError(
                f"{changed} was changed on this rank, and the others have not seen it: make the optimizer with "
                f"model.optimizer(...), and after other changes call model.share_updates()"
            )


def _gather(block: Block, following: Block | None, tag: str) -> None:
    """Make a block's units whole, and begin with those of the following one."""
    for unit in block.units:
        unit.start_gather(tag)
    for unit in block.units:
        unit.gather(tag)
    for unit in following.units if following is not None else ():
        unit.start_gather(tag)


def _release(block: Block) -> None:
    for unit in block.units:
        unit.release()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors that a block gave out. Raises ValueError for what may hide some: their backward would go unseen."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
    elif not (output is None or isinstance(output, (int, float, str))):
        raise ValueError(
            f"a module of a list returned a {type(output).__name__}; under a store it must return tensors, or tuples, "
            f"lists or dicts of them"
        )
