"""The tests of stores are worth what they catch: each bug here is seeded into them, and parity must go red, or a rank
name it. The same runs without the bug are green (test_store.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from crosscut.comm.errors import CommError, RankError
from crosscut.layout.layout import Layout
from crosscut.models.transformer import next_token_loss
from crosscut.parallel import distribute as engine
from crosscut.parallel import shard, store
from crosscut.parallel.shard import Unit
from crosscut.parallel.sharder import Sharder
from crosscut.testing.parity import assert_parity
from tests.parallel import models

Patch = Callable[[pytest.MonkeyPatch], None]


def average_over_ranks(patch: pytest.MonkeyPatch) -> None:
    real = store.Unit
    patch.setattr(store, "Unit", lambda *args, **kw: real(*args, **kw, average=True))


def forget_the_other_axes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unit, "start_sums", lambda self, tag="": None)


def keep_the_last_micro_batch_only(patch: pytest.MonkeyPatch) -> None:
    real = Unit.finish_reduce

    def finish(self: Unit) -> None:
        self.grad = None if self._reducing is not None else self.grad
        real(self)

    patch.setattr(Unit, "finish_reduce", finish)


def another_ranks_rows(patch: pytest.MonkeyPatch) -> None:
    real = shard.collect
    patch.setattr(shard, "collect", lambda chunks, whole: real(chunks.flip(0), whole))


def never_gather_the_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sharder, "regather", lambda self, tag="": None)


def gather_stale_shards(patch: pytest.MonkeyPatch) -> None:
    real = Unit._to_send

    def send(self: Unit) -> Tensor:
        self.__dict__.setdefault("stale", real(self).clone())
        return self.__dict__["stale"]

    patch.setattr(Unit, "_to_send", send)


def count_shards_on_one_rank_only(patch: pytest.MonkeyPatch) -> None:
    def counts(self: Any, name: str) -> bool:
        param, coords = self.plan.params[name], self.ctx.coords
        return all(coords[a] == 0 for a in coords if a not in param.cut_axes)

    patch.setattr(engine.DistributedModel, "counts", counts)


def count_replicas_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.DistributedModel, "counts", lambda self, name: True)


def sum_tied_ends_without_effect(patch: pytest.MonkeyPatch) -> None:
    real = store.Store.reduced
    patch.setattr(store.Store, "reduced", lambda self, name: real(self, name).clone())  # type: ignore[union-attr]


def publish_twice(patch: pytest.MonkeyPatch) -> None:
    real = Unit.publish

    def publish(self: Unit) -> None:
        grad = self.grad
        real(self)
        self.grad = grad
        real(self)

    patch.setattr(Unit, "publish", publish)


def lose_the_rows_that_are_left(patch: pytest.MonkeyPatch) -> None:
    """Those after the last full chunk: where dim 0 does not divide."""
    patch.setattr(shard, "spread", lambda whole, chunks: _spread_full(whole, chunks))


def _spread_full(whole: Tensor | None, chunks: Tensor) -> None:
    chunks.zero_()
    if whole is not None:
        full = whole.numel() // chunks.size(1)
        chunks[:full].copy_(whole.reshape(-1)[: full * chunks.size(1)].view(full, -1))


CASES: list[tuple[Patch, str, int, str, int]] = [
    (average_over_ranks, "dp=2", 1, "plain", 1),
    (average_over_ranks, "dp=2", 3, "plain", 1),
    (forget_the_other_axes, "rep=2,dp=2", 2, "plain", 1),
    (forget_the_other_axes, "dp=2,tp=2", 1, "gqa", 1),
    (keep_the_last_micro_batch_only, "dp=2", 2, "plain", 2),
    (keep_the_last_micro_batch_only, "dp=2", 3, "plain", 2),
    (another_ranks_rows, "dp=2", 1, "plain", 1),
    (another_ranks_rows, "dp=2", 3, "plain", 1),
    (never_gather_the_update, "dp=2", 1, "plain", 1),
    (gather_stale_shards, "dp=2", 3, "plain", 1),
    (count_shards_on_one_rank_only, "dp=2", 1, "plain", 1),
    (count_replicas_on_every_rank, "rep=2,dp=2", 1, "plain", 1),
    (sum_tied_ends_without_effect, "pp=2,dp=2", 1, "tied", 2),
    (publish_twice, "dp=2", 3, "plain", 1),
    (lose_the_rows_that_are_left, "dp=5", 1, "plain", 1),
    (lose_the_rows_that_are_left, "dp=5", 3, "plain", 1),
]


@pytest.mark.parametrize("seed_bug, mesh, zero, variant, micro", CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_seeded_bug_is_caught(
    seed_bug: Patch, mesh: str, zero: int, variant: str, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises((AssertionError, CommError, RankError, ValueError)):
        run(mesh, zero, variant, micro)


@pytest.mark.parametrize("mesh, zero, variant, micro", sorted({c[1:] for c in CASES}))
def test_the_same_runs_are_green_without_the_bug(mesh: str, zero: int, variant: str, micro: int) -> None:
    run(mesh, zero, variant, micro)


def run(mesh: str, zero: int, variant: str, micro: int) -> None:
    build, dims = models.transformer(variant)
    layout = Layout.of(mesh, zero=zero, micro_batches=micro)
    rows = max(layout.mesh.size(layout.batch_axes), 2) * micro
    data = models.token_batches(rows, 5, 48, steps=2)
    assert_parity(build, dims, data, layout, loss_fn=next_token_loss, max_norm=0.05)
