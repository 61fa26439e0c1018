"""Whether an optimizer updates each number by itself, so that parts of tensors may be updated apart: tried, not listed.

The optimizer is run on a small tensor in one piece, and again with an optimizer for each of its parts. SGD, Adam and
their like give the same; one that looks at whole tensors (LBFGS, Muon, Adafactor, LAMB) gives another result or fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def require_elementwise(cls: type[torch.optim.Optimizer], kw: Mapping[str, Any], what: str) -> None:
    """Raise ValueError, naming the class, unless parts of tensors come out as they do in whole tensors.

    `what`: who asks, for the message. A class that cannot be tried this way says `elementwise = True` itself.
    """
    if getattr(cls, "elementwise", False):
        return
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        reason = _difference(cls, kw)
    if reason is not None:
        raise ValueError(
            f"{what}: {cls.__name__} needs whole tensors ({reason}), and each rank holds parts of them; use an "
            f"element-wise optimizer such as AdamW or SGD, or {cls.__name__} with data_parallel"
        )


def _difference(cls: type[torch.optim.Optimizer], kw: Mapping[str, Any]) -> str | None:
    """What is different in parts, or None."""
    start = torch.sin(torch.arange(1.0, 25.0)).view(6, 4)
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(part.clone()) for part in start.view(-1).split([9, 14, 1])]
    try:
        _three_steps(cls, kw, [whole])
        _three_steps(cls, kw, parts)
    except Exception as error:
        return f"tried on a small tensor it raises {type(error).__name__}: {str(error).splitlines()[0]}"
    together = torch.cat([part.detach() for part in parts])
    same = torch.allclose(whole.detach().view(-1), together, rtol=1e-3, atol=1e-6, equal_nan=True)
    return None if same else "in parts it takes another step"


def _three_steps(cls: type[torch.optim.Optimizer], kw: Mapping[str, Any], params: list[nn.Parameter]) -> None:
    """With gradients of 0.001 to 1000, so that what clips them inside shows."""
    optimizers = [cls([p], **kw) for p in params]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "lr" in group:  # a warm-up that begins at 0 would hide everything
                group["lr"] = torch.full_like(group["lr"], 0.01) if isinstance(group["lr"], Tensor) else 0.01
    for step in range(3):
        grad = torch.cos(torch.arange(24.0) * (step + 1)) * 10.0 ** (3 * step - 3)
        for p, piece in zip(params, grad.split([p.numel() for p in params]), strict=True):
            p.grad = piece.view(p.shape).clone()
        for optimizer in optimizers:
            optimizer.step()
