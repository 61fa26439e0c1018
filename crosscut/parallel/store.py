"""The store of a layout at work: which parameters are sharded over which axes, block by block.

ZeRO-1 keeps parameters and gradients whole, reduces the gradients once a step and gathers the updated parameters;
ZeRO-2 reduces after every micro-batch; ZeRO-3 also keeps the parameters cut. The plan says the axes of each parameter
(layout/params.py); shard.py and sharder.py do the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from crosscut.comm.context import Context
from crosscut.layout.plan import Plan, block_of
from crosscut.parallel.shard import Member, Unit
from crosscut.parallel.sharder import Block, Sharder
from crosscut.parallel.supported import DTYPES


class Store:
    """The sharded parameters of one rank's stage.

    `module` holds its share under the plan: whole local tensors, or its rows where the plan keeps parameters cut. Until
    `drive` the Parameters that stand in it have whole shapes and, where they are kept cut, no numbers.
    Attributes: `shards`, by the first name of each parameter on this stage.
    """

    def __init__(self, module: nn.Module, plan: Plan, ctx: Context) -> None:
        self._plan = plan
        self._module = module
        compute, reduce = DTYPES[plan.layout.precision.compute], DTYPES[plan.layout.precision.reduce]
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
        for (block, axes, dtype, trains), found in members.items():
            found.sort(key=lambda m: m.rest.label if m.rest is not None else "")  # neighbours are summed in one call
            narrow = compute if dtype.is_floating_point else None
            unit = Unit(found, ctx.group(axes), compute=narrow, reduce=reduce, requires_grad=trains)
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
