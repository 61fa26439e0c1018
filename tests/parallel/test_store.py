"""ZeRO-1, 2 and 3 under every product that the sizes admit compute the single-device step, in fp64, and send what the
rules predict, to the byte."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crosscut.comm.errors import RankError
from crosscut.comm.launch import spawn
from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.layout.rules import derive
from crosscut.layout.spec import Dims
from crosscut.models.mlp import mean_square
from crosscut.models.transformer import next_token_loss
from crosscut.parallel.batch import local_batch
from crosscut.parallel.distribute import distribute
from crosscut.parallel.inspect import spec_from_module
from crosscut.parallel.shard import Unit
from crosscut.testing.parity import assert_parity
from tests.parallel import models
from tests.parallel.test_parity import STEPS, check_bytes

STAGES = (1, 2, 3)


def check(built, layout, data, loss_fn, **options):  # type: ignore[no-untyped-def]
    build, dims = built
    reports = assert_parity(build, dims, data, layout, loss_fn=loss_fn, **options)
    check_bytes(reports, len(data))
    return reports


def check_tokens(variant: str, layout: Layout, built=None, **options):  # type: ignore[no-untyped-def]
    rows = layout.mesh.size(layout.batch_axes) * layout.micro_batches
    sizes = models.VARIANTS[variant]
    data = models.token_batches(max(rows, 2 * rows if rows < 3 else rows), 4, sizes["vocab"], STEPS)
    return check(built or models.transformer(variant), layout, data, next_token_loss, max_norm=0.05, **options)


# Every axis set that a store meets; heads 4 and 8 divide over tp=2, 48 and 24 rows over no dp=5: odd shards.
MESHES = ["dp=1", "dp=2", "dp=3", "dp=4", "dp=5", "rep=2,dp=2", "dp=2,tp=2", "pp=2,dp=2", "pp=2,dp=2,tp=2", "tp=2"]


def cases():  # type: ignore[no-untyped-def]
    turn = 0
    for zero in STAGES:
        for mesh in MESHES:
            if zero == 2 and "pp" in mesh:
                continue
            for variant in ("plain", "all"):
                for sp in (False, True) if "tp=2" in mesh else (False,):
                    turn += 1
                    micro = 3 if (turn + zero) % 2 else 1
                    yield pytest.param(
                        variant, mesh, zero, sp, micro, id=f"{variant}-{mesh}-zero{zero}-m{micro}" + "-sp" * sp
                    )


@pytest.mark.parametrize("variant, mesh, zero, sp, micro", list(cases()))
def test_transformer(variant: str, mesh: str, zero: int, sp: bool, micro: int) -> None:
    check_tokens(variant, Layout.of(mesh, zero=zero, sp=sp, micro_batches=micro))


def test_the_cases_are_there() -> None:
    """Every stage meets every mesh but one, with and without micro-batches, tied, grouped-query, with biases."""
    found = {tuple(c.values) for c in cases()}
    assert {(m, z) for _, m, z, _, _ in found} == {(m, z) for m in MESHES for z in STAGES if not (z == 2 and "pp" in m)}
    assert {(z, micro) for _, _, z, _, micro in found} == {(z, m) for z in STAGES for m in (1, 3)}
    assert {(z, sp) for _, _, z, sp, _ in found} == {(z, s) for z in STAGES for s in (False, True)}
    sizes = models.VARIANTS["all"]
    assert sizes["tied"]
    assert sizes["bias"]
    assert sizes["qk_norm"]
    assert sizes["kv_heads"] < sizes["heads"]
    assert sizes["embed"] % 5
    assert sizes["vocab"] % 5


@pytest.mark.parametrize("reshard", ["use", "step"])
@pytest.mark.parametrize("mesh", ["dp=3", "rep=2,dp=2", "pp=2,dp=2"])
def test_both_ways_to_reshard(mesh: str, reshard: str) -> None:
    check_tokens("tied", Layout.of(mesh, zero=3, reshard=reshard, micro_batches=2))


@pytest.mark.parametrize("zero", STAGES)
def test_store_over_rep_and_dp(zero: int) -> None:
    """One store over two axes: four shards, the outer axis first."""
    keys = ("optimizer", "gradients", "parameters")[:zero]
    text = "mesh.rep = 2\nmesh.dp = 2\nschedule.micro_batches = 2\n" + "".join(
        f'store.{key} = ["rep", "dp"]\n' for key in keys
    )
    check_tokens("all", Layout.from_toml(text))


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("mesh, form", [("dp=3", "gather"), ("dp=2,tp=2", "gather"), ("dp=2,tp=2", "pairs")])
def test_mlp(zero: int, mesh: str, form: str) -> None:
    layout = Layout.of(mesh, zero=zero, micro_batches=2)
    rows = layout.mesh.size(layout.batch_axes) * 4
    # Without biases a layer is one matrix, which travels as it lies in memory.
    check(models.mlp(form, bias=form == "pairs"), layout, models.feature_batches(rows, 24), mean_square, max_norm=0.01)


@pytest.mark.parametrize("zero", STAGES)
def test_in_two_processes_over_shm(zero: int) -> None:
    check_tokens("all", Layout.of("dp=2", zero=zero, micro_batches=2), backend="shm")


def test_gathers_run_ahead_and_reductions_beside_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on: the next block's gather begins before a block computes, in forward and in backward, and
    the reduction of a block is waited for after the backward of the block before it."""
    events: list[str] = []

    def note(method: str, word: str, when):  # type: ignore[no-untyped-def]
        real = getattr(Unit, method)

        def noted(self, tag=""):  # type: ignore[no-untyped-def]
            if self.group.rank == 0 and when(self):
                name = self.pieces[0].name.split(".")
                events.append(f"{word} {name[1] if name[0] == 'layers' else 'rest'}")
            return real(self, tag) if tag else real(self)

        monkeypatch.setattr(Unit, method, noted)

    note("start_gather", "gather", lambda unit: not unit.is_whole and unit._gathering is None)
    note("start_reduce", "reduce", lambda unit: True)
    note("finish_reduce", "reduced", lambda unit: unit._reducing is not None)
    (inputs, labels), *_ = models.token_batches(4, 5, 48, 1)

    def run(ctx):  # type: ignore[no-untyped-def]
        model = build_model(ctx, "dp=2", 3)
        batch = local_batch(inputs, labels, model.layout, ctx)
        model.forward_backward(batch)
        if ctx.rank == 0:
            for i, layer in enumerate(model.module.layers):
                layer.register_forward_pre_hook(lambda *_, i=i: events.append(f"forward {i}"))
                layer.register_full_backward_hook(lambda *_, i=i: events.append(f"backward {i}"))
        ctx.barrier()
        if ctx.rank == 0:
            events.clear()
        model.forward_backward(batch)

    spawn(run, world_size=2, backend="threads")
    forward = "gather rest, gather 0, gather 1, forward 0, gather 2, forward 1, gather 3, forward 2, forward 3"
    backward = (
        "gather rest, gather 3, gather 2, backward 3, reduce 3, gather 1, backward 2, reduced 3, reduce 2, gather 0, "
        "backward 1, reduced 2, reduce 1, backward 0, reduced 1, reduce 0, reduced 0, reduce rest, reduced rest"
    )
    assert ", ".join(events) == f"{forward}, {backward}"


