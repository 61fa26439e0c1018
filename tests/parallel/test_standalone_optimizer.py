"""`ShardedOptimizer` against the same optimizer on one device in fp64: a 1/W of the state, the same parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import crosscut as cc
from tests.parallel.standalone import BOUND, OPTIMIZERS, build, loss_of, named, on_threads, one_device, worst


def check(ctx, optimizer, average_first=False, group="ctx", options=None):
    """Three steps, compared each with one device. Returns the largest error over the bound."""
    cls, kw = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else (optimizer, {})
    kw = {**kw, **(options or {})}
    group = ctx if group == "ctx" else None
    model, ref = build(5 + ctx.rank), build(5)
    with torch.no_grad():  # not a row after another in memory
        for m in (model, ref):
            m.twice.weight.data = m.twice.weight.data.t().contiguous().t()
            m.frozen.load_state_dict(build(5).frozen.state_dict())
            m.offset.copy_(build(5).offset)
    if average_first:
        cc.data_parallel(model, group)
    opt, errors = cc.ShardedOptimizer(model.parameters(), cls, group=group, **kw), []
    for step, (_, params) in enumerate(one_device(ref, ctx.world_size, cls, kw)):
        opt.zero_grad()
        loss_of(model, step, ctx.rank).backward()
        opt.step()
        errors.append(worst(named(model), params))
    assert model.unused.weight not in opt.state
    return max(errors)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_to_one_device(size, optimizer):
    assert max(on_threads(check, size, optimizer)) < 1


ELEMENTWISE = "Adadelta Adagrad Adam Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_of_torch(name):
    assert max(on_threads(check, 3, getattr(torch.optim, name), options={"lr": 0.01})) < 1


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"amsgrad": True, "lr": torch.tensor(0.01)}])
def test_every_implementation(options):
    assert max(on_threads(check, 2, "adamw", options=options)) < 1


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_plain_torch_distributed(pool, backend):
    assert max(pool.run(check, "adamw", group=None, world_size=2, backend=backend)) < 1


def test_without_a_process_group():
    assert cc.spawn(check, "sgd", group=None, world_size=1, backend="gloo")[0] < 1


def test_after_data_parallel():
    assert max(on_threads(check, 3, "sgd", average_first=True)) < 1


def equal_gradients(ctx):
    """Gradients that all ranks have already. Returns how far the step is from that of the plain optimizer, in ulp."""
    torch.manual_seed(1)
    model = nn.Linear(7, 5)
    ref = copy.deepcopy(model)
    opts = [cc.ShardedOptimizer(model.parameters(), torch.optim.SGD, group=ctx, lr=0.1)]
    opts.append(torch.optim.SGD(ref.parameters(), lr=0.1))
    for m, opt in zip((model, ref), opts, strict=True):
        m(torch.arange(14.0).view(2, 7).sin()).square().sum().backward()
        opt.step()
    pairs = zip(model.parameters(), ref.parameters(), strict=True)
    return max(float(((a - b) / (b.abs() * 2**-23)).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averaged_gradients_come_out_unchanged(size):
    assert max(on_threads(equal_gradients, size)) <= (2 if size == 3 else 0)  # a third is no binary number


def resident(ctx):
    """(bytes of this rank's state, those of one device, number of parameters), without the step counts."""
    model = build(1)
    opts = [cc.ShardedOptimizer(model.parameters(), torch.optim.AdamW, group=ctx)]
    opts.append(torch.optim.AdamW(copy.deepcopy(model).parameters()))
    out = []
    for opt in opts:
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p) if p.requires_grad else None
        opt.step()
        storages = {
            v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
            for state in opt.state.values()
            for k, v in state.items()
            if k != "step"
        }
        out.append(sum(storages.values()))
    return *out, len(list(model.parameters()))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_holds_its_part_of_the_state(size):
    found = on_threads(resident, size)
    for mine, whole, count in found:
        assert mine <= whole / size + count * 2 * 8  # a part is rounded up to a number: two of 8 bytes in Adam
    assert sum(mine for mine, _, _ in found) >= found[0][1]


