"""The learning rate of each step, and which parameters decay."""

import math
from itertools import pairwise

import pytest
import torch

from crosscut.train.config import load_config
from crosscut.train.optim import decay_group, learning_rate, optimizer_class, set_learning_rate


def optimizer(**keys):
    return load_config(None, {f"optimizer.{key}": value for key, value in keys.items()}).optimizer


def test_warm_up_is_linear_and_the_cosine_ends_at_the_ratio():
    cfg = optimizer(lr=0.4, warmup_steps=4, min_lr_ratio=0.25)
    rates = [learning_rate(step, 12, cfg) for step in range(13)]
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[4] == pytest.approx(0.4)
    assert rates[8] == pytest.approx((0.4 + 0.1) / 2)  # half way down
    assert rates[12] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert learning_rate(99, 12, cfg) == pytest.approx(0.1)  # a run that is made longer than it said


def test_no_warm_up_and_no_steps():
    assert learning_rate(0, 10, optimizer(lr=0.5, warmup_steps=0)) == 0.5
    assert learning_rate(0, 0, optimizer(lr=0.5, warmup_steps=0, min_lr_ratio=1.0)) == 0.5
    assert math.isfinite(learning_rate(3, 2, optimizer(warmup_steps=2)))


def test_matrices_decay_norms_and_biases_do_not():
    options = decay_group(0.3)
    assert options("layers.0.attn.q.weight", (8, 4)) == {"weight_decay": 0.3}
    assert options("norm.weight", (8,)) == {"weight_decay": 0.0}
    assert options("scale", ()) == {"weight_decay": 0.0}


def test_the_optimizers_and_their_options():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    cls, options = optimizer_class(optimizer(name="adamw", betas=(0.7, 0.8), eps=1e-3, lr=0.2))
    group = cls([weight], **options).param_groups[0]
    assert (cls, group["betas"], group["eps"], group["lr"]) == (torch.optim.AdamW, (0.7, 0.8), 1e-3, 0.2)
    cls, options = optimizer_class(optimizer(name="sgd", momentum=0.4))
    made = cls([weight], **options)
    assert (cls, made.param_groups[0]["momentum"]) == (torch.optim.SGD, 0.4)
    set_learning_rate(made, 0.01)
    assert made.param_groups[0]["lr"] == 0.01
