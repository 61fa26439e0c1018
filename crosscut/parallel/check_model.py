"""`check_model`: does a model keep the contract of docs/model_contract.md? Found out before it trains, not after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crosscut.comm.context import Context
from crosscut.comm.launch import spawn
from crosscut.layout.layout import Layout
from crosscut.layout.rules import derive
from crosscut.layout.spec import Dims, ModelSpec
from crosscut.parallel.batch import local_batch
from crosscut.parallel.distribute import DistributedModel, LossFn, distribute
from crosscut.parallel.inspect import loss_kind, spec_from_module

BOUND = 1e-9  # fp64: rounding stays near 1e-15, a broken clause is off by a factor


class ContractError(ValueError):
    """A model breaks a clause of the contract; the message names the clause and the module."""


@dataclass(frozen=True)
class Checked:
    """What was tried: the layouts under which the model computed the loss and gradients of one device."""

    layouts: tuple[str, ...]


def check_model(
    build_model: Callable[[], nn.Module], dims: Dims, *, batch: tuple[Tensor, Tensor | None] | None = None,
    loss_fn: LossFn | None = None, layouts: tuple[str, ...] = ("dp=2", "tp=2", "pp=2", "tp=2,pp=2"),
) -> Checked:  # fmt: skip
    """Run one step of the model in fp64 under small layouts, ranks as threads, and compare it with one device.

    build_model: makes the model (give it small sizes that 2 divides). batch: (inputs, labels) with an even number of
    rows; by default 4 rows of 8 random token ids, for a model with the dim vocab. loss_fn: as for `distribute`; by
    default next-token cross-entropy. layouts: the meshes to try.

    Raises ContractError naming the first clause that is broken: a parameter without a row, an operation on a partial or
    cut value, a layer called twice or out of order, a value that differs from one device.
    """
    module = build_model()
    spec = spec_from_module(module, dims)
    for mesh in layouts:  # what the table lacks is said first, with or without data
        _derive(spec, mesh)
    if batch is None:
        batch = _token_batch(spec, module)
    loss = loss_fn or _default_loss(dims)
    inputs, labels = batch
    seq = inputs.size(1) if "seq" in spec.input_dims else None
    tried = []
    for mesh in layouts:
        layout = Layout.of(mesh, compute="fp64")
        _derive(spec, mesh, inputs.size(0), seq)
        one = spawn(
            _one_step,
            build_model,
            dims,
            Layout.of("dp=1", compute="fp64"),
            inputs,
            labels,
            loss,
            world_size=1,
            backend="threads",
        )[0]
        try:
            many = spawn(
                _one_step,
                build_model,
                dims,
                layout,
                inputs,
                labels,
                loss,
                world_size=layout.mesh.world_size,
                backend="threads",
            )
        except ValueError as error:
            raise ContractError(f"{mesh}: {error}") from error
        _compare(mesh, one, many)
        tried.append(mesh)
    return Checked(tuple(tried))


def _derive(spec: ModelSpec, mesh: str, batch: int | None = None, seq: int | None = None) -> None:
    """Raise ContractError where the table does not do for `mesh`; without sizes, for the least batch that divides."""
    try:
        layout = Layout.of(mesh, compute="fp64")
        if seq is None and "seq" in spec.input_dims:
            seq = layout.mesh.world_size
        derive(spec, layout, batch=batch or layout.micro_batches * layout.mesh.size(layout.batch_axes), seq=seq)
    except ValueError as error:
        raise ContractError(f"{mesh}: {error}") from error


@dataclass(frozen=True)
class _Step:
    loss: float
    grads: dict[str, Tensor]
    ranges: dict[str, tuple]


def _one_step(
    ctx: Context,
    build: Callable[[], nn.Module],
    dims: Dims,
    layout: Layout,
    inputs: Tensor,
    labels: Tensor | None,
    loss_fn: LossFn,
) -> _Step:
    model: DistributedModel = distribute(build, dims, layout, ctx, loss_fn=loss_fn)
    out = model.forward_backward(local_batch(inputs, labels, layout, ctx))
    held = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in held.items()}
    ranges = {name: model.plan.params[name].ranges(ctx.coords, layout.mesh.sizes) for name in held}
    return _Step(out.loss, grads, ranges)


def _compare(mesh: str, one: _Step, many: list[_Step]) -> None:
    for rank, step in enumerate(many):
        if abs(step.loss - one.loss) > BOUND * max(1.0, abs(one.loss)):
            raise ContractError(f"{mesh}: rank {rank} computes the loss {step.loss:.12g}, one device {one.loss:.12g}")
        largest = max((float(g.norm()) for g in one.grads.values()), default=0.0)
        for name, grad in step.grads.items():
            whole = one.grads.get(name)
            if whole is None:
                continue  # the second name of a tied weight: its first name is compared on the first stage
            for dim, held in enumerate(step.ranges[name]):
                whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in held], dim)
            error = float((grad - whole).norm())
            if not error <= BOUND * max(float(whole.norm()), 1e-3 * largest):
                raise ContractError(
                    f"{mesh}: the gradient of {name} on rank {rank} is not one device's (off by {error:.3g} of "
                    f"{float(whole.norm()):.3g}); see docs/model_contract.md"
                )


def _token_batch(spec, module: nn.Module) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    embedding = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    if loss_kind(spec.dims) != "cross_entropy" or embedding is None:
        raise ContractError(
            "check_model needs batch=(inputs, labels): the model has no dim vocab to make token ids for"
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (4, 9), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def _default_loss(dims: Dims) -> LossFn:
    from crosscut.models.mlp import mean_square
    from crosscut.models.transformer import next_token_loss

    return next_token_loss if loss_kind(dims) == "cross_entropy" else mean_square