# ---- parameters of every kind


class Odd(nn.Module):
    """A 0-d parameter, one of one row, a frozen one in a trained layer, an unused one, one shared by two layers, a
    layer that runs twice, nested lists, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.linspace(0.5, 1.5, 6).view(1, 6))
        self.first = nn.Linear(6, 7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3))
        self.layers[2][2].weight = self.layers[0][2].weight
        self.layers[1][0].weight.requires_grad = False
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 7))

    def forward(self, x):  # type: ignore[no-untyped-def]
        x = self.first(x * self.row * self.scale) + self.shift
        for i in (0, 1, 2, 1):
            x = x + self.layers[i](x)
        return x


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "dp=3", "rep=2,dp=2"])
@pytest.mark.parametrize("micro", [1, 2])
def test_parameters_of_every_kind(zero: int, mesh: str, micro: int) -> None:
    """Without a table. A layer that runs twice is gathered twice: its bytes are not in the rules, all else is."""
    layout = Layout.of(mesh, zero=zero, micro_batches=micro)
    data = models.feature_batches(layout.mesh.world_size * micro * 2, 6)
    reports = assert_parity(Odd, Dims({}), data, layout, loss_fn=mean_square, max_norm=0.05)
    if zero < 3:
        check_bytes(reports)
    else:
        again = [i for i, r in enumerate(reports) if r.counted.get("dp", {}).get("all_gather", 0) > 0]
        assert len(again) == (layout.mesh.world_size if layout.mesh.size("dp") > 1 else 0)


FROZEN = {
    "some": ("embed", "layers.0", "layers.2.mlp", "norm"),
    "the first": ("embed", "layers.0", "layers.1"),
    "within the first": ("embed", "layers.0.attn"),
    "the last": ("layers.3", "norm", "head"),
    "all but one": ("embed", "layers", "norm"),
}


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters(zero: int, which: str) -> None:
    """They are not reduced; kept cut they are gathered, for backward only where one goes through."""
    build, dims = models.transformer("plain")

    def frozen():  # type: ignore[no-untyped-def]
        module = build()
        for name, p in module.named_parameters():
            p.requires_grad = not name.startswith(FROZEN[which])
        return module

    check_tokens("plain", Layout.of("dp=2", zero=zero, micro_batches=2), (frozen, dims))
    if zero != 2:
        check_tokens("plain", Layout.of("pp=2,dp=2", zero=zero, micro_batches=2), (frozen, dims))


# ---- clip, accumulation, evaluation, the optimizer


def build_model(ctx, mesh, zero, variant="plain", **options):  # type: ignore[no-untyped-def]
    build, dims = models.transformer(variant)
    return distribute(build, dims, Layout.of(mesh, zero=zero, compute="fp64", **options), ctx, loss_fn=next_token_loss)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("mesh", ["dp=2", "dp=3", "rep=2,dp=2", "dp=2,tp=2", "pp=2,dp=2"])
def test_norm_counts_every_parameter_once(zero: int, mesh: str) -> None:
    if zero == 2 and "pp" in mesh:
        mesh = "dp=5"
    build, _ = models.transformer("all")
    whole = sum(p.numel() for p in build().parameters())

    def norms(ctx):  # type: ignore[no-untyped-def]
        model = build_model(ctx, mesh, zero, "all")
        for _, p in model.named_parameters():
            p.grad = torch.ones_like(p)
        two, largest = float(model.clip_grad_norm_(None)), float(model.clip_grad_norm_(0.5, float("inf")))
        return two, largest, {float(p.grad.max()) for _, p in model.named_parameters() if p.numel()}

    for two, largest, scaled in spawn(norms, world_size=Layout.of(mesh).mesh.world_size, backend="threads"):
        assert abs(two**2 - whole) < 1e-6 * whole
        assert largest == 1
        assert len(scaled) == 1
        assert abs(scaled.pop() - 0.5) < 1e-6


@pytest.mark.parametrize("zero", STAGES)
def test_gradients_add_up_over_calls(zero: int) -> None:
    batches = models.token_batches(6, 5, 48, 2)

    def two_calls(ctx):  # type: ignore[no-untyped-def]
        model = build_model(ctx, "dp=3", zero, "tied")
        cut = [local_batch(x, y, model.layout, ctx) for x, y in batches]
        singles = []
        for one in cut:
            model.forward_backward(one)
            singles.append({n: p.grad.clone() for n, p in model.named_parameters()})
            for _, p in model.named_parameters():
                p.grad.zero_()
        for one in cut:
            model.forward_backward(one)
        for name, p in model.named_parameters():
            assert p.grad.shape == p.shape
            torch.testing.assert_close(p.grad, singles[0][name] + singles[1][name], rtol=1e-12, atol=1e-14)

    spawn(two_calls, world_size=3, backend="threads")


@pytest.mark.parametrize("reshard", ["use", "step"])
def test_evaluation_is_no_step_and_leaves_nothing_gathered(reshard: str) -> None:
    (inputs, labels), *_ = models.token_batches(4, 5, 48, 1)

    def run(ctx):  # type: ignore[no-untyped-def]
        model = build_model(ctx, "dp=2", 3, reshard=reshard, micro_batches=2)
        loss = model.evaluate(local_batch(inputs, labels, model.layout, ctx)).loss
        assert ctx.ledger.totals("step") == {}
        assert not any(unit.is_whole for unit in model._sharder.units)
        return loss

    losses = spawn(run, world_size=2, backend="threads")
    whole = spawn(run_whole, inputs, labels, world_size=1, backend="threads")
    assert abs(losses[0] - whole[0]) < 1e-12
    assert losses[0] == losses[1]


def run_whole(ctx, inputs, labels):  # type: ignore[no-untyped-def]
    model = build_model(ctx, "dp=1", 0)
    return model.evaluate(local_batch(inputs, labels, model.layout, ctx)).loss


@pytest.mark.parametrize("zero", STAGES)
def test_the_optimizer_is_torchs_own_with_names_closures_and_schedulers(zero: int) -> None:
    """AdamW with two groups, a closure and a scheduler: the same weights as one device's, by name."""
    batches = models.token_batches(4, 5, 48, 3)

    def run(ctx, mesh, zero):  # type: ignore[no-untyped-def]
        model = build_model(ctx, mesh, zero, "tied")
        optimizer = model.optimizer(
            torch.optim.AdamW, lr=0.01, group_fn=lambda name, shape: {"weight_decay": 0.1 * (len(shape) > 1)}
        )
        assert type(optimizer) is torch.optim.AdamW
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for inputs, labels in batches:
            batch = local_batch(inputs, labels, model.layout, ctx)
            optimizer.zero_grad()
            assert optimizer.step(lambda b=batch: model.forward_backward(b).loss) > 0
            scheduler.step()
        named = {n for group in optimizer.state_dict()["param_groups"] for n in group["param_names"]}
        assert named == {name for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            held = tuple(sum(b - a for a, b in dim) for dim in model.held_ranges(name))
            assert held == p.shape == optimizer.state[p]["exp_avg"].shape
        return {name: (model.held_ranges(name), p.detach().clone()) for name, p in model.named_parameters()}

    (one,) = spawn(run, "dp=1", 0, world_size=1, backend="threads")
    for rank in spawn(run, "rep=2,dp=2", zero, world_size=4, backend="threads"):
        for name, (ranges, part) in rank.items():
            whole = one[name][1]
            for dim, held in enumerate(ranges):
                whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in held or ((0, 0),)], dim)
            torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cls, options", [(torch.optim.LBFGS, {}), (torch.optim.Muon, {}), (torch.optim.Adafactor, {})])
