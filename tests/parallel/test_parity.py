"""Every product of dp, tp and pp that the sizes admit computes the single-device step, in fp64, in the threads world;
and what the ledger counts is what the rules predict, to the byte."""

from __future__ import annotations

import pytest
import torch

from crosscut.comm.launch import spawn
from crosscut.layout.layout import Layout
from crosscut.models.mlp import mean_square
from crosscut.models.transformer import next_token_loss
from crosscut.parallel.batch import local_batch
from crosscut.parallel.distribute import distribute
from crosscut.testing import parity
from crosscut.testing.parity import RankReport, assert_parity
from tests.parallel import models

WORLDS = (1, 2, 3, 4, 6, 8)
STEPS = 3
# The whole matrix for plain and for everything at once; where only 3 and 6, or 8, divide, a model of such sizes; each
# feature alone on some.
EVERYWHERE = ("plain", "all")
ONLY = {"threes": (3, 6), "eights": (8,)}
SOME = ((1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 2, 2))


def check_bytes(reports: list[RankReport], steps: int = STEPS) -> None:
    """predicted = counted: bytes by tag, axis and op; calls too where the rules say how many."""
    for rank, report in enumerate(reports):
        predicted: dict[tuple[str, str, str], list[int]] = {}
        calls: dict[tuple[str, str, str], int | None] = {}
        for rule in report.plan.rules(report.coords["pp"]):
            key = (rule.tag, rule.axis, rule.op)
            entry = predicted.setdefault(key, [0])
            entry[0] += rule.bytes * steps
            before = calls.setdefault(key, 0)
            calls[key] = None if rule.calls is None or before is None else before + rule.calls * steps
        counted = {(tag, *key): value for tag, by in report.by_tag.items() for key, value in by.items()}
        assert set(counted) == set(predicted), f"rank {rank}: {sorted(set(counted) ^ set(predicted))}"
        for key, (num_calls, num_bytes) in counted.items():
            assert num_bytes == predicted[key][0], (
                f"rank {rank}, {key}: counted {num_bytes}, predicted {predicted[key][0]}"
            )
            if calls[key] is not None:
                assert num_calls == calls[key], f"rank {rank}, {key}: counted {num_calls} calls, predicted {calls[key]}"


def admitted(pp: int, tp: int, *, layers: int, divides_tp: int) -> bool:
    return layers % pp == 0 and divides_tp % tp == 0


def transformer_cases():  # type: ignore[no-untyped-def]
    turn = 0
    for variant, sizes in models.VARIANTS.items():
        heads = sizes.get("kv_heads", sizes["heads"])
        for world in WORLDS:
            for pp, dp, tp in models.factorisations(world):
                needed = any(size in ONLY.get(variant, ()) for size in (pp, tp))
                here = variant in EVERYWHERE or needed or (variant not in ONLY and (pp, dp, tp) in SOME)
                if here and admitted(pp, tp, layers=sizes["layers"], divides_tp=heads):
                    turn += 1  # with micro-batches: the two schedules and two counts take turns
                    for schedule, micro in (("1f1b", 1), (("gpipe", "1f1b")[turn % 2], 2 + turn % 3 % 2)):
                        yield pytest.param(
                            variant, pp, dp, tp, schedule, micro, id=f"{variant}-pp{pp}dp{dp}tp{tp}-{schedule}{micro}"
                        )


@pytest.mark.parametrize("variant, pp, dp, tp, schedule, micro", list(transformer_cases()))
def test_transformer(variant: str, pp: int, dp: int, tp: int, schedule: str, micro: int) -> None:
    build, dims = models.transformer(variant)
    layout = Layout.of({"pp": pp, "dp": dp, "tp": tp}, schedule=schedule, micro_batches=micro)
    data = models.token_batches(dp * micro, 5, models.VARIANTS[variant]["vocab"], STEPS)
    reports = assert_parity(build, dims, data, layout, loss_fn=next_token_loss, bucket_bytes=20_000)
    check_bytes(reports)


def mlp_cases():  # type: ignore[no-untyped-def]
    for form in ("gather", "pairs"):
        for world in WORLDS:
            for pp, dp, tp in models.factorisations(world):
                layers = 12 if form == "pairs" else 6 if pp in (3, 6) else 8
                pairs_whole = form == "gather" or tp == 1 or layers // pp % 2 == 0 if layers % pp == 0 else False
                if layers % pp == 0 and 24 % tp == 0 and pairs_whole:
                    for micro in (1, 2):
                        yield pytest.param(form, layers, pp, dp, tp, micro, id=f"{form}-pp{pp}dp{dp}tp{tp}-m{micro}")


@pytest.mark.parametrize("form, layers, pp, dp, tp, micro", list(mlp_cases()))
def test_mlp(form: str, layers: int, pp: int, dp: int, tp: int, micro: int) -> None:
    build, dims = models.mlp(form, layers)
    layout = Layout.of({"pp": pp, "dp": dp, "tp": tp}, micro_batches=micro)
    data = models.feature_batches(dp * micro * 2, 24, STEPS)
    reports = assert_parity(build, dims, data, layout, loss_fn=mean_square, max_norm=0.01, bucket_bytes=1)
    check_bytes(reports)


