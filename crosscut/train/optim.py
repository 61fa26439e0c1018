"""The optimizer: which parameters decay, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from crosscut.train.config import OptimizerSection


def learning_rate(step: int, num_steps: int, cfg: OptimizerSection) -> float:
    """The rate of step `step` (0-based) of `num_steps`: linear warm-up, then half a cosine down to `min_lr_ratio * lr`.

    Source: Loshchilov & Hutter 2017, "SGDR", equation 5, without restarts. The first step has lr / warmup_steps, not 0.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(num_steps - cfg.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * cosine)


def decay_group(weight_decay: float) -> Callable[[str, tuple[int, ...]], dict[str, Any]]:
    """For `DistributedModel.optimizer(group_fn=...)`: matrices are pulled towards zero, norms and biases are not.

    By the shape of the whole parameter, so that it is the same under every layout.
    """

    def options(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        return {"weight_decay": weight_decay if len(shape) >= 2 else 0.0}

    return options


def optimizer_class(cfg: OptimizerSection) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The torch class and its arguments, weight decay apart (that stands in the groups).

    Fused: one pass over each parameter, which on a CPU is three times as fast.
    """
    if cfg.name == "adamw":
        return torch.optim.AdamW, {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps, "fused": True}
    return torch.optim.SGD, {"lr": cfg.lr, "momentum": cfg.momentum, "fused": True}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate of the step to come."""
    for group in optimizer.param_groups:
        group["lr"] = rate