def test_an_optimizer_that_needs_whole_tensors_is_refused_by_name(cls, options) -> None:  # type: ignore[no-untyped-def]
    def run(ctx, zero):  # type: ignore[no-untyped-def]
        build, dims = models.mlp("pairs", bias=False)
        model = distribute(build, dims, Layout.of("dp=2", zero=zero), ctx, loss_fn=mean_square)
        model.optimizer(cls, **options)

    spawn(run, 0, world_size=2, backend="threads")  # whole tensors: fine
    with pytest.raises((RankError, ValueError), match=cls.__name__):
        spawn(run, 1, world_size=2, backend="threads")


# ---- mistakes


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_one_that_failed_starts_afresh(zero: int, where: str) -> None:
    """A mistake in the second micro-batch, on every rank: what the first has reduced is no part of the next step."""
    (inputs, labels), *_ = models.token_batches(8, 5, 48, 1)

    def run(ctx):  # type: ignore[no-untyped-def]
        model = build_model(ctx, "dp=2", zero, micro_batches=2)
        batch = local_batch(inputs, labels, model.layout, ctx)
        model.forward_backward(batch)
        want = {name: p.grad.clone() for name, p in model.named_parameters()}
        calls = []

        def fail(*_):  # type: ignore[no-untyped-def]
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("on purpose")

        if where == "forward":
            hook = model.module.layers[2].register_forward_pre_hook(fail)
        else:
            hook = model.module.layers[2].register_full_backward_hook(fail)
        with pytest.raises(KeyError):
            model.forward_backward(batch)
        hook.remove()
        for _, p in model.named_parameters():
            p.grad = None
        model.forward_backward(batch)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, want[name], rtol=1e-13, atol=0)

    spawn(run, world_size=2, backend="threads")


