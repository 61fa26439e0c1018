"""Who takes part: a crosscut group, or the world of a plain torch.distributed program; and that all start equal."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from crosscut.comm.backends.base import World
from crosscut.comm.backends.solo import SoloWorld
from crosscut.comm.backends.torchdist import TorchWorld
from crosscut.comm.context import Context
from crosscut.comm.dtypes import dtype_name
from crosscut.comm.group import Group
from crosscut.comm.launched import launched
from crosscut.comm.objects import all_gather_object

Ranks = Group | Context | None  # what `group=` takes


def join(group: Ranks, device: torch.device, module: nn.Module | None = None) -> Group:
    """The group meant by `group`: itself, a context's world or, for None, the world of torch.distributed (whichever
    back end the program has chosen), else this process alone.

    Raises ValueError for None where it would silently mean one rank: in ranks that are threads, and in a process that
    a launcher started as one of several and that has not called init_process_group.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, Context):
        if module is not None:
            group.claim_module(module)
        return group.world
    if group is not None:
        raise ValueError(f"group={group!r} is a {type(group).__name__}; pass a crosscut Group or Context, or None")
    if threading.current_thread().name.startswith("crosscut-rank-"):
        raise ValueError("group=None in a rank that is a thread cannot tell which rank it is; pass the ctx: group=ctx")
    world: World
    if dist.is_available() and dist.is_initialized():
        name = dict(part.split(":") for part in dist.get_backend_config().split(",")).get(device.type, "gloo")
        if device.type == "cuda" and name == "shm":
            name = "nccl"  # which serves its CUDA tensors
        pg = dist.group.WORLD
        assert pg is not None
        options = getattr(pg._get_backend(device), "options", None)
        world = TorchWorld(name, device, options._timeout.total_seconds() if options else 600.0, owns=False)
    else:
        place = launched()
        if place is not None and place.world_size > 1:
            raise ValueError(
                f"this process was started as rank {place.rank} of {place.world_size}, but there is no process group "
                f"yet; call torch.distributed.init_process_group() first"
            )
        world = SoloWorld("solo", device)
    return Context(world).world


def check_same(what: str, group: Group, described: Mapping[str, str]) -> None:
    """Raise ValueError, on every rank, unless all ranks describe the same things in the same order."""
    rows = [list(row.items()) for row in all_gather_object(group, dict(described), tag=f"{what}/check")]
    for rank, row in enumerate(rows):
        if row == rows[0]:
            continue
        index = next((i for i, (a, b) in enumerate(zip(rows[0], row, strict=False)) if a != b), None)
        if index is None:
            first, other = len(rows[0]), len(row)
            raise ValueError(f"{what}: rank 0 has {first} tensors, rank {rank} {other}; build the same on every rank")
        (name, first_text), (other_name, other_text) = rows[0][index], row[index]
        raise ValueError(
            f"{what}: {name!r} is {first_text} on rank 0, but rank {rank} has "
            f"{other_text if name == other_name else f'{other_name!r}, {other_text},'} in its place; build the same on "
            f"every rank"
        )


def describe(x: Tensor) -> str:
    """`float32 (3, 4)`, and whether it is frozen: what must be equal on all ranks."""
    return f"{dtype_name(x.dtype)} {tuple(x.shape)}" + ("" if x.requires_grad or not x.is_leaf else " (frozen)")


def copy_from_first(group: Group, tensors: Iterable[Tensor], tag: str) -> None:
    """Every rank gets rank 0's values, so that ranks that were seeded differently start equal."""
    for x in tensors:
        group.broadcast(x.detach(), src=0, tag=tag, kind="control")


def check_module(what: str, module: object) -> None:
    """Raise ValueError unless `module` is a module whose parameters have their shapes."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"{what}: {module!r:.60} is a {type(module).__name__}; pass a torch.nn.Module")
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(x):
            raise ValueError(f"{what}: {name!r} is lazy and has no shape yet; run one forward before wrapping")


def prepare(what: str, module: nn.Module, group: Ranks) -> Group:
    """The group of `module`, whose ranks hold modules of the same names, shapes and dtypes: now also the same values,
    frozen parameters and buffers included. Parameters that this package already takes care of are left alone.
    """
    params = dict(module.named_parameters())
    new = {name: p for name, p in params.items() if owner(p) is None}
    tensors = {**new, **dict(module.named_buffers())}
    for name, x in tensors.items():
        if x.is_meta:
            raise ValueError(f"{what}: {name!r} is on the meta device and has no values; module.to_empty() and fill it")
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    joined = join(group, device, module)
    check_same(what, joined, {name: describe(x) for name, x in tensors.items()})
    copy_from_first(joined, tensors.values(), f"{what}/start")
    return joined


def owner(p: Tensor) -> str | None:
    """Which of this package's functions takes care of the parameter, or None."""
    return getattr(p, "_crosscut_owner", None)


def own(p: Tensor, by: str) -> None:
    """Say that `by` takes care of the parameter from now on. (A deep copy of a parameter does not inherit this.)"""
    p._crosscut_owner = by  # type: ignore[attr-defined]
