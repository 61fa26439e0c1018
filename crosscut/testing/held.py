"""What a rank holds of a model: its parameters by their names in the whole model, and which part of each.

Read from DTensor placements (FSDP2, tensor parallel), from a `crosscut.DistributedModel` and from
`crosscut.fully_shard`; a plain tensor is all of its parameter, unless `names` says otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.layout.plan import own_rows
from crosscut.testing.factors import RANKS, Ranges

WRAP = "_crosscut_wrap"  # where crosscut.fully_shard keeps what a module's hooks share
WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")
INNER = ("_orig_mod.", "_checkpoint_wrapped_module.")
Names = Mapping[str, tuple[str, Any]]
Record = tuple[str, str, tuple[int, ...] | None, Ranges, Tensor]  # kind, logical name, whole shape, part, values


def records_of(model: Any, names: Names | None, reduced: Mapping[Tensor, Tensor]) -> Iterator[Record]:
    """This rank's updated parameters and their gradients, each with its place in the whole model. reduced: gradients
    that are not the parameters' own."""
    seen: set[str] = set()
    for name, p, place in _parameters(model, names or {}):
        if p.is_complex():
            raise ValueError(f"{name} is {p.dtype}, and only real numbers can be compared; capture a model without it")
        if name in seen and names:
            raise ValueError(f"names gives {name!r} to two parameters of this rank; give each its own")
        seen.add(name)
        for kind, value in (("gradient", reduced.get(p, p.grad)), ("parameter", p.detach())):
            if value is not None:
                value = value.to_dense() if value.is_sparse else value
                shape, ranges, local = place(value)
                if tuple(sum(b - a for a, b in dim) for dim in ranges) != tuple(local.shape):
                    raise ValueError(f"{name}: its slice {_text(ranges)} does not fit its shape {tuple(local.shape)}")
                yield kind, name, shape, ranges, local
        if p.grad is None and p.requires_grad:
            shape, ranges, local = place(p.detach())
            yield "gradient", name, shape, ranges, torch.zeros_like(local)


Place = Callable[[Tensor], tuple[tuple[int, ...] | None, Ranges, Tensor]]


def _parameters(model: Any, names: Names) -> Iterator[tuple[str, nn.Parameter, Place]]:
    if hasattr(model, "held_ranges"):  # a DistributedModel: its plan says it all
        for name, p in model.named_parameters():
            plan = model.plan.params[name]
            ranges = model.held_ranges(name)
            yield plan.tied_to or name, p, partial(_at, plan.shape, ranges)
        return
    while type(model).__name__ in WRAPPERS:
        model = model._orig_mod if type(model).__name__ == "OptimizedModule" else model.module
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise ValueError("FSDP1 keeps flat parameters that do not say what they hold; use fully_shard (FSDP2)")
    for part in _of_fsdp2(model):
        part.reshard()  # a forward since backward may have left whole parameters, which have no gradients
    shards = _shards(model)
    unknown = set(names) - {clean(name) for name, _ in model.named_parameters()}
    if unknown:
        raise ValueError(f"names has {sorted(unknown)[0]!r}, which is no parameter of {type(model).__name__}")
    for full, p in model.named_parameters():
        name = clean(full)
        if name in names:
            logical, where = names[name]
            yield logical, p, partial(_at, None, _slices(where, p, name))
        else:
            yield name, p, shards.get(p, _place)


def _shards(model: nn.Module) -> dict[Tensor, Place]:
    """The places of the shards of `crosscut.fully_shard`: rows, as torch.chunk cuts them."""
    found: dict[Tensor, Place] = {}
    for unit in (unit for m in model.modules() for unit in getattr(m.__dict__.get(WRAP), "units", ())):
        for piece in unit.pieces:
            shape = tuple(piece.whole.shape)
            rows = own_rows(shape[0], unit.group.rank, unit.group.size)
            found[piece.shard] = partial(_at, shape, ((rows,), *(((0, n),) for n in shape[1:])))
    return found


def _at(shape: tuple[int, ...] | None, ranges: Ranges, x: Tensor) -> tuple[tuple[int, ...] | None, Ranges, Tensor]:
    return shape, ranges, x


def clean(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for inner in INNER:
        name = name.replace(inner, "")
    return name


def _place(x: Any) -> tuple[tuple[int, ...], Ranges, Tensor]:
    """The place of a DTensor by its placements; of a plain tensor: all of it."""
    shape = tuple(x.shape)
    whole: Ranges = tuple(((0, n),) for n in shape)
    if not hasattr(x, "placements"):
        return shape, whole, x
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = x.device_mesh, x.placements
    if not all(type(p) in (Shard, Replicate) for p in placements):
        return shape, whole, x.full_tensor()  # partial, or cut in another order than it stands: made whole
    held = [(0, n) for n in shape]
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            start, stop = held[p.dim]
            width = -(-(stop - start) // mesh.size(axis))  # as torch.chunk
            first = min(start + mesh.get_local_rank(axis) * width, stop)
            held[p.dim] = (first, min(first + width, stop))
    return shape, tuple((one,) for one in held), x.to_local()


def _slices(where: Any, x: Tensor, name: str) -> Ranges:
    slices = where if isinstance(where, tuple) else (where,)
    if len(slices) > x.ndim or not all(
        isinstance(s, slice) and isinstance(s.start, int) and isinstance(s.stop, int) and s.step in (None, 1)
        for s in slices
    ):
        raise ValueError(f"names[{name!r}]: {where!r} must be slice(start, stop), or one for each of {x.ndim} dims")
    rest = [(0, n) for n in tuple(x.shape)[len(slices) :]]
    return tuple((one,) for one in [*((s.start, s.stop) for s in slices), *rest])


def _text(ranges: Ranges) -> str:
    return ", ".join("+".join(f"{a}:{b}" for a, b in dim) for dim in ranges)


def _of_fsdp2(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "set_reshard_after_forward")]


def computes(model: Any) -> list[str]:
    """The dtypes that modules compute in where their parameters do not say it: under mixed precision."""
    if hasattr(model, "held_ranges"):  # a DistributedModel
        return {"bf16": ["bfloat16"], "fp16": ["float16"]}.get(model.layout.precision.compute, [])
    found = {getattr(m.__dict__.get(WRAP), "compute_dtype", None) for m in model.modules()}
    with contextlib.suppress(AttributeError):
        found |= {part._get_fsdp_state()._mp_policy.param_dtype for part in _of_fsdp2(model)}
    return [str(dtype).removeprefix("torch.") for dtype in found if dtype is not None]


def coordinates(model: Any, rank: int, size: int) -> dict[str, tuple[int, int]]:
    """axis -> (this rank's coordinate, the axis's size); without named axes all ranks are one axis."""
    if hasattr(model, "held_ranges"):
        sizes = model.layout.mesh.sizes
        return {a: (model.ctx.coords[a], n) for a, n in sizes.items() if n > 1}
    found: dict[str, tuple[int, int]] = {}
    for p in model.parameters():
        mesh: Any = getattr(p, "device_mesh", None)
        for i in range(mesh.ndim if mesh is not None else 0):
            name = mesh.mesh_dim_names[i] if mesh.mesh_dim_names else RANKS if mesh.ndim == 1 else f"mesh dim {i}"
            found[name] = (mesh.get_local_rank(i), mesh.size(i))
    return found or {RANKS: (rank, size)}