@pytest.mark.parametrize("zero", [1, 2])
def test_shards_changed_behind_the_engines_back_are_named(zero: int) -> None:
    """An optimizer of one's own updates this rank's rows and gathers nothing: the next step refuses to run on them."""
    (inputs, labels), *_ = models.token_batches(4, 5, 48, 1)

    def run(ctx, gather):  # type: ignore[no-untyped-def]
        model = build_model(ctx, "dp=2", zero)
        optimizer = torch.optim.SGD([p for _, p in model.named_parameters()], lr=0.1)
        for _ in range(2):
            model.forward_backward(local_batch(inputs, labels, model.layout, ctx))
            optimizer.step()
            if gather:
                model.share_updates()

    spawn(run, True, world_size=2, backend="threads")
    with pytest.raises((RankError, ValueError), match=r"was changed on this rank.*share_updates"):
        spawn(run, False, world_size=2, backend="threads")


class ReadsItsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.layers[0](x) + F.linear(x, self.layers[1].weight).sum()


def test_a_layer_that_is_read_and_not_called_is_named() -> None:
    def run(ctx):  # type: ignore[no-untyped-def]
        model = distribute(ReadsItsLayers, Dims({}), Layout.of("dp=2", zero=3), ctx, loss_fn=mean_square)
        model.forward_backward(local_batch(torch.randn(4, 4), None, model.layout, ctx))

    with pytest.raises((RankError, ValueError), match=r"layers\.1\.weight was used while only this rank's rows"):
        spawn(run, world_size=2, backend="threads")


