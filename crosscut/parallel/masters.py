"""Mixed precision without a store: the module computes with narrow copies of wide parameters.

The parameters that the optimizer, clipping and checkpoints see, and their gradients, are wide (fp32): an update of less
than half a unit in the last place of bf16 would be lost in it, and so would a micro-batch's part of a gradient
(Micikevicius et al. 2018, arXiv:1710.03740, section 3.1). Under a store the shards are the wide ones (shard.py).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn


class Masters:
    """The wide parameters of a module that computes in `compute`, by their first names, and the copies of them that
    stand in the module from now on.

    module: holds parameters of the wide dtype; those called `but_not`, and any that are in `compute` already or hold no
    floating-point numbers, stay as they are. A tied parameter has one copy. What backward leaves in a copy's `.grad`
    is added to its master's at once, before later hooks on the copy run.
    """

    def __init__(self, module: nn.Module, compute: torch.dtype, but_not: Collection[str] = ()) -> None:
        self.held: dict[str, nn.Parameter] = {}
        self.copies: dict[str, nn.Parameter] = {}
        copies: dict[int, nn.Parameter] = {}
        for name, p in module.named_parameters():
            if name not in but_not and p.is_floating_point() and p.dtype != compute:
                copies[id(p)] = copy = nn.Parameter(p.detach().to(compute), p.requires_grad)
                self.held[name], self.copies[name] = p, copy
                if p.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(_move, p))
        for name, p in list(module.named_parameters(remove_duplicate=False)):
            if id(p) in copies:
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner)._parameters[leaf] = copies[id(p)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the copies anew. Called before every use: a master may have been changed by anything since, and not
        every optimizer leaves a trace of it (the fused ones count no version)."""
        for name, p in self.held.items():
            self.copies[name].copy_(p)


def _move(master: nn.Parameter, copy: Tensor) -> None:
    grad, copy.grad = copy.grad, None
    assert grad is not None
    master.grad = grad.to(master.dtype) if master.grad is None else master.grad.add_(grad)