def test_the_cases_are_there() -> None:
    """The matrix holds what its name promises: every variant, three-way products, a middle stage, axes of 1 to 4."""
    cases = [c.values for c in transformer_cases()]
    assert {c[0] for c in cases} == set(models.VARIANTS)
    assert any(pp > 1 and dp > 1 and tp > 1 for _, pp, dp, tp, _, _ in cases)
    for position in (1, 2, 3):
        assert {1, 2, 3, 4} <= {c[position] for c in cases}
    build, _ = models.transformer("tied")
    module = build()
    assert module.head.weight is module.embed.weight


def test_naive_and_bucketed_agree() -> None:
    build, dims = models.transformer("plain")
    data = models.token_batches(6, 5, 48)
    for size in (0, 1, 997, 10**9):
        assert_parity(build, dims, data, Layout.of("dp=3"), loss_fn=next_token_loss, bucket_bytes=size)


def test_rep_axis() -> None:
    build, dims = models.transformer("plain")
    data = models.token_batches(8, 5, 48)
    check_bytes(assert_parity(build, dims, data, Layout.of("rep=2,dp=2"), loss_fn=next_token_loss))


def test_vocab_not_cut() -> None:
    build, dims = models.transformer("plain")
    layout = Layout.of("tp=2", cuts={"heads": "tp", "mlp": "tp", "batch": "dp", "layers": "pp"})
    check_bytes(assert_parity(build, dims, models.token_batches(4, 5, 48), layout, loss_fn=next_token_loss))


@pytest.mark.parametrize(
    "mesh", ["dp=1", "dp=2", "tp=2", "pp=2", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2", "pp=2,dp=2,tp=2", "dp=3"]
)
@pytest.mark.parametrize("variant", ["plain", "tied", "bias", "gqa"])
def test_norm_counts_every_parameter_once(mesh: str, variant: str) -> None:
    build, dims = models.transformer(variant)
    whole = sum(p.numel() for p in build().parameters())
    layout = Layout.of(mesh, compute="fp64")
    for norm in spawn(_norm_of_ones, build, dims, layout, world_size=layout.mesh.world_size, backend="threads"):
        assert round(norm**2) == whole
        assert abs(norm**2 - whole) < 1e-6 * whole


def _norm_of_ones(ctx, build, dims, layout):  # type: ignore[no-untyped-def]
    model = distribute(build, dims, layout, ctx, loss_fn=next_token_loss)
    for _, p in model.named_parameters():
        p.grad = torch.ones_like(p)
    return float(model.clip_grad_norm_(1.0))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("bucket_bytes", [0, 20_000])
def test_gradients_add_up_over_calls(mesh: str, bucket_bytes: int) -> None:
    """Two batches without zero_grad between them: the sum of both, not the first one summed over ranks twice."""
    build, dims = models.transformer("tied")
    layout = Layout.of(mesh, compute="fp64", micro_batches=2)
    batches = models.token_batches(8, 5, 48, 2)
    for singles, together in spawn(
        _two_calls, build, dims, layout, batches, bucket_bytes, world_size=layout.mesh.world_size, backend="threads"
    ):
        for name, total in together.items():
            torch.testing.assert_close(total, singles[0][name] + singles[1][name], rtol=1e-12, atol=1e-14)


def _two_calls(ctx, build, dims, layout, batches, bucket_bytes):  # type: ignore[no-untyped-def]
    model = distribute(build, dims, layout, ctx, loss_fn=next_token_loss, bucket_bytes=bucket_bytes)
    grads = lambda: {n: p.grad.clone() for n, p in model.named_parameters()}  # noqa: E731
    cut = [local_batch(x, y, layout, ctx) for x, y in batches]
    singles = []
    for one in cut:
        model.forward_backward(one)
        singles.append(grads())
        for _, p in model.named_parameters():
            p.grad.zero_()  # zero_grad(set_to_none=False): the views stay
    for one in cut:
        model.forward_backward(one)
    return singles, grads()


def test_frozen_parameters() -> None:
    """No gradient, no communication, no change; what is upstream of them still trains."""
    build, dims = models.transformer("plain")

    def frozen():  # type: ignore[no-untyped-def]
        module = build()
        for name, p in module.named_parameters():
            p.requires_grad = not name.startswith(("embed", "layers.0", "layers.2.mlp", "norm"))
        return module

    for mesh in ("dp=2", "tp=2", "pp=2", "pp=4", "dp=2,tp=2"):
        check_bytes(
            assert_parity(frozen, dims, models.token_batches(4, 5, 48), Layout.of(mesh), loss_fn=next_token_loss)
        )


def test_evaluation_is_no_step() -> None:
    """The loss of the same batch, no gradient, and no byte counted as a step's."""
    build, dims = models.transformer("plain")
    inputs, labels = models.token_batches(8, 5, 48, 1)[0]

    def run(ctx):  # type: ignore[no-untyped-def]
        layout = Layout.of("pp=2,dp=2,tp=2", compute="fp64", micro_batches=2)
        model = distribute(build, dims, layout, ctx, loss_fn=next_token_loss)
        out = model.evaluate(local_batch(inputs, labels, layout, ctx))
        return out.loss, ctx.ledger.totals("step"), [p.grad for _, p in model.named_parameters()]

    ref = parity.single_device(build, [(inputs, labels)], next_token_loss).losses[0]
    for loss, counted, grads in spawn(run, world_size=8, backend="threads"):
        assert abs(loss - ref) < 1e-12
        assert counted == {}
        assert all(g is None for g in grads)