def calls(ctx):
    model = build(1)
    opt = cc.ShardedOptimizer(model.parameters(), torch.optim.SGD, group=ctx, lr=0.1)
    ctx.ledger.clear()
    loss_of(model, 0, ctx.rank).backward()
    opt.step()
    return [e.op for e in ctx.ledger.entries]


def test_a_step_is_a_reduce_scatter_and_an_all_gather():
    assert on_threads(calls, 2) == [["reduce_scatter", "all_gather"]] * 2


def tiny(ctx):
    """One parameter of two numbers on four ranks; empty parameters; a tuple of a name and a parameter."""
    w, empty = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.zeros(0, 3))
    opt = cc.ShardedOptimizer([("w", w), ("empty", empty)], torch.optim.Adam, group=ctx, lr=0.5)
    for _ in range(2):
        w.grad, empty.grad = torch.tensor([1.0, -1.0]) * (1 + ctx.rank), torch.zeros(0, 3)
        opt.step()
    state = opt.state_dict()
    assert state["param_groups"][0]["param_names"] == ["w", "empty"]
    opt.load_state_dict(state)
    return w.detach(), state["state"][0]["exp_avg"].shape, state["state"][1]["exp_avg"].shape


def test_fewer_numbers_than_ranks():
    for w, shape, empty in on_threads(tiny, 4):
        assert torch.allclose(w, torch.tensor([0.0, 3.0]), atol=1e-6)
        assert (shape, empty) == ((2,), (0, 3))


def groups_schedule_closure(ctx):
    """Interleaved groups with options of their own, a scheduler, a closure, a group that comes later."""
    model, ref = build(1), build(1)
    out = []
    for m in (model, ref):
        named_params = dict(m.named_parameters())
        later = [named_params.pop(n) for n in ("head.weight", "blocks.1.up.bias") if n in named_params]
        matrices = [p for p in named_params.values() if p.dim() > 1]
        others = [p for p in named_params.values() if p.dim() <= 1]
        params = [{"params": iter(matrices), "weight_decay": 0.3}, {"params": others, "lr": 0.002}]
        kw = {"lr": 0.01}
        opt = (
            cc.ShardedOptimizer(params, torch.optim.AdamW, group=ctx, **kw)
            if m is model
            else torch.optim.AdamW(params, **kw)
        )
        assert isinstance(opt, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.05, 0.01], total_steps=8)
        losses = []
        for step in range(4):
            if step == 2:
                scheduler = None
                opt.add_param_group({"params": later, "betas": (0.5, 0.6)})

            def closure(m=m, opt=opt, step=step):
                opt.zero_grad(set_to_none=step % 2 == 0)
                if m is model:
                    loss = loss_of(m, step, ctx.rank)
                else:
                    loss = sum(loss_of(m, step, r) / ctx.world_size for r in range(ctx.world_size))
                loss.backward()
                return loss

            losses.append(opt.step(closure))
            if scheduler is not None:
                scheduler.step()
        out.append((losses, opt.state_dict()))
    assert all(loss.requires_grad for loss in out[0][0])
    assert worst(named(model), named(ref)) < 1
    same_state(out[0][1], out[1][1])
    return True


