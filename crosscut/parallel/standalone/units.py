"""The units of `fully_shard`: which parameters are gathered together, and gradients that are averaged into shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from crosscut.comm.group import Group
from crosscut.parallel.chunks import collect
from crosscut.parallel.elementwise import require_elementwise
from crosscut.parallel.shard import Member, Owner, Unit, rows_of
from crosscut.parallel.standalone.ranks import own, owner

SHARDED, REPLACED = "fully_shard", "fully_shard (the whole of before)"


class AverageUnit(Unit):
    """A unit whose gradients may wait on their rank, are averaged, and stay None where every rank's are.

    A rank's row of gradients carries one number more for each parameter: 1 where this rank has a gradient.
    """

    def __init__(self, members: Sequence[Member], group: Group, compute: torch.dtype | None, trained: bool) -> None:
        rows = members[0].rows
        assert rows is not None
        reduce = torch.promote_types(rows.dtype, torch.float32)
        super().__init__(members, group, compute=compute, reduce=reduce, average=True, requires_grad=trained)
        self.marks = len(self.pieces)
        self._given = [False] * self.marks  # which of the gradients that wait have come
        self._arrived: Callable[[int], None] = lambda index: None
        self._hooked: set[int] = set()
        for p in self.pieces:
            own(p.shard, SHARDED)

    def when_gradient(self, fn: Callable[[int], None]) -> None:
        """`fn(id)` is called when the gradient of a parameter is complete; `trained()` says the ids."""
        self._arrived = fn
        self.refresh()

    def trained(self) -> list[int]:
        """The parameters that are not frozen."""
        return [id(p.whole) for p in self.pieces if p.whole.requires_grad]

    def refresh(self) -> None:
        """Before a forward: shards may have been frozen or thawed. Raises ValueError if they were replaced."""
        for p in self.pieces:
            p.whole.grad = None  # what a backward without an end has left
            if p.whole.requires_grad != p.shard.requires_grad:
                p.whole.requires_grad_(p.shard.requires_grad)
            if p.whole.requires_grad and id(p.whole) not in self._hooked:
                self._hooked.add(id(p.whole))
                p.whole.register_post_accumulate_grad_hook(lambda param: self._arrived(id(param)))
            stands = all(module._parameters[leaf] is p.shard for module, leaf in p.owners)
            if not stands or p.shard.untyped_storage().data_ptr() != self._flat.untyped_storage().data_ptr():
                raise ValueError(
                    f"fully_shard: {p.name!r} was replaced, moved or converted since; do that before fully_shard, and "
                    f"load with crosscut.load_full_state_dict"
                )

    def keep(self) -> list[bool]:
        """Move the gradients that have come to where they wait, and add up, for the next reduction."""
        given = super().keep()
        self._given = [before or now for before, now in zip(self._given, given, strict=True)]
        return given

    @torch.no_grad()
    def start_reduce(self, tag: str = "") -> None:
        """Begin to average the gradients that have come or wait, which are let go."""
        rows = self._take_kept()
        rows[:, self.width :] = torch.tensor(self._given, device=rows.device)
        self._reducing = self.group.reduce_scatter(rows.view(-1), op="avg", async_op=True, tag=tag)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for it, and add the result to the shards' `.grad`."""
        assert self._reducing is not None
        part, self._reducing = self._reducing.wait(), None
        marks = self._given if all(self._given) else part[self.width :].tolist()
        self._given = [False] * len(self.pieces)
        for p, mark in zip(self.pieces, marks, strict=True):
            if mark:
                grad = p.own(part).to(p.shard.dtype)
                p.shard.grad = grad if p.shard.grad is None else p.shard.grad.add_(grad)

    @torch.no_grad()
    def put_full(self) -> None:
        """Let whole parameters in the shards' own dtype stand in the modules, apart from those of a forward."""
        rows = self.group.all_gather(self._flat, tag="full_parameters", kind="control").view(self.group.size, -1)
        for p in self.pieces:
            full = nn.Parameter(torch.empty_like(p.whole, dtype=p.shard.dtype), requires_grad=False)
            collect(p.of(rows), full.data)
            for module, leaf in p.owners:
                module._parameters[leaf] = full

    @torch.no_grad()
    def take_full(self) -> None:
        """The other way round: this rank's rows of them into the shards."""
        for p in self.pieces:
            module, leaf = p.owners[0]
            full = module._parameters[leaf]
            assert full is not None
            p.shard.copy_(rows_of(full, self.group))
        self.put(whole=False)


