"""`fully_shard` against one device in fp64, and beside torch's FSDP2: every gradient, every updated parameter, and that
what is let go is gone."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import crosscut as cc
from crosscut.parallel.shard import rows_of
from crosscut.parallel.standalone.data_parallel import WRAP
from tests.parallel.standalone import OPTIMIZERS, Block, build, loss_of, named, on_threads, one_device, worst


def rows(whole, ctx):
    """This rank's rows of every tensor."""
    return {n: t if t is None or t.dim() == 0 else rows_of(t, ctx.world) for n, t in whole.items()}


def whole_bytes(model):
    """What gathered parameters hold at this moment, unit by unit."""
    return [unit._whole.untyped_storage().nbytes() for unit in model.__dict__[WRAP].units]


def whole_parameters(state, like):
    return {n: state[n] for n, _ in like.named_parameters()}


def check(ctx, optimizer, micros=1, mode="plain", group="ctx", change=lambda model: None, options=None, **kw):
    """Train three steps and compare each with one device. Returns the largest error over the bound."""
    cls, kwargs = OPTIMIZERS[optimizer]
    kwargs = {**kwargs, **(options or {})}
    model, ref = build(5 + ctx.rank, **kw), build(5, **kw)
    change(model), change(ref)
    names = [n for n, _ in model.named_parameters()]
    assert cc.fully_shard(model, group=ctx if group == "ctx" else None) is model
    assert [n for n, _ in model.named_parameters()] == names
    opt, errors = cls(model.parameters(), **kwargs), []
    for step, (grads, params) in enumerate(one_device(ref, ctx.world_size, cls, kwargs, 3, micros)):
        opt.zero_grad()
        if mode == "one backward":
            sum(loss_of(model, step, ctx.rank, micro) for micro in range(micros)).backward()
        elif mode == "forwards first":
            for loss in [loss_of(model, step, ctx.rank, micro) for micro in range(micros)]:
                loss.backward()
        else:
            for micro in range(micros):
                loss = loss_of(model, step, ctx.rank, micro)
                assert not any(whole_bytes(model))
                if mode == "no_sync" and micro < micros - 1:
                    with cc.no_sync(model):
                        loss.backward()
                    assert mode != "no_sync" or all(p.grad is None for p in model.parameters() if p.dim())
                else:
                    loss.backward()
                assert not any(whole_bytes(model))
        for p in model.parameters():
            assert p.grad is None or (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype)
        errors.append(worst(named(model, "grad"), rows(grads, ctx)) if ctx.rank == 0 else 0.0)
        opt.step()
        errors.append(worst(whole_parameters(cc.full_state_dict(model), model), params))
    for name, p in named(model).items():
        assert p.shape == rows(params, ctx)[name].shape
    return max(errors)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_to_one_device(size, optimizer):
    assert max(on_threads(check, size, optimizer)) < 1


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_every_implementation_of_an_optimizer(options):
    assert max(on_threads(check, 3, "adamw", options=options)) < 1


