"""The mesh: the named grid of ranks. Rank numbers run through it in row-major order, the last axis fastest."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crosscut.layout.errors import LayoutError, nearest

AXES = ("pp", "rep", "dp", "cp", "tp")  # slowest links first: neighbours in tp are neighbours in rank

NOT_AXES = {  # names people type that are something else here
    "ep": 'experts are cut over ranks that already exist: experts = "dp" in [cuts]',
    "sp": 'sequence parallelism runs over the tp ranks: --sp, or seq = "tp" in [cuts]',
    "fsdp": "what FSDP does is a store over dp: --zero 3",
    "ddp": "call it dp",
}


@dataclass(frozen=True)
class Mesh:
    """Axis names with their sizes, outermost first; every one of the five axes is there, absent ones with size 1."""

    axes: tuple[str, ...]
    _sizes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        spec: str | Mapping[str, int | str] | Mesh,
        world_size: int | None = None,
        order: tuple[str, ...] | None = None,
    ) -> Mesh:
        """A mesh from `"pp=2,dp=2,tp=2"` or `{"dp": "auto", "tp": 2}`.

        One axis may be `"auto"`: what is left of `world_size`, else of the environment's WORLD_SIZE, else of the number
        of GPUs. However typed, axes are laid out in the order pp, rep, dp, cp, tp unless `order` (a permutation of the
        axes used) says otherwise. Raises LayoutError for an unknown axis, an axis given twice, a size below 1, and a
        mesh whose product is not `world_size`.
        """
        if isinstance(spec, Mesh):
            return spec._checked(world_size)
        sizes = _parse(spec) if isinstance(spec, str) else dict(spec)
        for axis in sizes:
            if axis in NOT_AXES:
                raise LayoutError(f"{axis!r} is not a mesh axis: {NOT_AXES[axis]}")
            if axis not in AXES:
                raise LayoutError(f"unknown mesh axis {axis!r}{nearest(axis, AXES)}")
        axes = _ordered(order, sizes)
        autos = [a for a, n in sizes.items() if n == "auto"]
        if len(autos) > 1:
            raise LayoutError(f'only one axis can be "auto", not {" and ".join(autos)}')
        fixed: dict[str, int] = {}
        for axis, size in sizes.items():
            if size == "auto":
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(f'mesh axis {axis}={size!r} must be a whole number of at least 1, or "auto"')
            fixed[axis] = size
        if autos:
            world, source = _world(world_size, autos[0])
            rest = math.prod(fixed.values())
            if world % rest:
                raise LayoutError(
                    f'{autos[0]}="auto": the other axes take {rest} ranks, which does not divide {source} of {world}'
                )
            fixed[autos[0]] = world // rest
        mesh = cls(axes, tuple(fixed.get(a, 1) for a in axes))
        return mesh._checked(world_size)

    def _checked(self, world_size: int | None) -> Mesh:
        if world_size is not None and world_size != self.world_size:
            sizes = self.describe()
            fit = ""
            others = self.world_size // self.size("dp")
            if world_size % others == 0:
                fit = f"; dp={world_size // others} would fit"
            raise LayoutError(f"mesh {sizes} has {self.world_size} ranks but the world size is {world_size}{fit}")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first, absent axes with 1."""
        return dict(zip(self.axes, self._sizes, strict=True))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self._sizes)

    def size(self, axes: str | tuple[str, ...]) -> int:
        """The number of ranks along one axis (1 if absent), or along several together."""
        sizes = self.sizes
        names = (axes,) if isinstance(axes, str) else axes
        for axis in names:
            if axis not in sizes:
                raise LayoutError(f"unknown mesh axis {axis!r}{nearest(axis, self.axes)}")
        return math.prod(sizes[a] for a in names)

    def coords(self, rank: int) -> dict[str, int]:
        """Axis -> this rank's index along it."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in 0..{self.world_size - 1} of mesh {self.describe()}")
        out: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self._sizes), strict=True):
            out[axis] = rank % size
            rank //= size
        return {a: out[a] for a in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at `coords`; an axis left out counts as 0."""
        for axis in coords:
            if axis not in self.axes:
                raise LayoutError(f"unknown mesh axis {axis!r}{nearest(axis, self.axes)}")
        rank = 0
        for axis, size in zip(self.axes, self._sizes, strict=True):
            index = coords.get(axis, 0)
            if not 0 <= index < size:
                raise LayoutError(f"coordinate {axis}={index} is not in 0..{size - 1}")
            rank = rank * size + index
        return rank

    def group_ranks(self, axes: str | tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only in `axes`, in mesh order (so also in rising order)."""
        names = (axes,) if isinstance(axes, str) else axes
        self.size(names)  # refuses unknown names
        here = self.coords(rank)
        groups = [{**here}]
        for axis in self.axes:
            if axis in names:
                groups = [{**g, axis: i} for g in groups for i in range(self.size(axis))]
        return tuple(self.rank(g) for g in groups)

    def partition(self, axes: str | tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`: every rank is in exactly one; ordered by their first rank."""
        return tuple(sorted({self.group_ranks(axes, r) for r in range(self.world_size)}))

    def ordered(self, axes: object) -> tuple[str, ...]:
        """Those of `axes` (any collection of names) that have size > 1, outermost first."""
        return tuple(a for a, n in zip(self.axes, self._sizes, strict=True) if n > 1 and a in axes)  # type: ignore[operator]

    def label(self, axes: str | tuple[str, ...]) -> str:
        """`"dp+tp"`: the axes of size > 1, outermost first; `""` when none is left."""
        names = (axes,) if isinstance(axes, str) else axes
        return "+".join(self.ordered(names))

    def describe(self) -> str:
        """`"pp=2,dp=2"`: the axes of size > 1, or `"dp=1"` for one rank."""
        return ",".join(f"{a}={n}" for a, n in self.sizes.items() if n > 1) or "dp=1"


def _parse(text: str) -> dict[str, int | str]:
    sizes: dict[str, int | str] = {}
    for item in filter(None, (p.strip() for p in text.split(","))):
        axis, eq, size = (p.strip() for p in item.partition("="))
        if not eq or not (size == "auto" or size.lstrip("-").isdigit()):
            raise LayoutError(f'mesh {text!r}: {item!r} is not of the form axis=size, as in "dp=2,tp=2"')
        if axis in sizes:
            raise LayoutError(f"mesh {text!r} gives axis {axis!r} twice")
        sizes[axis] = size if size == "auto" else int(size)
    if not sizes:
        raise LayoutError(f'mesh {text!r} is empty; one rank is "dp=1"')
    return sizes


def _ordered(order: tuple[str, ...] | None, sizes: Mapping[str, object]) -> tuple[str, ...]:
    if order is None:
        return AXES
    for axis in order:
        if axis not in AXES:
            raise LayoutError(f"mesh order: unknown axis {axis!r}{nearest(axis, AXES)}")
        if order.count(axis) > 1:
            raise LayoutError(f"mesh order names axis {axis!r} twice")
    missing = [a for a in sizes if a not in order]
    if missing:
        raise LayoutError(f"mesh order {list(order)} leaves out {', '.join(missing)}")
    return tuple(a for a in AXES if a not in order) + tuple(order)


def _world(world_size: int | None, axis: str) -> tuple[int, str]:
    if world_size is not None:
        return world_size, "the world size"
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"]), "WORLD_SIZE"
    gpus = num_gpus()
    if gpus:
        return gpus, "the number of GPUs"
    raise LayoutError(f'{axis}="auto" needs a world size: give --world-size, set WORLD_SIZE, or write a number')


def num_gpus() -> int:
    """The NVIDIA GPUs that the driver shows, at most as many as CUDA_VISIBLE_DEVICES lists. No torch needed."""
    try:
        present = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"]))