def find_blocks(
    module: nn.Module, units: Sequence[nn.Module] | None, inner: Sequence[tuple[nn.Module, list[nn.Module]]]
) -> list[nn.Module]:
    """The submodules that are gathered each by itself: those given, or the children of ModuleLists, and those wrapped
    already (with their own blocks); of nested ones the outermost. In the order of registration.
    """
    every = list(module.modules())
    for unit in units or ():
        if unit is module or not any(m is unit for m in every):
            raise ValueError(f"fully_shard: units= names a {type(unit).__name__} that is no submodule of the module")
    lists = [m for m in every if isinstance(m, nn.ModuleList)] if units is None else []
    chosen = {id(m) for m in units or ()} | {id(child) for one in lists for child in one}
    chosen |= {id(m) for whole, blocks in inner for m in (blocks or [whole])}
    chosen -= {id(m) for m in lists}  # a list is never called
    inside = {id(m) for top in every if id(top) in chosen for m in top.modules() if m is not top}
    return [m for m in every if id(m) in chosen - inside and next(m.parameters(), None) is not None]


def make_units(
    module: nn.Module, blocks: Sequence[nn.Module], group: Group, compute: torch.dtype | None, made: list[AverageUnit]
) -> tuple[list[list[AverageUnit]], list[tuple[str, nn.Parameter]]]:
    """(the units of each block, those of the rest last; the 0-d parameters, which stay whole).

    A parameter that several blocks use belongs to the rest. `made`: units of parts wrapped before, which are kept. The
    memory of the parameters that were there is let go.
    """
    homes = [{id(m) for m in block.modules()} for block in blocks]

    def home(owners: Iterable[Owner]) -> int:
        found = [i for i, ids in enumerate(homes) for m, _ in owners if id(m) in ids]
        one = bool(found) and len(found) == len(list(owners)) and len(set(found)) == 1
        return found[0] if one else len(blocks)

    units: list[list[AverageUnit]] = [[] for _ in range(len(blocks) + 1)]
    for unit in made:
        units[home([o for p in unit.pieces for o in p.owners])].append(unit)
    named: dict[int, tuple[str, nn.Parameter, list[Owner]]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        owners = named.setdefault(id(p), (name, p, []))[2]
        if not any(m is module.get_submodule(path) and n == leaf for m, n in owners):
            owners.append((module.get_submodule(path), leaf))
    runs: dict[tuple[Any, ...], list[tuple[str, nn.Parameter, list[Owner]]]] = {}
    for name, p, owners in named.values():
        if p.dim() > 0 and owner(p) is None:
            runs.setdefault((home(owners), p.dtype, p.requires_grad), []).append((name, p, owners))
    for (index, dtype, trained), run in runs.items():
        members = [Member(name, rows=rows_of(p, group), shape=tuple(p.shape), owners=tuple(o)) for name, p, o in run]
        units[index].append(AverageUnit(members, group, compute if dtype.is_floating_point else None, trained))
        for _, p, _ in run:
            own(p, REPLACED)
            p.data = p.data.new_empty(0)
    whole = [(name, p) for name, p, _ in named.values() if p.dim() == 0]
    for _, p in whole:
        own(p, SHARDED)
    return units, whole


@cache
def watch_optimizers() -> None:
    """Look at every optimizer before its first step, from now on."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ValueError for one that trains nothing, and for one that needs whole tensors of shards."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.__dict__.get("_crosscut_seen") == len(params):
        return
    name, owners = type(optimizer).__name__, {owner(p) for p in params}
    if REPLACED in owners:
        raise ValueError(
            f"{name} holds the parameters that fully_shard has replaced, and would train nothing; make it after "
            f"fully_shard, over module.parameters()"
        )
    if SHARDED in owners:
        takes = inspect.signature(type(optimizer)).parameters
        any_name = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        options = {key: value for key, value in optimizer.defaults.items() if any_name or key in takes}
        require_elementwise(type(optimizer), options, "fully_shard")
    optimizer.__dict__["_crosscut_seen"] = len(params)
