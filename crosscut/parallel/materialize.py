"""From a whole model to the numbers one rank holds: built, or drawn layout-free, then cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from crosscut.comm.context import Context
from crosscut.layout.plan import Plan
from crosscut.models.init import Init, draw
from crosscut.parallel.supported import DTYPES
from crosscut.parallel.tensor import take_slice


def build_whole(
    model: nn.Module | Callable[[], nn.Module], seed: int, ctx: Context
) -> tuple[nn.Module, Mapping[str, Init] | None]:
    """(the whole model, its init table or None). With a table the model is on the meta device and holds no numbers yet.

    A module that is handed over gets rank 0's values on every rank; one that is built is the same everywhere, by its
    seed.
    """
    if isinstance(model, nn.Module):
        if any(p.is_meta for p in model.parameters()):
            if not hasattr(model, "init_table"):
                raise ValueError(
                    "the model is on the meta device and has no init_table(): pass a callable that builds it"
                )
            return model, _table_of(model)
        ctx.claim_module(model)
        for value in [*model.parameters(), *model.buffers()]:
            ctx.world.broadcast(value.detach(), src=0, tag="initial values", kind="control")
        return model, None
    probe = on_meta(model)
    if probe is not None and hasattr(probe, "init_table"):
        if next(probe.buffers(), None) is not None:
            raise ValueError(
                "a model with an init_table() may hold no buffers: nothing would fill them; compute them in forward"
            )
        return probe, _table_of(probe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(), None


def _table_of(model: nn.Module) -> Mapping[str, Init]:
    table: Callable[[], Mapping[str, Init]] = model.init_table  # type: ignore[assignment]  # not one of nn.Module's own
    return table()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model without numbers; None where its constructor needs them (reads a value, loads a file)."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):
        return None


def hold_share(module: nn.Module, plan: Plan, ctx: Context, table: Mapping[str, Init] | None, seed: int) -> None:
    """Replace each parameter of `module` (whole shapes, this rank's stage) by this rank's slice, in the dtype of master
    weights, on its device: of a parameter that is kept cut between uses, the rows that it keeps. Buffers get the dtype
    of activations.

    Numbers are drawn from `table` if there is one, else cut from the module's own. Tied names stay one parameter.
    """
    coords, sizes, precision = ctx.coords, plan.layout.mesh.sizes, plan.layout.precision
    dtype = DTYPES[precision.master]
    new: dict[int, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if id(old) not in new:
            param = plan.params[name]
            ranges = (param.stored_ranges if param.store_parameters else param.ranges)(coords, sizes)
            if table is not None:
                first = param.tied_to or name
                local = draw(first, param.shape, ranges, table[first], seed)
            else:
                local = take_slice(old.detach(), param, ranges)
            local = local.to(device=ctx.device, dtype=dtype if local.is_floating_point() else local.dtype)
            if local.data_ptr() == old.data_ptr() or not local.is_contiguous():
                local = local.clone(memory_format=torch.contiguous_format)  # own storage: the whole can be let go
            new[id(old)] = nn.Parameter(local, requires_grad=old.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, new[id(old)])
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        moved = buffer.to(ctx.device)
        moved = moved.to(DTYPES[precision.compute]) if moved.is_floating_point() else moved
        module.get_submodule(owner)._buffers[leaf] = moved
