"""The suite is worth what it catches: each bug here is seeded into the engine, and parity must go red (or a rank's
missing call must be named). The same runs without the bug are green (test_parity.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.comm import pairs
from crosscut.comm.errors import CommError, RankError
from crosscut.layout.layout import Layout
from crosscut.models.transformer import next_token_loss
from crosscut.parallel import distribute as engine
from crosscut.parallel.data import BucketReducer
from crosscut.testing.parity import assert_parity
from tests.parallel import models

Patch = Callable[[pytest.MonkeyPatch], None]


def run(mesh: str, variant: str = "plain", micro: int = 1) -> None:
    build, dims = models.transformer(variant)
    layout = Layout.of(mesh, micro_batches=micro)
    data = models.token_batches(4 * micro, 5, 48, steps=2)
    assert_parity(build, dims, data, layout, loss_fn=next_token_loss, max_norm=0.05, bucket_bytes=20_000)


def drop_one_all_reduce(patch: pytest.MonkeyPatch) -> None:
    real = pairs._Leave.forward

    def forward(ctx: Any, x: Tensor, group: Any, tag: str) -> Tensor:
        return x.clone() if tag.startswith("layers.1.mlp/") else real(ctx, x, group, tag)

    patch.setattr(pairs._Leave, "forward", staticmethod(forward))


def drop_one_backward_all_reduce(patch: pytest.MonkeyPatch) -> None:
    real = pairs._Enter.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, None, None) if ctx.tag.startswith("layers.1.attn/") else real(ctx, grad)

    patch.setattr(pairs._Enter, "backward", staticmethod(backward))


def scale_one_gradient(patch: pytest.MonkeyPatch) -> None:
    real = engine.DistributedModel.forward_backward

    def step(self: engine.DistributedModel, batch: Any) -> Any:
        out = real(self, batch)
        grad = dict(self.named_parameters())["layers.0.attn_norm.weight"].grad
        assert grad is not None
        grad.mul_(1 / self.layout.mesh.size("tp"))
        return out

    patch.setattr(engine.DistributedModel, "forward_backward", step)


def skip_one_bucket(patch: pytest.MonkeyPatch) -> None:
    real = BucketReducer._start_ready

    def start(self: BucketReducer) -> None:
        bucket = self.buckets[self._next] if self._next < len(self.buckets) else None
        if bucket is not None and self._next == 1 and bucket.group.rank == 1 and not bucket.missing:
            bucket.handle = type("Skipped", (), {"wait": lambda self: None})()  # this rank never calls
            self._next += 1
        real(self)

    patch.setattr(BucketReducer, "_start_ready", start)


def another_micro_batchs_labels(patch: pytest.MonkeyPatch) -> None:
    real = engine.DistributedModel._run

    def run_(self: engine.DistributedModel, batch: Any, actions: Any, kind: str) -> Any:
        if self.stage.is_last:
            labels = [m.labels for m in batch.micro]
            batch = replace(batch, micro=tuple(replace(m, labels=labels[i - 1]) for i, m in enumerate(batch.micro)))
        return real(self, batch, actions, kind)

    patch.setattr(engine.DistributedModel, "_run", run_)


def count_a_replicated_parameter_twice(patch: pytest.MonkeyPatch) -> None:
    real = engine.DistributedModel.counts
    patch.setattr(engine.DistributedModel, "counts", lambda self, name: name == "norm.weight" or real(self, name))


def forget_the_norms(patch: pytest.MonkeyPatch) -> None:
    real = engine.derive

    def derive(*args: Any, **kw: Any) -> Any:
        plan = real(*args, **kw)
        params = {n: replace(p, sum_axes=()) if "norm" in n else p for n, p in plan.params.items()}
        return replace(plan, params=params)

    patch.setattr(engine, "derive", derive)


def bias_before_the_sum(patch: pytest.MonkeyPatch) -> None:
    from crosscut.parallel import tensor

    def forward(self: torch.nn.Linear, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight, self.bias)

    patch.setattr(tensor, "_forward_without_bias", forward)


def forget_the_tied_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.DistributedModel, "_sum_tied", lambda self: None)


def mean_of_rank_means(patch: pytest.MonkeyPatch) -> None:
    from crosscut.parallel.batch import MicroBatch

    patch.setattr(MicroBatch, "num_terms", property(lambda self: self.inputs.size(0)))


def swap_two_ranks(patch: pytest.MonkeyPatch) -> None:
    real = pairs.own_slice
    patch.setattr(pairs, "own_slice", real)
    from crosscut.parallel import materialize

    cut = materialize.draw

    def draw(name: str, shape: Any, ranges: Any, init: Any, seed: int) -> Tensor:
        if name == "layers.2.mlp.up.weight" and ranges[0][0][1] - ranges[0][0][0] < shape[0]:
            ((start, stop),) = ranges[0]
            ranges = (((shape[0] - stop, shape[0] - start),), *ranges[1:])
        return cut(name, shape, ranges, init, seed)

    patch.setattr(materialize, "draw", draw)


CASES: list[tuple[Patch, str, str, int]] = [
    (drop_one_all_reduce, "tp=2", "plain", 1),
    (drop_one_backward_all_reduce, "tp=2", "plain", 1),
    (scale_one_gradient, "tp=2", "plain", 1),
    (skip_one_bucket, "dp=2", "plain", 1),
    (another_micro_batchs_labels, "pp=2", "plain", 2),
    (count_a_replicated_parameter_twice, "dp=2", "plain", 1),
    (count_a_replicated_parameter_twice, "tp=2", "plain", 1),
    (forget_the_norms, "dp=2,tp=2", "plain", 1),
    (bias_before_the_sum, "tp=2", "bias", 1),
    (forget_the_tied_end, "pp=2", "tied", 2),
    (mean_of_rank_means, "dp=2", "plain", 1),
    (swap_two_ranks, "tp=2", "plain", 1),
]


@pytest.mark.parametrize("seed_bug, mesh, variant, micro", CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_seeded_bug_is_caught(
    seed_bug: Patch, mesh: str, variant: str, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises((AssertionError, CommError, RankError)):
        run(mesh, variant, micro)


@pytest.mark.parametrize("mesh, variant, micro", sorted({c[1:] for c in CASES}))
def test_the_same_runs_are_green_without_the_bug(mesh: str, variant: str, micro: int) -> None:
    run(mesh, variant, micro)