@pytest.mark.parametrize("mode", ["plain", "no_sync", "one backward", "forwards first"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulation(size, mode):
    assert max(on_threads(check, size, "sgd", micros=3, mode=mode)) < 1


def test_with_checkpointing():
    assert max(on_threads(check, 2, "sgd", recompute=True)) < 1


def repeat_blocks(model):
    first, second = model.blocks[0], model.blocks[1]
    plain = model.forward

    def forward(ids, rank):
        hook = second.register_forward_hook(lambda m, args, out: first(out, rank))  # first runs again after second
        try:
            return plain(ids, rank)
        finally:
            hook.remove()

    model.forward = forward


def tie_across_blocks(model):
    model.blocks[2].gate.weight = model.blocks[0].gate.weight
    model.blocks[1].norm = model.blocks[0].norm


def recompute_whole(model):
    plain = model.forward
    model.forward = lambda ids, rank: checkpoint(plain, ids, rank, use_reentrant=False)


@pytest.mark.parametrize("change", [repeat_blocks, tie_across_blocks, recompute_whole])
def test_modules_used_twice_tied_and_recomputed(change):
    assert max(on_threads(check, 2, "adamw", change=change)) < 1


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_plain_torch_distributed(pool, backend):
    assert max(pool.run(check, "adamw", 2, "no_sync", group=None, world_size=2, backend=backend)) < 1


def test_without_a_process_group():
    assert cc.spawn(check, "sgd", group=None, world_size=1, backend="gloo")[0] < 1


def beside_fsdp2(ctx):
    def make():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 3)).double()

    ours, theirs = make(), make()
    for part in theirs:
        torch_fully_shard(part)
    torch_fully_shard(theirs)
    cc.fully_shard(ours, units=list(ours)[::2])
    off, opts = 0.0, [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
    for step in range(3):
        x = torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
        for model, opt in zip((ours, theirs), opts, strict=True):
            opt.zero_grad()
            model(x).square().mean().backward()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert a.shape == b.to_local().shape, name
            for mine, other in ((a.grad, b.grad.to_local()), (a.detach(), b.detach().to_local())):
                off = max(off, float((mine - other).norm() / (1e-3 + other.norm())))
        for opt in opts:
            opt.step()
    return off


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_beside_fsdp2(pool, backend):
    assert max(pool.run(beside_fsdp2, world_size=2, backend=backend)) < 1e-12


# -- what is whole, and when ----------------------------------------------------------------------------------------


def watch_memory(ctx):
    """The most blocks that are whole at a time; and whether anything is between the phases."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    model.forward = lambda x: [x := torch.tanh(layer(x)) for layer in model.layers][-1]
    cc.fully_shard(model, group=ctx)
    held = []

    def note(*_):
        held.append(sum(b > 0 for b in whole_bytes(model)))

    for layer in model.layers:
        layer.register_forward_pre_hook(note)
    for step in range(3):
        held.clear()
        out = model(torch.full((2, 64), 1.0 + ctx.rank, requires_grad=True))
        forward, between = max(held), any(whole_bytes(model))
        held.clear()
        out.register_hook(note)
        for unit in model.__dict__[WRAP].units:
            for piece in unit.pieces:
                if step == 0:
                    piece.whole.register_post_accumulate_grad_hook(note)
        out.sum().backward()
        found = forward, between, max(held), any(whole_bytes(model))
    return found


def test_what_is_let_go_is_gone():
    for forward, between, backward, after in on_threads(watch_memory, 2):
        assert (forward, between, after) == (1, False, False)
        assert 1 <= backward <= 2  # of six: the block at work, and the one before it


def order_of_calls(ctx):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))
    cc.fully_shard(model, group=ctx)
    for _ in range(2):
        ctx.ledger.clear()
        model(torch.ones(1, 4)).sum().backward()
    return [(e.op, e.tag) for e in ctx.ledger.entries]


def test_gathers_are_prefetched_and_reductions_overlap():
    gather, reduce = ("all_gather", "parameters/backward"), ("reduce_scatter", "gradients/step")
    expected = [("all_gather", "parameters/forward")] * 3 + [gather, gather, gather, reduce, reduce, reduce]
    assert on_threads(order_of_calls, 2) == [expected] * 2  # at layer 1 that of 0 begins, then layer 2 is reduced


def fails(ctx, where):
    model, ref = build(1), build(1)
    cc.fully_shard(model, group=ctx)
    loss_of(model, 0, ctx.rank).backward()
    expected = named(model, "grad")

    def explode(*_):
        raise RuntimeError("out of memory")

    for attempt in range(2):
        handle = None
        if where == "forward":
            handle = model.blocks[1].down.register_forward_pre_hook(explode)
        else:
            model.blocks[1].down.register_forward_hook(lambda m, a, out: out.register_hook(explode) and None)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss_of(model, attempt, ctx.rank).backward()
        assert not any(whole_bytes(model))
        assert all(p.shape == rows(named(ref), ctx)[n].shape for n, p in model.named_parameters())
        if handle is not None:
            handle.remove()
        model.blocks[1].down._forward_hooks.clear()
        model.zero_grad()
        loss_of(model, 0, ctx.rank).backward()
        assert worst(named(model, "grad"), expected) == 0
    return True


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_leaves_nothing_gathered(where):
    assert on_threads(fails, 2, where) == [True, True]


def evaluates(ctx):
    model, ref = build(1), build(1)
    cc.fully_shard(model, group=ctx)
    with torch.no_grad():
        a = loss_of(model, 0, ctx.rank)
    with torch.inference_mode():
        b = loss_of(model, 0, ctx.rank)
    assert not any(whole_bytes(model))
    c = loss_of(model, 0, ctx.rank)
    c.backward()
    return [x.item() for x in (a, b, c)] == [loss_of(ref, 0, ctx.rank).item()] * 3


def test_evaluation():
    assert on_threads(evaluates, 3) == [True] * 3


# -- mixed precision ----------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


def mixed(ctx, dtype, steps=4):
    torch.manual_seed(2)
    model = Small()
    master, half = copy.deepcopy(model), copy.deepcopy(model).to(dtype)
    cc.fully_shard(model, dtype, ctx)
    opts = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, master)]
    for step in range(steps):
        xs = [torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(ctx.world_size)]
        for opt in opts:
            opt.zero_grad()
        model(xs[ctx.rank]).float().square().mean().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        for p, h in zip(master.parameters(), half.parameters(), strict=True):
            h.data.copy_(p.data)
            p.grad = torch.zeros_like(p)
        for x in xs:
            half.zero_grad()
            half(x.to(dtype)).float().square().mean().backward()
            for p, h in zip(master.parameters(), half.parameters(), strict=True):
                p.grad += h.grad.float() / ctx.world_size
        for opt in opts:
            opt.step()
    full = cc.full_state_dict(model)
    assert {v.dtype for v in full.values()} == {torch.float32}
    return max(float((full[n] - p.detach()).abs().max()) for n, p in master.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_half_precision_over_a_full_master(size, dtype):
    assert max(on_threads(mixed, size, dtype)) < 1e-4


def accumulates_in_full(ctx):
    """One gradient of 1, then many of 0.001: a sum in bf16 would stay at 1."""
    model = nn.Linear(1, 1, bias=False)
    cc.fully_shard(model, torch.bfloat16, ctx)
    with cc.no_sync(model):
        model(torch.ones(1, 1)).sum().backward()
        for _ in range(999):
            model(torch.full((1, 1), 1e-3)).sum().backward()
    model(torch.full((1, 1), 1e-3)).sum().backward()
    return model.weight.grad.sum().item()


def test_small_gradients_are_not_lost():
    assert on_threads(accumulates_in_full, 1)[0] == pytest.approx(2.0, rel=1e-3)


class Mixed(nn.Module):
    """Parts of other dtypes, with inputs of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5).half(), nn.Linear(3, 5).double(), nn.Linear(3, 1).bfloat16()])
        self.mix = nn.Parameter(torch.ones(2, 3, dtype=torch.double))

    def forward(self, x):
        return sum((layer(x.to(layer.weight.dtype)).double().sum() for layer in self.layers), (self.mix * x).sum())