@pytest.mark.parametrize(
    "text, said",
    [
        ('mesh.dp = 2\nstore.optimizer = "rep"', "the mesh has no axis 'rep' of more than one rank; use 'dp'"),
        ('mesh.tp = 2\nstore.optimizer = "cp"', "use zero = 0"),
        ('mesh.dp = 2\nstore.optimizer = "tp"', "a store runs over rep, dp, cp, not 'tp'"),
        ('mesh.dp = 2\nstore.optimizer = "nope"', "not 'nope'"),
        ('mesh.dp = 2\nstore.parameters = "dp"', "needs the gradients over the same axes"),
        ("mesh.dp = 2\nmesh.pp = 2\nstore.zero = 2", "use zero=1, or zero=3"),
    ],
)
def test_a_store_that_cannot_be_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(said)) as caught:
        Layout.from_toml(text)
    assert "\n" not in str(caught.value)


def test_a_store_over_an_axis_that_cuts_no_data_is_refused() -> None:
    build, dims = models.transformer("plain")
    layout = Layout.from_toml('mesh.dp = 2\ncuts.mlp = "dp"\nstore.optimizer = "dp"')
    spec = spec_from_module(build(), dims)
    with pytest.raises(LayoutError, match=r"dp cuts no data that parameter .* acts on"):
        derive(spec, layout, batch=4, seq=4)
