"""Mixed precision: bf16 in forward and backward, fp32 where the optimizer works.

Without tp a layout multiplies the same numbers as one device that takes the batch in the same pieces, and only fp32
sums differ in order: so steps are compared to fp32 rounding, where one sum in bf16 would be off by a thousand times
more. With tp, sums of bf16 numbers are split: there the bound is the noise of correct runs.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crosscut.comm.launch import spawn
from crosscut.layout.layout import Layout
from crosscut.layout.spec import Dims
from crosscut.models.mlp import mean_square
from crosscut.models.transformer import next_token_loss
from crosscut.parallel.batch import local_batch
from crosscut.parallel.distribute import distribute
from crosscut.testing.parity import OneDevice, assert_parity, under_layout
from crosscut.testing.verdict import compare
from tests.parallel import models
from tests.parallel.test_parity import check_bytes
from tests.parallel.test_store import Odd

BF16, FP32 = torch.bfloat16, torch.float32
ZEROS = (0, 1, 2, 3)


def check_step(build, dims, layout, batch, loss_fn, bound=2e-6, **options):  # type: ignore[no-untyped-def]
    """One step, clipped, is that of one device in bf16 which takes the rows in the same pieces. (But one device adds up
    the two gradients of a tied weight in bf16, and two stages in fp32.)"""
    run, reports = under_layout(build, dims, layout, [batch], loss_fn, max_norm=0.05, **options)
    one = OneDevice(build, loss_fn, max_norm=0.05, dtype=BF16)
    one.step(batch, torch.arange(len(batch[0])).chunk(layout.micro_batches * layout.mesh.size(layout.batch_axes)))
    tied = {t.names[0] for t in reports[0].plan.tied}
    for d in compare(one.trace, run, bound):
        loose = tied and (d.kind in ("norm", "parameter") or d.name in tied)  # clipped by another norm
        assert d.error_over_bound <= (2.0**-8 / bound if loose else 1), d
    assert not run.conflicts
    assert {g.dtype for g in [*run.grads[0].values(), *run.params.values()]} == {FP32}
    return reports


def cases():  # type: ignore[no-untyped-def]
    turn = 0
    for mesh in ("dp=1", "dp=2", "dp=3", "dp=4", "rep=2,dp=2", "pp=2", "pp=3,dp=2"):
        for zero in ZEROS if "dp" in mesh else (0,):
            if not (zero == 2 and "pp" in mesh):
                turn += 1
                variant = ("plain", "all", "tied")[turn % 3] if "pp=3" not in mesh else "threes"
                yield pytest.param(mesh, zero, variant, 1 + turn % 3, id=f"{mesh}-zero{zero}-{variant}-m{1 + turn % 3}")


@pytest.mark.parametrize("mesh, zero, variant, micro", list(cases()))
def test_a_step_is_that_of_one_device(mesh: str, zero: int, variant: str, micro: int) -> None:
    layout = Layout.of(mesh, zero=zero, micro_batches=micro, compute="bf16")
    rows = layout.mesh.size(layout.batch_axes) * micro
    batch = models.token_batches(rows * (1 + (rows < 3)), 4, models.VARIANTS[variant]["vocab"], 1)[0]
    reports = check_step(*models.transformer(variant), layout, batch, next_token_loss, bucket_bytes=(0, 900)[micro % 2])
    check_bytes(reports, 1)


def test_the_cases_are_there() -> None:
    found = [c.values for c in cases()]
    assert {(m, z) for m, z, _, _ in found} >= {(f"dp={n}", z) for n in (1, 2, 3, 4) for z in ZEROS}
    assert {variant for _, _, variant, _ in found} == {"plain", "all", "tied", "threes"}
    assert {(z, micro > 1) for _, z, _, micro in found} == {(z, m) for z in ZEROS for m in (False, True)}
    assert {bucketed for _, z, _, micro in found if z == 0 for bucketed in [micro % 2]} == {0, 1}


@pytest.mark.parametrize("mesh", ["dp=1", "dp=3"])
@pytest.mark.parametrize("zero", ZEROS)
def test_parameters_of_every_kind(zero: int, mesh: str) -> None:
    """0-d, frozen, unused, shared, in a layer that runs twice; a buffer; float inputs. Micro-batches."""
    layout = Layout.of(mesh, zero=zero, micro_batches=2, compute="bf16")
    batch = models.feature_batches(layout.mesh.world_size * 4, 6, 1)[0]
    check_step(Odd, Dims({}), layout, batch, mean_square)


@pytest.mark.parametrize(
    "mesh, options",
    [("tp=3", {}), ("dp=2,tp=2", {"sp": True, "zero": 1}), ("pp=2,dp=2,tp=2", {"zero": 3, "sp": True})],
)
def test_with_cut_weights_within_the_noise_of_correct_runs(mesh, options) -> None:  # type: ignore[no-untyped-def]
    layout = Layout.of(mesh, **options)
    variant = "threes" if mesh == "tp=3" else "all"
    rows = 2 * layout.micro_batches * layout.mesh.size(layout.batch_axes)
    data = models.token_batches(rows, 6, models.VARIANTS[variant]["vocab"], 2)
    build, dims = models.transformer(variant)
    check_bytes(assert_parity(build, dims, data, layout, loss_fn=next_token_loss, dtype="bf16"), 2)


# ---- where numbers are wide


class Weight(nn.Module):
    """One number, used in a layer and, tied, in another."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        nn.init.constant_(self.layers[0].weight, start)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.layers[0](x) + 0 * self.layers[1](x)