def mixed_dtypes(ctx):
    model = cc.fully_shard(Mixed(), group=ctx)
    model(torch.full((1, 3), 1.0 + ctx.rank)).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def test_mixed_dtypes():
    like = dict(Mixed().named_parameters())
    for grads in on_threads(mixed_dtypes, 3):
        for name, grad in grads.items():
            assert grad.dtype == like[name].dtype
            assert torch.equal(grad, torch.full_like(grad, 1.0 if name.endswith("bias") else 2.0)), name


# -- wrapping ------------------------------------------------------------------------------------------------------


def nested(ctx, how):
    model, ref = build(5), build(5)
    if how == "parts first":
        for block in model.blocks:
            cc.fully_shard(block, group=ctx)
    elif how == "parts of parts":
        cc.fully_shard(model.blocks[1].up, group=ctx)
        cc.fully_shard(model.blocks[1], group=ctx)
    elif how == "twice":
        cc.fully_shard(model.blocks, group=ctx)
    units = [model.emb, *model.blocks] if how == "units" else [model.blocks[2], model.frozen] if how == "few" else None
    cc.fully_shard(model, group=ctx, units=units)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    _, params = one_device(ref, ctx.world_size, torch.optim.SGD, {"lr": 0.1}, steps=1)[0]
    loss_of(model, 0, ctx.rank).backward()
    opt.step()
    assert not any(whole_bytes(model))
    return worst(whole_parameters(cc.full_state_dict(model), model), params)


