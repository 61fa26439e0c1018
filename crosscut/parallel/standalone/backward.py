"""When a backward begins at a module's output, and when it ends: for code that has no say in the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves


def in_backward() -> bool:
    """Whether this thread is inside a backward (a checkpointed forward that is computed again is)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Call `fn` when the backward that runs now has accumulated every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def when_backward_reaches(output: Any, fn: Callable[[], None], but_not: Any = ()) -> bool:
    """Call `fn` as soon as a backward has the gradient of any tensor within `output`, whatever its nesting; once a
    backward. Returns whether there is one.

    but_not: tensors that say nothing of the module, such as inputs that it hands on.
    """
    others = {id(x) for x in tree_leaves(but_not)}
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad and id(x) not in others]
    if found:
        register_multi_grad_hook(found, lambda grad: fn(), mode="any")
    return bool(found)
