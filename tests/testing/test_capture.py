"""`capture` beside crosscut's own stand-alone pieces, at odd moments and with odd arguments; verdicts below fp64."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import crosscut as cc
from crosscut.cli.main import main
from crosscut.testing import capture, compare_captures
from tests.testing import programs


@pytest.fixture(scope="module")
def ref(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capture") / "ref"
    programs.alone(folder)
    return folder


def threads(fn, size, *args, **kw):
    return cc.spawn(fn, *args, world_size=size, backend="threads", **kw)


def rows(ctx, step, dtype=torch.float64):
    x, y = programs.batch(step, dtype)
    return x.chunk(ctx.world_size)[ctx.rank], y.chunk(ctx.world_size)[ctx.rank], programs.tokens(y)


def standalone(ctx, folder, kind, share=False):
    model = programs.net(seed=ctx.rank)
    if kind == "fully_shard":
        cc.fully_shard(model, group=ctx, units=[model.up, model.down])
    elif kind == "data_parallel":
        cc.data_parallel(model, ctx)
    if kind == "ShardedOptimizer":
        optimizer = cc.ShardedOptimizer(model.parameters(), torch.optim.SGD, group=ctx, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(programs.STEPS):
        x, y, count = rows(ctx, step)
        total = programs.loss_sum(model, x, y)
        (total * ctx.world_size / count).backward()
        optimizer.step()
        own = programs.tokens(y)
        mean = total / own if own else total * float("nan")  # as cross_entropy has it
        capture(model, optimizer, folder, loss=total / count if share else (mean, own), ctx=ctx)
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", ["data_parallel", "ShardedOptimizer", "fully_shard"])
def test_standalone_pieces_are_read(ref, tmp_path, kind, size):
    """Uneven rows, more ranks than rows, and at 6 ranks one without tokens, whose mean is NaN."""
    threads(standalone, size, tmp_path / "run", kind)
    result = compare_captures(ref, tmp_path / "run")
    assert result.verdict.equal, result.verdict.sentence()
    assert result.run.shapes() == result.ref.shapes()
    assert (size == 6) == any(count == 0 for _, count in result.run.indices[0]["losses"])


def test_losses_may_be_shares_that_add_up(ref, tmp_path):
    threads(standalone, 2, tmp_path / "run", "data_parallel", share=True)
    assert compare_captures(ref, tmp_path / "run").verdict.equal


def moments(folder, when):
    """The trusted program, captured at the wrong moment."""
    model = programs.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(programs.STEPS):
        x, y = programs.batch(step)
        loss = programs.loss_sum(model, x, y) / programs.tokens(y)
        loss.backward()
        if when == "before step":
            capture(model, optimizer, folder, loss=loss)
        optimizer.step()
        if when == "own reduction":
            for p in model.parameters():
                p.grad *= 1.0
        if when == "after zero_grad":
            optimizer.zero_grad()
        if when != "before step":
            capture(model, optimizer, folder, loss=loss * (2 if when == "other loss" else 1))
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "when, says",
    [
        ("before step", "these are the weights before the step: call capture after optimizer.step()"),
        ("after zero_grad", "every gradient is zero: call capture before optimizer.zero_grad()"),
        ("other loss", "the loss is 2 x the reference.*all else agrees, so capture was given another number"),
    ],
)
def test_the_wrong_moment_is_named(ref, tmp_path, when, says):
    moments(tmp_path / "run", when)
    said = compare_captures(ref, tmp_path / "run").verdict.sentence()
    assert re.search(says, said), said
    assert "different weights" not in said


def reduces_by_itself(ctx, folder):
    """ZeRO-1 as loops have it: the optimizer's own reduction leaves `.grad` as backward left it."""
    model = programs.net(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(programs.STEPS):
        x, y, count = rows(ctx, step)
        (programs.loss_sum(model, x, y) / count).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * ctx.world.all_reduce(p.grad.clone())
        capture(model, optimizer, folder, ctx=ctx)
        optimizer.zero_grad()


def test_an_optimizer_that_reduces_by_itself_is_told(ref, tmp_path):
    threads(reduces_by_itself, 2, tmp_path / "run")
    said = compare_captures(ref, tmp_path / "run").verdict.sentence()
    assert "their sum is the reference" in said
    assert "the updated parameters agree all the same" in said


def starts_apart(ctx, folder):
    model = programs.net(seed=ctx.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y, count = rows(ctx, 0)
    (programs.loss_sum(model, x, y) / count).backward()
    for p in model.parameters():
        ctx.world.all_reduce(p.grad)
    optimizer.step()
    capture(model, optimizer, folder, ctx=ctx)


def test_a_rank_that_starts_from_other_weights_is_named(tmp_path):
    programs.alone(tmp_path / "ref", steps=1)
    threads(starts_apart, 2, tmp_path / "run")
    assert "the runs start on rank 1 from different weights" in compare_captures(
        tmp_path / "ref", tmp_path / "run"
    ).verdict.sentence()  # fmt: skip


# ---- arguments and folders ------------------------------------------------------------------------------------------


def misuse(ctx, folder, what):
    model = programs.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, kw = torch.tensor(1.0), {"ctx": ctx}
    given = {"model": [model], "optimizer": None}.get(what)
    if what == "loss" and ctx.rank == 1:
        loss = torch.ones(2)
    elif what == "tokens":
        loss = (loss, -3)
    elif what == "names":
        kw["names"] = {"norm.weight": "norm.weight"}
    elif what == "twice":
        kw["names"] = {"norm.weight": ("norm.bias", slice(0, programs.DIM))}
    elif what == "steps":
        kw["steps"] = 0
    elif what == "folder":
        folder = None
    elif what == "complex":
        model.c = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    elif what == "two":
        capture(model, torch.optim.SGD(model.parameters(), lr=0.1), folder, ctx=ctx)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        capture(model, other, folder / "inside", ctx=ctx)
        capture(model, optimizer, folder / "inside", ctx=ctx)
    capture(given if what == "model" else model, given if what == "optimizer" else optimizer, folder, loss, **kw)


@pytest.mark.parametrize(
    "what, says",
    [
        ("model", "the model is a list"),
        ("optimizer", "the optimizer is a NoneType"),
        ("folder", "the folder is a NoneType"),
        ("loss", r"a tensor of shape \(2,\) is no number.*\(rank 1\)"),
        ("tokens", "num_tokens is -3"),
        ("names", "must map a name to"),
        ("twice", "names gives 'norm.bias' to two parameters"),
        ("steps", "steps=0 writes nothing"),
        ("complex", "c is torch.complex64"),
        ("two", "takes another optimizer's captures in this program; give each a folder of its own"),
    ],
)
def test_misuse_is_one_sentence_on_every_rank(tmp_path, what, says):
    with pytest.raises(ValueError, match=says) as caught:
        threads(misuse, 2, tmp_path / "run", what)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob(".step-*"))


def test_a_write_that_fails_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    """A full disk on one rank is no OSError in safetensors."""
    from safetensors import SafetensorError
    from safetensors import torch as written

    def full(tensors, path):
        if "rank-0" in str(path):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(written, "save_file", full)
    with pytest.raises(ValueError, match=r"No space left on device .*\(rank 0\)"):
        threads(starts_apart, 2, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


class Kinds(nn.Module):
    """Integers, booleans, nothing, one number, a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3, sparse=True)
        self.codes = nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.none, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.5))

    def forward(self, ids):
        return self.emb(ids) * self.scale


def of_kinds(folder, wrong=0):
    torch.manual_seed(0)
    model = Kinds().double()
    model.codes.data += wrong
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.tensor([0, 2, 2])).square().mean().backward()
    assert model.emb.weight.grad.is_sparse
    optimizer.step()
    capture(model, optimizer, folder)


def test_parameters_of_every_kind(tmp_path, capsys):
    of_kinds(tmp_path / "ref")
    of_kinds(tmp_path / "run")
    of_kinds(tmp_path / "wrong", wrong=1)
    assert compare_captures(tmp_path / "ref", tmp_path / "run").verdict.equal
    assert "codes after the step" in compare_captures(tmp_path / "ref", tmp_path / "wrong").verdict.sentence()
    assert main(["parity", "compare", str(tmp_path / "ref"), str(tmp_path / "ref" / ".." / "ref")]) == 2
    assert "are one folder, which proves nothing" in capsys.readouterr().err


def test_a_reference_whose_loss_is_not_finite_is_refused(tmp_path, capsys):
    for name, factor in (("ref", float("nan")), ("run", 1.0)):
        model = programs.net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        capture(model, optimizer, tmp_path / name, loss=factor)
    assert main(["parity", "compare", str(tmp_path / "ref"), str(tmp_path / "run")]) == 2
    assert "the loss is nan at step 0" in capsys.readouterr().err


# ---- below fp64 -----------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """The key's bias has a gradient that is zero in exact arithmetic."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 11)

    def forward(self, ids):
        x = self.emb(ids)
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.head(x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attends(ctx, folder, dtype, size, autocast=False, pieces=1, wrong=1.0):
    """Three steps on `size` ranks, or on one in `pieces`."""
    torch.manual_seed(0)
    model = Attends().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids, labels = torch.randint(11, (2, 12, 5), generator=generator)
        rank = ctx.rank if size > 1 else 0
        for own, mine in zip(ids.chunk(size)[rank].chunk(pieces), labels.chunk(size)[rank].chunk(pieces), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(own)
            (F.cross_entropy(out.flatten(0, 1).float(), mine.flatten(), reduction="sum") / labels.numel()).backward()
        for p in model.parameters():
            if size > 1:
                ctx.world.all_reduce(p.grad)
        model.v.weight.grad *= wrong
        optimizer.step()
        capture(model, optimizer, folder, ctx=ctx)
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_rounding_alone_is_no_divergence(tmp_path, dtype, size):
    threads(attends, 1, tmp_path / "ref", dtype, 1)
    threads(attends, size, tmp_path / "run", dtype, size)
    threads(attends, size, tmp_path / "wrong", dtype, size, wrong=2.0)
    result = compare_captures(tmp_path / "ref", tmp_path / "run")
    grads = result.ref.trace.grads[0]
    assert result.verdict.equal, result.verdict.sentence()
    assert grads["k.bias"].norm() < 1e-3 * grads["head.weight"].norm()
    said = compare_captures(tmp_path / "ref", tmp_path / "wrong").verdict.sentence()
    assert re.search(r"v.weight.grad is (2|2\.0\d*|1\.99\d*) x the reference on every element", said), said
    assert "different weights" not in said


def test_autocast_is_told_and_measured(tmp_path):
    threads(attends, 1, tmp_path / "ref", torch.float32, 1, autocast=True)
    threads(attends, 1, tmp_path / "noise", torch.float32, 1, autocast=True, pieces=3)
    threads(attends, 2, tmp_path / "run", torch.float32, 2, autocast=True)
    said = compare_captures(tmp_path / "ref", tmp_path / "run").verdict.sentence()
    assert "if the runs compute in bf16 (autocast), give --rtol 0.05 or --noise" in said
    assert compare_captures(tmp_path / "ref", tmp_path / "run", rtol=0.05).verdict.equal
    assert compare_captures(tmp_path / "ref", tmp_path / "run", noise=tmp_path / "noise").verdict.equal


@pytest.mark.ranks(2, backend="gloo")
def test_fsdp2_is_left_as_it_is_after_a_forward_alone(ref, tmp_path, ctx):
    """Which leaves whole parameters, with memory that FSDP2 frees later."""
    from torch.distributed.fsdp import fully_shard

    model = programs.net()
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(programs.STEPS):
        x, y = programs.batch(step)
        (programs.loss_sum(model, x, y) / programs.tokens(y)).backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
        assert not hasattr(model.up.weight, "placements")
        capture(model, optimizer, tmp_path / "run")
        optimizer.zero_grad()
    if ctx.rank == 0:
        result = compare_captures(ref, tmp_path / "run")
        assert result.verdict.equal, result.verdict.sentence()


@pytest.mark.ranks(2, backend="gloo")
def test_what_mixed_precision_computes_in_is_kept(tmp_path, ctx):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = programs.net(torch.float32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = programs.batch(0, torch.float32)
    programs.loss_sum(model, x, y).backward()
    optimizer.step()
    capture(model, optimizer, tmp_path / "run")
    assert compare_captures.__globals__["read_capture"](tmp_path / "run").dtype == "bfloat16"