def mean_of(output, labels):  # type: ignore[no-untyped-def]
    return output.mean()


def model_of(ctx, build, mesh="dp=2", loss_fn=mean_of, **options):  # type: ignore[no-untyped-def]
    layout = Layout.of(mesh, compute="bf16", **options)
    return distribute(build, Dims({}), layout, ctx, loss_fn=loss_fn)


def batch_of(model, values):  # type: ignore[no-untyped-def]
    x = torch.tensor(values).view(-1, 1)
    return local_batch(x, None, model.layout, model.ctx)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", ZEROS)
def test_gradients_of_micro_batches_add_up_in_fp32(zero: int, reduce: str) -> None:
    """Two rows of 1, then many of 2^-9: bf16 has no number between 1 and 1 + 2^-7, and a sum in it would stay at 1."""
    count = 64

    def run(ctx):  # type: ignore[no-untyped-def]
        model = model_of(ctx, Weight, zero=zero, micro_batches=count, reduce=reduce)
        model.forward_backward(batch_of(model, [1.0, 1.0] + [2.0**-9] * 2 * (count - 1)))
        (grad,) = [p.grad for _, p in model.named_parameters() if p.numel()] or [torch.zeros(1)]
        return float(grad.sum()) * count

    exact = 1 + 2.0**-9 * (count - 1)
    # Reduced once a step, the sum is rounded to bf16 once (one part in 256); every micro-batch, each part is exact.
    allowed = 2.0**-8 * exact if reduce == "bf16" and zero < 2 else 1e-6
    assert abs(spawn(run, world_size=2, backend="threads")[0] - exact) <= allowed


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("fused", [False, True])
def test_small_updates_are_not_lost(zero: int, fused: bool) -> None:
    """A hundred steps of 10^-4 from 1: in bf16 each would be rounded away. The module follows its master."""

    def run(ctx):  # type: ignore[no-untyped-def]
        model = model_of(ctx, Weight, zero=zero)
        optimizer = model.optimizer(torch.optim.SGD, lr=1e-4, fused=fused)
        batch = batch_of(model, [1.0, 1.0])
        first = model.forward_backward(batch).loss
        for _ in range(100):
            optimizer.zero_grad()
            model.forward_backward(batch)
            optimizer.step()
        used = model.evaluate(batch).loss
        held = [p.item() for _, p in model.named_parameters() if p.numel()]
        assert all(abs(value - 0.99) < 1e-5 for value in held)
        for _, p in model.named_parameters():
            p.data.fill_(2.0)
        model.share_updates()
        return first, used, model.evaluate(batch).loss

    for found in spawn(run, world_size=2, backend="threads"):
        assert found == (1.0, float(torch.tensor(0.99).bfloat16()), 2.0)


@pytest.mark.parametrize("mesh, zero", [("dp=2", 0), ("dp=2", 1), ("dp=3", 2), ("dp=2", 3), ("pp=2", 0)])
def test_what_is_wide_and_what_is_narrow(mesh: str, zero: int) -> None:
    """Parameters, gradients, optimizer state and norm are fp32; what the module computes with is bf16; a tied weight is
    one tensor; the norm of ones counts every number once."""
    build, dims = models.transformer("tied")
    whole = sum(p.numel() for p in build().parameters())
    inputs, labels = models.token_batches(6, 4, 48, 1)[0]
    seen = []

    def run(ctx):  # type: ignore[no-untyped-def]
        layout = Layout.of(mesh, zero=zero, compute="bf16")
        model = distribute(build, dims, layout, ctx, loss_fn=next_token_loss)
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
        module = model.module
        for m in module.modules():
            m.register_forward_pre_hook(lambda m, _: seen.extend(p.dtype for p in m.parameters(recurse=False)))
        if mesh != "pp=2":
            assert module.head.weight is module.embed.weight
        model.forward_backward(local_batch(inputs, labels, layout, ctx))
        assert all(p.grad is None for n, p in module.named_parameters() if p.dtype == BF16)
        norm = model.clip_grad_norm_(None)
        optimizer.step()
        found = [t for _, p in model.named_parameters() for t in (p, p.grad, *optimizer.state[p].values())]
        assert {norm.dtype, *(t.dtype for t in found)} == {FP32}
        for _, p in model.named_parameters():
            p.grad = torch.ones_like(p)
        return float(model.clip_grad_norm_(None))

    for norm in spawn(run, world_size=Layout.of(mesh).mesh.world_size, backend="threads"):
        assert abs(norm**2 - whole) < 1e-6 * whole
    assert set(seen) == {BF16}


