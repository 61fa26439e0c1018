"""Training programs that are not crosscut's, each with the lines that capture needs and with errors to seed: stock DDP,
FSDP2, DTensor tensor parallel, a data-parallel loop by hand, and tensor parallel by hand with shards in plain tensors.

Every program trains the same little model on the same batches. Some labels are ignored, so that ranks hold unequal
numbers of tokens, and sizes are odd, so that shards are uneven.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.testing import capture

DIM, HIDDEN, CLASSES, ROWS, SEQ, STEPS, CLIP = 7, 12, 5, 12, 3, 2, 0.05


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.out = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.down(torch.relu(self.up(self.norm(x)))))


def net(dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    x = torch.randn(ROWS, SEQ, DIM, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (ROWS, SEQ), generator=generator)
    y[torch.rand(ROWS, SEQ, generator=generator) < 0.4] = -100
    y[:2] = -100  # the first ranks hold fewer tokens
    return (x + torch.arange(ROWS)[:, None, None] / ROWS).to(dtype), y


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")


def tokens(y: Tensor) -> int:
    return int((y != -100).sum())


def alone(folder, clip=False, dtype=torch.float64, seed=0, steps=STEPS, order=None):  # type: ignore[no-untyped-def]
    """The run to trust: one process, whole batches."""
    model = net(dtype, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(step, dtype)
        x, y = (x, y) if order is None else (x[order], y[order])
        loss = loss_sum(model, x, y) / tokens(y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP) if clip else None
        optimizer.step()
        capture(model, optimizer, folder, loss=loss, grad_norm=norm)
        optimizer.zero_grad()


def rows_of(rank: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def weighed(total: Tensor, mine: Tensor, everyone: Tensor, bug: str | None) -> Tensor:
    """The loss whose gradients DDP and FSDP may average over ranks."""
    size = dist.get_world_size()
    if bug == "averaged":
        return total / tokens(mine)  # the mean of this rank's tokens, however many they are
    loss = total * size / tokens(everyone)
    return loss / size if bug == "one_over_n" else loss


def ddp(ctx, folder, bug=None):  # type: ignore[no-untyped-def]
    from torch.nn.parallel import DistributedDataParallel

    inner = net()
    if bug == "missing_sync":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["down.bias"])
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = rows_of(ctx.rank, ctx.world_size, step)
        total = loss_sum(model, x, y)
        weighed(total, y, batch(step)[1], bug).backward()
        optimizer.step()
        capture(model, optimizer, folder, loss=(total / tokens(y), tokens(y)))
        optimizer.zero_grad()


def fsdp(ctx, folder, bug=None, clip=False):  # type: ignore[no-untyped-def]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    mesh = init_device_mesh("cpu", (ctx.world_size,), mesh_dim_names=("dp",))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = rows_of(ctx.rank, ctx.world_size, step)
        total = loss_sum(model, x, y)
        weighed(total, y, batch(step)[1], bug).backward()
        norm = None
        if bug == "norm":
            local = [p.grad.to_local() for p in model.parameters()]  # what this rank holds, and no sum over ranks
            norm = torch.stack([g.norm() for g in local if g.numel()]).norm()
            for g in local:
                g.mul_((CLIP / (norm + 1e-6)).clamp(max=1))
        elif clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        capture(model, optimizer, folder, loss=(total / tokens(y), tokens(y)), grad_norm=norm)
        optimizer.zero_grad()


def tp(ctx, folder, bug=None, clip=False):  # type: ignore[no-untyped-def]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ctx.world_size,), mesh_dim_names=("tp",))
    model = parallelize_module(net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        x, y = batch(step)
        loss = loss_sum(model, x, y) / tokens(y)
        loss.backward()
        if bug == "missing_sync":  # ranks saw different gradients of a parameter that all of them hold
            model.norm.weight.grad.mul_(2.0 * ctx.rank)
        norm = None
        if clip or bug == "norm":
            whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
            norm = torch.stack([g.norm() for g in (local if bug == "norm" else whole)]).norm()
            for g in local:
                g.mul_((CLIP / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        capture(model, optimizer, folder, loss=loss, grad_norm=norm)
        optimizer.zero_grad()


def by_hand(ctx, folder, bug=None):  # type: ignore[no-untyped-def]
    """Data parallel in thirty lines: sum the gradients over ranks, the loss divided by all tokens."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = rows_of(ctx.rank, ctx.world_size, step)
        total = loss_sum(model, x, y)
        count = torch.tensor(tokens(y))
        dist.all_reduce(count)
        loss = total / (tokens(y) * ctx.world_size if bug == "averaged" else int(count))
        loss.backward()
        for name, p in model.named_parameters():
            if bug == "missing_sync" and name == "norm.weight":
                continue
            dist.all_reduce(p.grad)
            if bug == "one_over_n":
                p.grad /= ctx.world_size
            if bug == "wrong_rank" and name == "up.weight" and ctx.rank == 1:
                p.grad[3:6] = 0
        optimizer.step()
        capture(model, optimizer, folder, loss=(total / tokens(y), tokens(y)))
        if bug != "stale":
            optimizer.zero_grad()


