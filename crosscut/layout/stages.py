"""Which pipeline stage holds which module: the ModuleList of layers is divided, the rest stands before or after it."""

from __future__ import annotations

from dataclasses import dataclass

from crosscut.layout.errors import LayoutError, divisors, listed
from crosscut.layout.layout import Layout
from crosscut.layout.spec import ModelSpec


@dataclass(frozen=True)
class Stages:
    """Global stage numbers run 0 .. pp * virtual_stages - 1; stage s lives on pp coordinate s % pp."""

    layers: str | None  # the ModuleList
    layer_stages: tuple[int, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_stages: int

    def layer_of(self, name: str) -> int | None:
        """The index of the layer that a parameter or module is in, or None."""
        if self.layers is None or not name.startswith(self.layers + "."):
            return None
        index = name[len(self.layers) + 1 :].split(".")[0]
        return int(index) if index.isdigit() else None

    def of(self, name: str) -> int:
        """The global stage of a parameter or module."""
        layer = self.layer_of(name)
        if layer is not None:
            return self.layer_stages[layer]
        if any(name == m or name.startswith(m + ".") for m in self.after):
            return self.num_stages - 1
        return 0


def find_stages(spec: ModelSpec, layout: Layout) -> Stages:
    """The stages of a model. Raises LayoutError when pp > 1 and the layers are not one family or do not divide."""
    names = [p.name for p in spec.params]
    layers = spec.dims.layers if spec.dims.layers is not None else _family(names, layout)
    indices = sorted({int(i) for n in names if (i := _index(n, layers)) is not None})
    count, num = len(indices), layout.num_stages
    if layers is not None and not indices:
        raise LayoutError(f"dims table: layers = {layers!r} holds no numbered layers with parameters")
    if indices != list(range(count)):
        raise LayoutError(f"the layers of {layers!r} are numbered {indices}: they must run from 0 without gaps")
    if num > 1 and (count == 0 or count % num):
        pp, virtual = layout.mesh.size("pp"), layout.schedule.virtual_stages
        if count == 0:
            raise LayoutError(f"pp={pp} needs a ModuleList of layers in {spec.name}, and it has none; use pp=1")
        if virtual > 1:
            raise LayoutError(
                f"layers={count} cannot be cut into pp={pp} x virtual_stages={virtual} = {num} stages; "
                f"use a number of stages in {divisors(count)}"
            )
        raise LayoutError(f"layers={count} cannot be cut over pp={pp}; use pp in {divisors(count)}")
    per_stage = max(count // num, 1)
    before, after = _around(spec, names, layers)
    if num > 1:
        known = (*before, *after)
        lost = [
            n for n in names if _index(n, layers) is None and not any(n == m or n.startswith(m + ".") for m in known)
        ]
        if lost:
            raise LayoutError(
                f"pp={layout.mesh.size('pp')}: neither before nor after the layers: {listed(lost)}; "
                "name their modules in Dims(before=..., after=...)"
            )
    return Stages(layers, tuple(i // per_stage for i in range(count)), before, after, num)


def _index(name: str, layers: str | None) -> int | None:
    if layers is None or not name.startswith(layers + "."):
        return None
    part = name[len(layers) + 1 :].split(".")[0]
    return int(part) if part.isdigit() else None


def _family(names: list[str], layout: Layout) -> str | None:
    """The one family of numbered modules that is not inside another, or None without pp."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and i > 0:
                found[".".join(parts[:i])] = None
                break  # what is numbered deeper is inside this one
    if len(found) == 1:
        return next(iter(found))
    if len(found) > 1 and layout.num_stages > 1:
        raise LayoutError(f"several families of numbered modules ({listed(found)}); name one: Dims(layers=...)")
    return None


def _around(spec: ModelSpec, names: list[str], layers: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules before and after the layers, by registration unless the table says; each at the level where its name
    parts from that of the layers."""
    if layers is None:
        return spec.dims.before or (), spec.dims.after or ()
    trunk = layers.split(".")
    before: dict[str, None] = {}
    after: dict[str, None] = {}
    seen_layers = False
    for name in names:
        if _index(name, layers) is not None:
            seen_layers = True
            continue
        parts = name.split(".")
        shared = 0
        while shared < min(len(trunk), len(parts) - 1) and trunk[shared] == parts[shared]:
            shared += 1
        module = ".".join(parts[: shared + 1]) if shared + 1 < len(parts) else ".".join(parts[:-1]) or parts[0]
        (after if seen_layers else before)[module] = None
    given_before, given_after = spec.dims.before, spec.dims.after
    if given_before is not None and given_after is None:
        after = {m: None for m in (*before, *after) if m not in given_before}
    if given_after is not None and given_before is None:
        before = {m: None for m in (*before, *after) if m not in given_after}
    return (
        tuple(before) if given_before is None else given_before,
        tuple(after) if given_after is None else given_after,
    )