@pytest.mark.parametrize("zero", ZEROS)
def test_gradients_add_up_over_calls(zero: int) -> None:
    batches = models.token_batches(6, 5, 48, 2)
    build, dims = models.transformer("tied")

    def run(ctx):  # type: ignore[no-untyped-def]
        layout = Layout.of("dp=3", zero=zero, micro_batches=2, compute="bf16")
        model = distribute(build, dims, layout, ctx, loss_fn=next_token_loss)
        cut, singles = [local_batch(x, y, layout, ctx) for x, y in batches], []
        for one in cut:
            model.forward_backward(one)
            singles.append({n: p.grad.clone() for n, p in model.named_parameters()})
            for _, p in model.named_parameters():
                p.grad = None
        for one in cut:
            model.forward_backward(one)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, singles[0][name] + singles[1][name], rtol=1e-6, atol=1e-8)

    spawn(run, world_size=3, backend="threads")


def test_a_failed_step_leaves_nothing_behind() -> None:
    """ZeRO-1 keeps the gradients of the first micro-batch for the second, which fails."""
    (inputs, labels), *_ = models.token_batches(8, 5, 48, 1)
    build, dims = models.transformer("plain")

    def run(ctx):  # type: ignore[no-untyped-def]
        layout = Layout.of("dp=2", zero=1, micro_batches=2, compute="bf16")
        model = distribute(build, dims, layout, ctx, loss_fn=next_token_loss)
        batch, calls = local_batch(inputs, labels, layout, ctx), []
        model.forward_backward(batch)
        want = {name: p.grad.clone() for name, p in model.named_parameters()}

        def fail(*_):  # type: ignore[no-untyped-def]
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("on purpose")

        hook = model.module.layers[2].register_forward_pre_hook(fail)
        for _, p in model.named_parameters():
            p.grad = None
        with pytest.raises(KeyError):
            model.forward_backward(batch)
        assert any(unit._kept is not None for unit in model._sharder.units)
        hook.remove()
        model.forward_backward(batch)
        assert all(torch.equal(p.grad, want[name]) for name, p in model.named_parameters())

    spawn(run, world_size=2, backend="threads")


# ---- the dtype of the reduction


@pytest.mark.parametrize("compute, reduce", [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp64")])
@pytest.mark.parametrize("mesh, zero", [("dp=3", 0), ("dp=2", 2), ("rep=2,dp=2", 3), ("pp=2,dp=2", 1)])
def test_gradients_travel_in_the_dtype_of_the_reduction(mesh: str, zero: int, compute: str, reduce: str) -> None:
    """Bytes as predicted (a tied weight between stages included); `.grad` is fp32, rounded to `reduce` on the way."""
    build, dims = models.transformer("tied")
    batch = models.token_batches(8 * Layout.of(mesh).mesh.size("dp"), 4, 48, 1)
    traces = []
    for way in ("fp32", reduce):
        layout = Layout.of(mesh, zero=zero, micro_batches=2, compute=compute, reduce=way)
        run, reports = under_layout(build, dims, layout, batch, next_token_loss, bucket_bytes=600 * (zero % 2))
        check_bytes(reports, 1)
        traces.append(run)
    wide, narrow = traces
    for name, grad in wide.grads[0].items():
        off = float((narrow.grads[0][name] - grad).norm()) / float(grad.norm())
        assert narrow.grads[0][name].dtype == FP32
        assert 0 < off < 2.0**-7 if reduce == "bf16" else off < 1e-6, (name, off)


@pytest.mark.parametrize("options", [{"compute": "fp16"}, {"compute": "bf16", "reduce": "fp16"}])
def test_fp16_is_refused_by_name(options) -> None:  # type: ignore[no-untyped-def]
    layout = Layout.of("dp=1", **options)
    with pytest.raises(ValueError, match=r"precision (compute|reduce)='fp16' cannot be executed yet.*use bf16") as err:
        spawn(lambda ctx: distribute(Weight, Dims({}), layout, ctx, loss_fn=mean_of), world_size=1, backend="threads")
    assert "\n" not in str(err.value)