def same_state(ours, theirs):
    """A state of ShardedOptimizer is one of the plain optimizer."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state)
        for key, value in state.items():
            found = ours["state"][index][key]
            assert (found.shape, found.dtype) == (value.shape, value.dtype)
            assert (found - value).norm() <= BOUND * max(1e-3, value.norm()), key


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups_schedulers_closures(size):
    assert on_threads(groups_schedule_closure, size) == [True] * size


def resumes(ctx, state, weights, steps):
    model = build(1)
    opt = cc.ShardedOptimizer(model.parameters(), torch.optim.AdamW, group=ctx, lr=0.5)
    if state is not None:
        model.load_state_dict(weights)
        opt.load_state_dict(copy.deepcopy(state))
        assert opt.param_groups[0]["lr"] == 0.01
    else:
        opt.param_groups[0]["lr"] = 0.01
    for step in steps:
        opt.zero_grad()
        sum(loss_of(model, step, r) for r in range(2)).backward()  # the same on every rank
        opt.step()
    return opt.state_dict(), model.state_dict()


def test_a_state_knows_no_number_of_ranks():
    state, weights = on_threads(resumes, 3, None, None, range(2))[1]
    plain = torch.optim.AdamW((ref := build(1)).parameters(), lr=0.5)
    plain.load_state_dict(copy.deepcopy(state))  # loads where nothing is sharded
    ref.load_state_dict(weights)
    for step in range(2, 4):
        plain.zero_grad()
        sum(loss_of(ref, step, r) for r in range(2)).backward()
        plain.step()
    for size in (1, 2, 4):
        for again, found in on_threads(resumes, size, state, weights, range(2, 4)):
            same_state(again, plain.state_dict())
            assert all((found[n] - p).norm() <= BOUND * max(1, p.norm()) for n, p in ref.state_dict().items())
    back = on_threads(resumes, 2, plain.state_dict(), ref.state_dict(), [])[0][0]  # and a plain one here
    same_state(back, plain.state_dict())


def misused(ctx, kind):
    if kind == "differ":
        cc.ShardedOptimizer([("w", nn.Parameter(torch.ones(2 + ctx.rank)))], torch.optim.SGD, group=ctx)
    w = nn.Parameter(torch.ones(4, 3))
    lr = 0.1 * (1 + ctx.rank) if kind == "options" else 0.1
    opt = cc.ShardedOptimizer([w], torch.optim.SGD, group=ctx, lr=lr, momentum=0.9)
    if kind == "two":
        cc.ShardedOptimizer([("w", w)], torch.optim.AdamW, group=ctx)
    w.grad = torch.ones_like(w)
    if kind == "state":
        opt.step()
        state = opt.state_dict()
        state["state"][0]["momentum_buffer"] = torch.ones(3, 4)
        opt.load_state_dict(state)
    elif kind == "moved":
        w.data = w.data.clone()
    elif kind == "sparse":
        w.grad = torch.ones(4, 3).to_sparse()
    opt.step()


@pytest.mark.parametrize(
    "kind, message",
    [
        ("differ", r"'w' is float32 \(2,\) on rank 0, but rank 1 has float32 \(3,\) in its place"),
        ("options", r"'its optimizer' is SGD with .*'lr': 0.1.* on rank 0, but rank 1 has SGD with .*'lr': 0.2"),
        ("two", r"another ShardedOptimizer steps 'w' already; use one for all, or delete the first"),
        ("state", r"the state 'momentum_buffer' to load for 'parameter 0' has shape \(3, 4\), the parameter \(4, 3\)"),
        ("moved", r"'parameter 0' was moved or converted since; make the optimizer after that"),
        ("sparse", r"the gradient of 'parameter 0' is sparse; use sparse=False"),
    ],
)
def test_refusals(kind, message):
    with pytest.raises(ValueError, match=message):
        on_threads(misused, 2, kind)


def replaced(ctx):
    w = nn.Parameter(torch.ones(4, 3))
    for _ in range(2):
        opt = cc.ShardedOptimizer([w], torch.optim.SGD, group=ctx, lr=0.1)
        opt.itself = opt  # a cycle, as a scheduler makes one
        del opt
    return True


def test_one_that_was_deleted_may_be_replaced():
    assert on_threads(replaced, 2) == [True, True]


class Lamb(torch.optim.Optimizer):
    """Scales its step by the norm of the whole tensor."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.norm() * p.grad / p.grad.norm()


class Signs(Lamb):
    """Element-wise, and nobody's list names it."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


def test_optimizers_that_need_whole_tensors_are_refused():
    params = [nn.Parameter(torch.ones(3, 3))]
    for cls in (torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor, torch.optim.SparseAdam, Lamb):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs whole tensors .*; use an element-wise optimizer"):
            cc.ShardedOptimizer(params, cls, lr=0.0 if cls is Lamb else 0.1)
    assert cc.ShardedOptimizer(params, Signs).inner.defaults == {"lr": 0.01}
    with pytest.raises(ValueError, match="Invalid learning rate"):
        cc.ShardedOptimizer(params, torch.optim.AdamW, lr=-1.0)
    with pytest.raises(ValueError, match="has gaps in memory"):
        cc.ShardedOptimizer([nn.Parameter(torch.ones(4, 4)[:, :3])], torch.optim.AdamW)
