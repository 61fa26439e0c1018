"""Real processes under Gloo: one layout of each kind and a three-way product, against one device in fp64; and the
ledger counts there what it counts among threads."""

from __future__ import annotations

import pytest

from crosscut.layout.layout import Layout
from crosscut.models.mlp import mean_square
from crosscut.models.transformer import next_token_loss
from crosscut.testing import parity
from tests.parallel import models
from tests.parallel.test_parity import check_bytes


def check(pool, built, layout: Layout, data, loss_fn) -> None:  # type: ignore[no-untyped-def]
    build, dims = built
    ref = parity.single_device(build, data, loss_fn)
    reports = pool.run(
        parity._rank_steps, build, dims, layout.adjusted(compute="fp64"), data, loss_fn, 0.1, None, 0, 20_000,
        world_size=layout.mesh.world_size,
    )  # fmt: skip
    wrong = [d for d in parity.compare(ref, parity.assemble(reports)) if not d.error_over_bound <= 1]
    assert not wrong, wrong[:5]
    check_bytes(reports, len(data))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2", "dp=3", "pp=4", "dp=2,tp=2", "pp=2,dp=2,tp=2"])
def test_transformer(pool, mesh: str) -> None:  # type: ignore[no-untyped-def]
    layout = Layout.of(mesh, schedule="1f1b", micro_batches=2)
    data = models.token_batches(12, 5, 48)
    check(pool, models.transformer("tied"), layout, data, next_token_loss)


@pytest.mark.parametrize("form", ["gather", "pairs"])
def test_mlp(pool, form: str) -> None:  # type: ignore[no-untyped-def]
    layout = Layout.of("pp=2,tp=2", schedule="gpipe", micro_batches=2)
    check(pool, models.mlp(form), layout, models.feature_batches(8, 24), mean_square)
