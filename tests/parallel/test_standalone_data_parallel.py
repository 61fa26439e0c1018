"""`data_parallel` against one device in fp64, and beside torch's DDP: every gradient, every updated parameter."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import crosscut as cc
from tests.parallel.standalone import OPTIMIZERS, build, loss_of, named, on_threads, one_device, worst


def check(ctx, optimizer, micros=1, mode="plain", bucket_bytes=1000, recompute=False, group="ctx"):
    """Train three steps and compare each with one device. Returns the largest error over the bound."""
    cls, kw = OPTIMIZERS[optimizer]
    model = build(seed=5 + ctx.rank, recompute=recompute)  # seeded differently: rank 0's values count
    start, keys = build(seed=5), list(model.state_dict())
    assert cc.data_parallel(model, ctx if group == "ctx" else None, bucket_bytes=bucket_bytes) is model
    assert list(model.state_dict()) == keys
    for (name, a), b in zip(model.state_dict().items(), start.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    opt, errors = cls(model.parameters(), **kw), []
    for step, (grads, params) in enumerate(one_device(start, ctx.world_size, cls, kw, 3, micros)):
        opt.zero_grad()
        if mode == "one backward":
            sum(loss_of(model, step, ctx.rank, micro) for micro in range(micros)).backward()
        else:
            for micro in range(micros):
                loss = loss_of(model, step, ctx.rank, micro)
                if mode == "no_sync" and micro < micros - 1:
                    with cc.no_sync(model):
                        loss.backward()
                else:
                    loss.backward()
        found = named(model, "grad")
        assert all(g is None or (g.shape, g.dtype) == (params[n].shape, params[n].dtype) for n, g in found.items())
        errors.append(worst(found, grads))
        opt.step()
        errors.append(worst(named(model), params))
    assert model.unused.weight.grad is None
    assert ctx.world_size == 1 or model.blocks[0].gate.weight.grad is not None
    return max(errors)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_to_one_device(size, optimizer):
    assert max(on_threads(check, size, optimizer)) < 1


@pytest.mark.parametrize("bucket_bytes", [1, 331, 10**9])
def test_the_size_of_buckets_changes_nothing(bucket_bytes):
    assert max(on_threads(check, 3, "sgd", bucket_bytes=bucket_bytes)) < 1


@pytest.mark.parametrize("mode", ["plain", "no_sync", "one backward"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulation(size, mode):
    assert max(on_threads(check, size, "sgd", micros=3, mode=mode)) < 1


def test_with_checkpointing():
    assert max(on_threads(check, 2, "sgd", recompute=True)) < 1


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_plain_torch_distributed(pool, backend):
    assert max(pool.run(check, "adamw", 2, "no_sync", group=None, world_size=2, backend=backend)) < 1


def without_a_group(ctx):
    assert not dist.is_initialized()
    return check(ctx, "sgd", group=None)


def test_without_a_process_group():
    assert cc.spawn(without_a_group, world_size=1, backend="gloo")[0] < 1


def beside_ddp(ctx):
    """No unused parameter, as DDP likes it. Returns the largest difference of gradients in three steps."""
    ours, theirs = (nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    ours, theirs = cc.data_parallel(ours), nn.parallel.DistributedDataParallel(theirs)
    assert ours[0].weight.equal(theirs.module[0].weight)
    worst_of = 0.0
    for step in range(3):
        x = torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().mean().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            worst_of = max(worst_of, float((a.grad - b.grad).norm() / b.grad.norm()))
    return worst_of


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_beside_ddp(pool, backend):
    assert max(pool.run(beside_ddp, world_size=2, backend=backend)) < 1e-13


def one_rank_has_no_gradient(ctx):
    """Rank 1's loss goes through the module, but through none of its parameters."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False).double()

        def forward(self, x, skip):
            return x * 2 if skip else self.a(x)

    model = cc.data_parallel(Skips(), ctx)
    x = torch.ones(2, 3, dtype=torch.double, requires_grad=True)
    model(x, skip=ctx.rank == 1).sum().backward()
    return model.a.weight.grad


def test_a_rank_without_any_gradient_takes_part():
    for grad in on_threads(one_rank_has_no_gradient, 2):
        assert torch.equal(grad, torch.ones(3, 3, dtype=torch.double))  # rank 0's 2, and 0


