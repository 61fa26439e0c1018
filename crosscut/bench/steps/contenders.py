"""One training step as crosscut does it and as stock PyTorch does it, each as a function to be timed.

Stock PyTorch with the settings that its documentation recommends for speed: DDP with gradients as views of the buckets,
FSDP2 by layer, tensor parallelism with DTensor and a parallel loss, pipelining with 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crosscut.bench.steps.workloads import Workload
from crosscut.comm.context import Context
from crosscut.models.transformer import Transformer
from crosscut.parallel.batch import local_batch
from crosscut.parallel.distribute import distribute

Step = Callable[[], Any]
OPTIMIZER: dict[str, Any] = {"lr": 1e-4}


def ours(workload: Workload, parallel: str, ctx: Context) -> Step:
    """crosscut's step: one engine for all of them."""
    layout = workload.layout(parallel, ctx.world_size)
    inputs, labels = workload.batch()
    seq = None if inputs.is_floating_point() else inputs.size(1)
    model = distribute(
        workload.build, workload.dims, layout, ctx, loss_fn=workload.loss_fn, batch=inputs.size(0), seq=seq
    )
    optimizer = model.optimizer(torch.optim.AdamW, **OPTIMIZER)
    batch = local_batch(inputs, labels, layout, ctx)

    def step() -> None:
        optimizer.zero_grad()
        model.forward_backward(batch)
        optimizer.step()

    return step


def single(workload: Workload, micro_batches: int) -> Step:
    """The whole batch on one device, in `micro_batches` pieces."""
    module = workload.build()
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIMIZER)
    inputs, labels = workload.batch()
    pieces = list(zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True))

    def step() -> None:
        optimizer.zero_grad()
        for x, y in pieces:
            (workload.loss_fn(module(x), y) / micro_batches).backward()
        optimizer.step()

    return step


def peer(workload: Workload, parallel: str, ctx: Context) -> Step:
    """Stock PyTorch's step, over the default process group."""
    torch.manual_seed(0)
    return {"ddp": _ddp, "fsdp": _fsdp, "tp": _tp, "pp": _pp}[parallel](workload, ctx)


def _own_rows(workload: Workload, ctx: Context) -> tuple[Tensor, Tensor]:
    inputs, labels = workload.batch()
    return inputs.chunk(ctx.world_size)[ctx.rank], labels.chunk(ctx.world_size)[ctx.rank]


def _plain(model: nn.Module, workload: Workload, inputs: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss_fn(model(inputs), labels).backward()
        optimizer.step()

    return step


def _ddp(workload: Workload, ctx: Context) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(workload.build(), gradient_as_bucket_view=True)
    return _plain(model, workload, *_own_rows(workload, ctx))


def _mesh(ctx: Context) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ctx.world_size,))


def _fsdp(workload: Workload, ctx: Context) -> Step:
    from torch.distributed.fsdp import fully_shard

    model, mesh = workload.build(), _mesh(ctx)
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(model, workload, *_own_rows(workload, ctx))


def _tp(workload: Workload, ctx: Context) -> Step:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    model, mesh = workload.build(), _mesh(ctx)
    inputs, labels = workload.batch()
    if not isinstance(model, Transformer):
        plan: dict[str, Any] = {"layers.*": ColwiseParallel(output_layouts=Replicate())}
        return _plain(parallelize_module(model, mesh, plan), workload, inputs, labels)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        **{f"layers.*.attn.{name}": ColwiseParallel() for name in "qkv"},
        "layers.*.attn.o": RowwiseParallel(),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    step = _plain(parallelize_module(model, mesh, plan), workload, inputs, labels)

    def with_parallel_loss() -> None:
        with loss_parallel():
            step()

    return with_parallel_loss


class _Stage(nn.Module):
    """A pipeline's stage of a model with `layers`: the model with the other stages' parts taken out."""

    def __init__(self, model: nn.Module, index: int, count: int) -> None:
        super().__init__()
        layers: Any = model.layers
        each = -(-len(layers) // count)
        self.layers = nn.ModuleList(list(layers)[index * each : (index + 1) * each])
        self.is_transformer = isinstance(model, Transformer)
        self.embed: Any = model.embed if self.is_transformer and index == 0 else None
        self.norm: Any = model.norm if self.is_transformer and index == count - 1 else None
        self.head: Any = model.head if self.is_transformer and index == count - 1 else None
        self.cfg: Any = model.cfg

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_transformer:
            for layer in self.layers:
                x = nn.functional.gelu(layer(x))
            return x
        from crosscut.models.transformer import rope_table

        positions = torch.arange(x.size(1))
        if self.embed is not None:
            x = self.embed(x)
        rope = rope_table(positions, self.cfg.head_dim, self.cfg.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        return x if self.head is None else self.head(self.norm(x))


def _pp(workload: Workload, ctx: Context) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    inputs, labels = workload.batch()
    module = _Stage(workload.build(), ctx.rank, ctx.world_size)
    stage = PipelineStage(module, ctx.rank, ctx.world_size, torch.device("cpu"), group=dist.group.WORLD)
    schedule = Schedule1F1B(stage, workload.micro_batches, loss_fn=workload.loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIMIZER)

    def step() -> None:
        optimizer.zero_grad()
        if ctx.rank == 0:
            schedule.step(inputs)
        elif ctx.rank == ctx.world_size - 1:
            schedule.step(target=labels, losses=[])
        else:
            schedule.step()
        optimizer.step()

    return step
