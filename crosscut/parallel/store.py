"""The store of a layout at work: which parameters are sharded over which axes, block by block.

ZeRO-1 keeps parameters and gradients whole, reduces the gradients once a step and gathers the updated parameters;
ZeRO-2 reduces after every micro-batch; ZeRO-3 also keeps the parameters cut. The plan says the axes of each parameter
(layout/params.py); shard.py and sharder.py do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.comm.context import Context
from crosscut.layout.plan import Plan, block_of
from crosscut.parallel.shard import Member, Unit
from crosscut.parallel.sharder import Block, Sharder


class Store:
    """The sharded parameters of one rank's stage.

    `module` holds its share under the plan: whole local tensors, or its rows where the plan keeps parameters cut. Until
    `drive` the Parameters that stand in it have whole shapes and, where they are kept cut, no numbers.
    Attributes: `shards`, by the first name of each parameter on this stage.
    """

    def __init__(self, module: nn.Module, plan: Plan, ctx: Context) -> None:
        self._plan = plan
        self._module = module
        names: dict[int, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        members: dict[tuple, list[Member]] = {}
        for name, p in module.named_parameters():
            param, called = plan.params[name], names[id(p)]
            if not param.store_axes:
                continue
            rest = tuple(a for a in param.sum_axes if a not in param.store_axes) if p.requires_grad else ()
            member = Member(
                name,
                whole=None if param.store_parameters else p,
                rows=p.detach() if param.store_parameters else None,
                shape=param.local_shape,
                owners=tuple((module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in called),
                rest=ctx.group(rest) if rest else None,
            )
            key = (block_of(called), param.store_axes, p.dtype, p.requires_grad)
            members.setdefault(key, []).append(member)
        self._units: dict[str, list[Unit]] = {}
        for (block, axes, _, trains), found in members.items():
            found.sort(key=lambda m: m.rest.label if m.rest is not None else "")  # neighbours are summed in one call
            unit = Unit(found, ctx.group(axes), requires_grad=trains)
            unit.put(whole=True)
            self._units.setdefault(block, []).append(unit)
        self._places = {p.name: (unit, p) for units in self._units.values() for unit in units for p in unit.pieces}
        for unit, piece in self._places.values():
            if not unit.keeps_whole and unit.requires_grad:
                piece.shard.register_hook(_refuse(piece.name))
        self.shards = {name: piece.shard for name, (_, piece) in self._places.items()}

    def drive(self) -> Sharder:
        """From now on parameters are gathered, let go and reduced as the store says."""
        store, pp = self._plan.layout.store, self._plan.layout.mesh.size("pp")
        rest = Block(self._units.pop("", []))
        return Sharder(
            [Block(units, self._module.get_submodule(name)) for name, units in self._units.items()], rest,
            release_after_use=store.zero == 3 and store.reshard == "use",
            reduce_always=store.zero >= 2 and pp == 1,
        )  # fmt: skip

    def reduced(self, name: str) -> Tensor | None:
        """This rank's part of the reduced, unpublished gradient of `name`: flat, with its padding."""
        unit, piece = self._places[name]
        return None if unit.grad is None else piece.of(unit.grad)


def _refuse(name: str) -> Callable[[Tensor], None]:
    """A hook for a shard: its own gradient never comes out of backward, unless someone computed with the shard."""

    def hook(_: Tensor) -> None:
        raise ValueError(
            f"{name} was used while only this rank's rows of it were there: use it in the forward of the module that "
            f"holds it (layers of a list must be called, not read)"
        )

    return hook


def check_elementwise(cls: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device) -> None:
    """Raise ValueError unless `cls` updates each element by itself, so that it may work on shards.

    Tried, not looked up: three steps on a small matrix must equal, to rounding, those on its two halves.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, generator=generator, dtype=torch.float64).to(device)
    grads = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).to(device)

    def updated(rows: slice) -> Tensor:
        p = nn.Parameter(whole[rows].clone())
        optimizer = cls([p], **options)
        for group in optimizer.param_groups:
            group.update(lr=torch.full_like(group["lr"], 0.1) if isinstance(group.get("lr"), Tensor) else 0.1)
        for grad in grads:
            p.grad = grad[rows].clone()
            optimizer.step()
        return p.detach()

    try:
        halves = torch.cat([updated(slice(0, 2)), updated(slice(2, 4))])
        same = torch.allclose(halves, updated(slice(0, 4)), rtol=1e-9, atol=1e-12)
    except Exception as error:
        raise ValueError(f"{cls.__name__} cannot be used under a store: {str(error).splitlines()[0]}") from error
    if not same:
        raise ValueError(
            f"{cls.__name__} needs whole tensors: its step on parts of a parameter is not that on the whole; use it "
            f"with zero = 0, or one that works element by element (SGD, AdamW, ...)"
        )
