"""When a backward begins at a module's output, and when it ends: for code that has no say in the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def in_backward() -> bool:
    """Whether this thread is inside a backward (a checkpointed forward that is computed again is)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Call `fn` when the backward that runs now has accumulated every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def tensors_with_grad(value: Any) -> Iterator[Tensor]:
    """The tensors within any nested value that a backward may come through."""
    yield from (x for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad)


def when_backward_reaches(output: Any, fn: Callable[[], None]) -> None:
    """Call `fn` as soon as a backward has the gradient of any tensor in `output`."""
    for x in tensors_with_grad(output):
        x.register_hook(lambda grad: fn())
