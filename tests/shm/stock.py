"""Programs for stock PyTorch, with nothing of crosscut in them but the launching: what each returns is compared."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Two branches, of which a rank may use one; a buffer; a frozen parameter."""

    def __init__(self, dim=16):
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)
        self.left = nn.Linear(dim, dim)
        self.right = nn.Linear(dim, dim)
        self.last = nn.Linear(dim, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, branch=None):
        x = self.norm(torch.relu(self.first(x)))
        if branch in (None, "left"):
            x = x + self.left(x)
        if branch in (None, "right"):
            x = x - self.right(x)
        return self.last(x) * self.frozen


def data(step, rank, rows=8, dim=16):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(100 * step + rank))


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def whole(model):
    """Parameters of DTensors, put together."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def ddp(ctx, mode):
    torch.manual_seed(1000 + ctx.rank)  # DDP makes the ranks equal
    model = DistributedDataParallel(
        Net(),
        find_unused_parameters=mode == "unused",
        static_graph=mode == "static",
        bucket_cap_mb=0.002,
        gradient_as_bucket_view=mode == "views",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        branch = ("left", "right")[(ctx.rank + step) % 2] if mode == "unused" else None
        if mode == "no_sync":
            with model.no_sync():
                model(data(step, ctx.rank + 50)).square().mean().backward()
        model(data(step, ctx.rank), branch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**parameters(model), **dict(model.named_buffers())}


def ddp_compressed(ctx):
    """A communication hook, which works on the futures of the calls."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    for step in range(3):
        model(data(step, ctx.rank)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fsdp(ctx, mesh_shape):
    torch.manual_seed(0)
    names = ("dp",) if len(mesh_shape) == 1 else ("rep", "dp")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16), nn.LayerNorm(16), nn.Linear(16, 5))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(3):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            model(data(step, ctx.rank + 50 * part)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return {**whole(model), "norms": torch.stack(norms)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel(ctx):
    """A 2-D mesh: tensor parallel inside, FSDP2 outside."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ctx.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Block(), Block())
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dp = mesh["dp"].get_local_rank()
    for step in range(2):
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(10 * step + dp))
        out = model(distribute_tensor(x, mesh["tp"], [Shard(1)]).to_local())
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def dtensors(ctx):
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    x = torch.arange(24.0).view(6, 4)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows @ distribute_tensor(x.t().contiguous(), mesh, [Replicate()])
    return {
        "columns": columns.to_local().clone(),
        "back": columns.redistribute(mesh, [Replicate()]).to_local(),
        "product": product.full_tensor(),
        "sum": (rows.sum() + columns.sum()).full_tensor(),
        "partial": (columns @ distribute_tensor(x.t().contiguous(), mesh, [Shard(0)])).full_tensor(),
    }


def pipeline(ctx, schedule):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(ctx.world_size)]
    stage = PipelineStage(layers[ctx.rank], ctx.rank, ctx.world_size, torch.device("cpu"))
    run = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule](
        stage, 4, loss_fn=lambda out, target: (out - target).square().mean()
    )
    x, target, losses = data(0, 0), data(1, 0), []
    for _ in range(2):
        if ctx.rank == 0:
            run.step(x)
        elif ctx.rank == ctx.world_size - 1:
            run.step(target=target, losses=losses)
        else:
            run.step()
    return {name: p.grad for name, p in layers[ctx.rank].named_parameters()} | {"losses": torch.tensor(losses)}


def checkpoint(ctx, folder, mode):
    """Save, plainly or in the background while training goes on, and load into another model."""
    folder = os.path.join(folder, f"{ctx.backend}-{mode}")
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 16)) for _ in range(2))
    for one in (model, other):
        fully_shard(one)
    before = whole(model)
    if mode == "async":
        # The saving thread's collectives need a group of their own.
        saved = dcp.async_save(model.state_dict(), checkpoint_id=folder, process_group=dist.new_group())
        for step in range(3):  # collectives of the training, while the saving thread has its own
            model(data(step, ctx.rank)).square().mean().backward()
        saved.result()
    else:
        dcp.save(model.state_dict(), checkpoint_id=folder)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    after = whole(other)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return after


def meshes(ctx):
    """Groups of a 2-D mesh, and groups of ranks in another order, at once."""
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("a", "b"))
    out = {}
    for name in ("a", "b"):
        x = torch.tensor([float(ctx.rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        out[name] = x
    group = dist.new_group([3, 1, 0])
    if ctx.rank in (0, 1, 3):
        x = torch.tensor([10.0 ** dist.get_rank(group)])
        dist.all_reduce(x, group=group)
        dist.broadcast(y := torch.tensor([float(ctx.rank)]), 3, group=group)
        out["order"] = torch.cat([x, y, torch.tensor([float(dist.get_rank(group))])])
    return out


def sparse(ctx):
    """What shared memory does not serve: an embedding with sparse gradients under DDP."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([ctx.rank, 3])).sum().backward()
    return {"grad": model.module.weight.grad.to_dense()}