def thaws(ctx):
    """Frozen at wrapping, trained later, frozen again; converted in between."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    cc.data_parallel(model, ctx)
    model.double()
    seen = []
    for trained in (False, True, False):
        model[0].requires_grad_(trained)
        model.zero_grad()
        model(torch.full((2, 3), 1.0 + ctx.rank, dtype=torch.double)).square().sum().backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen


def test_freezing_and_thawing():
    first, second = on_threads(thaws, 2)
    for a, b in zip(first, second, strict=True):
        assert all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert [[g is None for g in step] for step in first] == [
        [True] * 2 + [False] * 2,
        [False] * 4,
        [True] * 2 + [False] * 2,
    ]
    assert first[1][0].dtype == torch.double


def mixed(ctx):
    model = nn.ModuleDict({"a": nn.Linear(3, 3).half(), "b": nn.Linear(3, 3).double(), "c": nn.Linear(3, 1).bfloat16()})

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return sum(part(x.to(part.weight.dtype)).double().sum() for part in self.parts.values())

    wrapped = cc.data_parallel(All(), ctx, bucket_bytes=30)
    wrapped(torch.full((1, 3), 1.0 + ctx.rank)).backward()
    return {n: p.grad for n, p in wrapped.named_parameters()}


def test_mixed_dtypes():
    for grads in on_threads(mixed, 3):
        for name, grad in grads.items():
            assert grad.dtype == {"a": torch.half, "b": torch.double, "c": torch.bfloat16}[name.split(".")[1]]
            assert torch.equal(grad, torch.full_like(grad, 2.0 if name.endswith("weight") else 1.0)), name


def fails_and_goes_on(ctx):
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(c, x):
            return x.clone()

        @staticmethod
        def backward(c, grad):
            raise RuntimeError("out of memory")

    model = cc.data_parallel(
        nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)).double(), ctx, bucket_bytes=1
    )
    good = model[1]
    x = torch.full((1, 3), 1.0 + ctx.rank, dtype=torch.double)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model[1].forward = Explodes.apply
    with pytest.raises(RuntimeError, match="out of memory"):
        model(x).sum().backward()
    model.zero_grad()
    del good.forward
    model(x).sum().backward()
    return all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_backward_that_fails_leaves_nothing_behind():
    assert on_threads(fails_and_goes_on, 2) == [True, True]


def uses_reentrant(ctx):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.a, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)

    cc.data_parallel(Twice(), ctx)(torch.ones(1, 3, requires_grad=True)).sum().backward()


def test_a_gradient_that_comes_twice_is_an_error():
    with pytest.raises(ValueError, match=r"'a.\w+' got its gradient twice in one backward; use .*use_reentrant=False"):
        on_threads(uses_reentrant, 2)


def test_a_copy_is_not_trained_in_silence():
    model = cc.data_parallel(nn.Linear(3, 3))
    average = copy.deepcopy(model)
    with torch.no_grad():
        average(torch.ones(1, 3))
    average.requires_grad_(False)(torch.ones(1, 3))
    with pytest.raises(ValueError, match="copy of a module under data_parallel"):
        average.requires_grad_(True)(torch.ones(1, 3))


def test_refusals(monkeypatch):
    model = cc.data_parallel(nn.Linear(3, 3))
    for again in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match=r"parameter '\S*weight' is data_parallel's already; wrap a module once"):
            cc.data_parallel(again)
    with pytest.raises(ValueError, match="'0' makes sparse gradients, which no bucket holds; use sparse=False"):
        cc.data_parallel(nn.Sequential(nn.Embedding(3, 3, sparse=True)))
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        cc.data_parallel(nn.Linear(3, 3, device="meta"))
    with pytest.raises(ValueError, match="group=2 is a int; pass a crosscut Group or Context, or None"):
        cc.data_parallel(nn.Linear(3, 3), 2)
    with pytest.raises(ValueError, match="no_sync: Linear is not wrapped"), cc.no_sync(nn.Linear(3, 3)):
        pass
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(os.environ, key, value)
    with pytest.raises(ValueError, match=r"rank 1 of 2, but there is no process group yet; call .*init_process_group"):
        cc.data_parallel(nn.Linear(3, 3))


def differ(ctx, kind):
    if kind == "shape":
        cc.data_parallel(nn.Linear(3, 3 + ctx.rank // 2), ctx)
    elif kind == "name":
        cc.data_parallel(nn.ModuleDict({"ab"[ctx.rank // 2]: nn.Linear(3, 3)}), ctx)
    elif kind == "frozen":
        cc.data_parallel(nn.Linear(3, 3).requires_grad_(ctx.rank < 2), ctx)
    elif kind == "number":
        cc.data_parallel(nn.Linear(3, 3, bias=ctx.rank < 2), ctx)
    else:
        cc.data_parallel(nn.Linear(3, 3))


@pytest.mark.parametrize(
    "kind, message",
    [
        (
            "shape",
            r"'weight' is float32 \(3, 3\) on rank 0, but rank 2 has float32 \(4, 3\) in its place; build the same",
        ),
        (
            "name",
            r"'a.weight' is float32 \(3, 3\) on rank 0, but rank 2 has 'b.weight', float32 \(3, 3\), in its place",
        ),
        ("frozen", r"'weight' is float32 \(3, 3\) on rank 0, but rank 2 has float32 \(3, 3\) \(frozen\) in its place"),
        ("number", r"rank 0 has 2 tensors, rank 2 1; build the same on every rank"),
        ("no ctx", r"group=None in a rank that is a thread cannot tell which rank it is; pass the ctx: group=ctx"),
    ],
)
def test_modules_that_differ(kind, message):
    with pytest.raises(ValueError, match=message):
        on_threads(differ, 3, kind)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: cc.data_parallel([1]), r"data_parallel: \[1\] is a list; pass a torch.nn.Module"),
        (lambda: cc.fully_shard([1]), r"fully_shard: \[1\] is a list; pass a torch.nn.Module"),
        (lambda: cc.data_parallel(nn.LazyLinear(3)), "'weight' is lazy and has no shape yet; run one forward"),
        (lambda: cc.fully_shard(nn.LazyLinear(3)), "'weight' is lazy and has no shape yet; run one forward"),
        (lambda: cc.fully_shard(nn.Linear(2, 2), 5), r"compute_dtype=5 is no torch.dtype \(the group is group=...\)"),
        (lambda: cc.ShardedOptimizer(nn.Linear(2, 2), torch.optim.AdamW), r"pass module.parameters\(\)"),
        (lambda: cc.ShardedOptimizer(nn.Linear(2, 2).parameters(), 3), "3 is no class of optimizer"),
        (
            lambda: cc.ShardedOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, foo=1),
            "SGD does not take {'foo': 1}",
        ),
    ],
)
def test_things_of_another_kind(monkeypatch, call, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=message):
        call()