@pytest.mark.parametrize("how", ["parts first", "parts of parts", "twice", "units", "few"])
def test_nested_wrapping_and_units(how):
    assert max(on_threads(nested, 2, how)) < 1


def thaws(ctx):
    model, ref = build(1), build(1)
    cc.fully_shard(model, group=ctx)
    for flag in (True, False, True):
        for m in (model, ref):
            m.frozen.requires_grad_(flag)
            m.blocks[0].requires_grad_(not flag)
            m.scale.requires_grad_(flag)
            m.zero_grad()
        loss_of(model, 0, ctx.rank).backward()
        sum(loss_of(ref, 0, r) / ctx.world_size for r in range(ctx.world_size)).backward()
        found = named(model, "grad")
        assert worst(found, rows(named(ref, "grad"), ctx)) < 1 or ctx.rank
        assert (found["frozen.weight"] is not None) == (found["scale"] is not None) == flag
    return True


def test_freezing_and_thawing():
    assert on_threads(thaws, 2) == [True, True]


def optimizer_state(ctx):
    """Two steps, the whole optimizer saved and loaded into a new one, two more: as one device goes on from the same."""
    model, ref = build(1), build(1)
    cc.fully_shard(model, group=ctx)
    opt, ref_opt = (torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True) for m in (model, ref))

    def steps(first, opts):
        for step in range(first, first + 2):
            for m, o in zip((model, ref), opts, strict=True):
                o.zero_grad()
                loss_of(m, step, 0).backward()
                o.step()

    steps(0, (opt, ref_opt))
    saved = cc.full_optimizer_state_dict(model, opt)
    theirs = ref_opt.state_dict()
    assert saved["param_groups"] == theirs["param_groups"]
    assert list(saved["state"]) == list(theirs["state"])
    for index, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(saved["state"][index][key], value, rtol=1e-10, atol=1e-14)
    again, ref_again = (torch.optim.AdamW(m.parameters(), lr=0.7, amsgrad=True) for m in (model, ref))
    cc.load_full_optimizer_state_dict(model, again, theirs)
    ref_again.load_state_dict(saved)
    steps(2, (again, ref_again))
    with pytest.raises(ValueError, match=r"the state is of \d+ parameters, this optimizer has 1"):
        cc.load_full_optimizer_state_dict(model, torch.optim.SGD([next(model.parameters())], lr=1), theirs)
    return worst(whole_parameters(cc.full_state_dict(model), model), dict(ref.named_parameters()))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_whole_state_of_an_optimizer(size):
    assert max(on_threads(optimizer_state, size)) < 1


def full_round(ctx):
    model, ref = build(1), build(1)
    cc.fully_shard(model, group=ctx)
    full = cc.full_state_dict(model)
    assert list(full) == list(ref.state_dict())
    assert all(torch.equal(full[k], v) for k, v in ref.state_dict().items())
    with cc.full_parameters(model):
        assert model.head.weight is model.emb.weight
        assert loss_of(model, 0, 0).item() == loss_of(ref, 0, 0).item()
        model.emb.weight[1, 2] = 7.0
    assert cc.full_state_dict(model)["head.weight"][1, 2] == 7.0
    other = build(2)
    assert cc.load_full_state_dict(model, other.state_dict()).missing_keys == []
    with pytest.raises(RuntimeError, match="Missing key"):
        cc.load_full_state_dict(model, {})
    loss = loss_of(model, 0, ctx.rank)
    loss.backward()
    return loss.item() == loss_of(other, 0, ctx.rank).item()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_whole_parameters_by_their_names(size):
    assert on_threads(full_round, size) == [True] * size