def tp_by_hand(ctx, folder, bug=None):  # type: ignore[no-untyped-def]
    """Columns of `up` and rows of `down` as plain tensors: `names` says what they are of the whole."""
    whole, size, rank = net(), ctx.world_size, ctx.rank
    width = HIDDEN // size
    mine = slice(rank * width, (rank + 1) * width)
    model = net()
    model.up = nn.Linear(DIM, width, dtype=torch.float64)
    model.down = nn.Linear(width, DIM, dtype=torch.float64)
    with torch.no_grad():
        model.up.weight.copy_(whole.up.weight[mine])
        model.up.bias.copy_(whole.up.bias[mine])
        model.down.weight.copy_(whole.down.weight[:, mine])
        model.down.bias.copy_(whole.down.bias)
    names = {
        "up.weight": ("up.weight", mine),
        "up.bias": ("up.bias", mine),
        "down.weight": ("down.weight", (slice(0, DIM), mine)),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        h = ctx.world  # a group with autograd is not needed: the sums below are written out
        normed = model.norm(x)
        inner = torch.relu(model.up(normed.detach().requires_grad_()))
        # Forward and backward by hand around the two sums that tensor parallel owes.
        partial = F.linear(inner, model.down.weight)
        summed = h.all_reduce(partial.detach().clone()).requires_grad_()
        skip = x.clone().requires_grad_()
        loss = F.cross_entropy(model.out(skip + summed + model.down.bias).flatten(0, 1), y.flatten(), ignore_index=-100)
        loss.backward()
        leaf = normed.detach().requires_grad_()
        F.linear(torch.relu(model.up(leaf)), model.down.weight).backward(summed.grad)
        back = leaf.grad if bug == "missing_sum" else h.all_reduce(leaf.grad.clone())
        normed.backward(back)
        optimizer.step()
        capture(model, optimizer, folder, loss=loss, names=names)
        optimizer.zero_grad()


def fails(ctx, folder, what):  # type: ignore[no-untyped-def]
    """Calls of capture that must fail on every rank."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"slice": {"up.weight": ("up.weight", slice(0, 3))}, "name": {"nothing": ("x", slice(0, 1))}}.get(what)
    if what == "slice" and ctx.rank:
        names = None
    try:
        capture(model, optimizer, folder, names=names)
    except ValueError as error:
        return str(error)
    return ""


def with_crosscut(ctx, folder):  # type: ignore[no-untyped-def]
    """The same model under a crosscut layout."""
    import crosscut as cc

    dims = cc.Dims({
        "norm.weight": "embed", "norm.bias": "embed", "up.weight": "mlp embed", "up.bias": "mlp",
        "down.weight": "embed mlp", "down.bias": "embed", "out.weight": "_ embed", "out.bias": "_",
    })  # fmt: skip

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)

    layout = cc.Layout.of("dp=2,tp=2", compute="fp64")
    model = cc.distribute(net(), dims, layout, ctx, loss_fn=loss_fn)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        out = model.forward_backward(cc.local_batch(*batch(step), layout, ctx))
        optimizer.step()
        capture(model, optimizer, folder, loss=out.loss)
        optimizer.zero_grad()
