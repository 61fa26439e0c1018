"""The gradient norm of the whole model, each logical element counted once.

A replicated gradient is counted by the rank at coordinate 0 of every axis that replicates it, a cut one by every rank
for its part, a tied one by its first stage. One all_reduce over the world follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from crosscut.comm.group import Group

TAG = "clip/step"


def global_norm(counted: Iterable[Tensor], world: Group, norm_type: float, dtype: torch.dtype, kind: str) -> Tensor:
    """The norm of all gradients of the model, 0-d, the same on every rank. `counted`: those that this rank counts.

    norm_type: any p > 0, or inf (a maximum, not a power sum). Accumulates in `dtype` (fp32, or fp64).
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive (or inf)")
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in counted if g.numel()]
    device = world.device
    if math.isinf(norm_type):
        largest = torch.stack(norms).max() if norms else torch.zeros((), dtype=dtype, device=device)
        return world.all_reduce(largest, "max", tag=TAG, kind=kind)
    powers = torch.stack(norms).pow(norm_type).sum() if norms else torch.zeros((), dtype=dtype, device=device)
    return world.all_reduce(powers, tag=TAG, kind=kind).pow(1.0 / norm_type)


def scale_gradients(params: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale every gradient by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype))