def clips(ctx, norm_type):
    model, ref = build(1), build(1)
    cc.fully_shard(model, group=ctx)
    loss_of(model, 0, ctx.rank).backward()
    sum(loss_of(ref, 0, r) / ctx.world_size for r in range(ctx.world_size)).backward()
    norms = [cc.clip_grad_norm_(model, 0.1, norm_type), nn.utils.clip_grad_norm_(ref.parameters(), 0.1, norm_type)]
    assert torch.allclose(*norms, rtol=1e-12), norms
    assert ctx.rank or worst(named(model, "grad"), rows(named(ref, "grad"), ctx)) < 1
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return cc.clip_grad_norm_(model, 1e9).item() ** 2, sum(p.numel() for p in ref.parameters())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("size", [1, 3])
def test_every_number_counts_once_in_the_norm(size, norm_type):
    for squared, count in on_threads(clips, size, norm_type):
        assert squared == pytest.approx(count, rel=1e-12)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_optimizers_are_looked_at():
    model = nn.Linear(4, 4)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    cc.fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match="SGD holds the parameters that fully_shard has replaced, and would train"):
        before.step()
    for cls in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon):
        params = [model.weight] if cls is torch.optim.Muon else model.parameters()
        with pytest.raises(ValueError, match=f"fully_shard: {cls.__name__} needs whole tensors .* use an element-wise"):
            cls(params, lr=0.1).step(lambda: torch.zeros(()))
    after = torch.optim.Adam(model.parameters(), lr=0.0)
    after.step()
    with pytest.raises(ValueError, match=r"'parameter 0' is sharded by fully_shard already, .* use Adam itself"):
        cc.ShardedOptimizer(model.parameters(), torch.optim.Adam)


def test_refusals(monkeypatch):
    model = cc.fully_shard(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="this Sequential is wrapped already; wrap a module once"):
        cc.fully_shard(model)
    with pytest.raises(ValueError, match=r"parameter '0.weight' is fully_shard's already; wrap a module once"):
        cc.data_parallel(model)
    with pytest.raises(ValueError, match="a part of the module is under data_parallel already; wrap it once"):
        cc.fully_shard(nn.Sequential(cc.data_parallel(nn.Linear(3, 3))))
    with pytest.raises(ValueError, match="units= names a Linear that is no submodule of the module"):
        cc.fully_shard(nn.Sequential(nn.Linear(3, 3)), units=[nn.Linear(3, 3)])
    with pytest.raises(ValueError, match="cannot be copied: copy before, or keep its full_state_dict"):
        copy.deepcopy(model)
    for fn in (cc.full_state_dict, lambda m: cc.clip_grad_norm_(m, 1.0)):
        with pytest.raises(ValueError, match="Linear is not under fully_shard; wrap it first"):
            fn(nn.Linear(3, 3))
    model.double()
    with pytest.raises(ValueError, match=r"'0.weight' was replaced, moved or converted since; do that before"):
        model(torch.ones(1, 3))
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(os.environ, key, value)
    with pytest.raises(ValueError, match="there is no process group yet"):
        cc.fully_shard(nn.Linear(3, 3))


def test_a_unit_inside_a_unit_is_named():
    block = Block()
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": block})
    block.up.register_forward_hook(lambda m, args, out: model["a"](torch.ones(1, 6)) and None)
    whole = nn.Sequential(model)
    cc.fully_shard(whole, units=[model["a"], model["b"]])
    with pytest.raises(ValueError, match=r"'0.a' runs inside '0.b'; name only one of them in units="):
        block(torch.ones(1, 6), 0)


def differ(ctx):
    cc.fully_shard(nn.Linear(3, 3 + ctx.rank), group=ctx)


def test_modules_that_differ():
    with pytest.raises(ValueError, match=r"fully_shard: 'weight' is float32 \(3, 3\) on rank 0, but rank 1"):
        on_threads(differ, 2)
