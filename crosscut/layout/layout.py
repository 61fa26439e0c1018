"""The layout: one frozen value that says how a step is divided over ranks. TOML in and out, short forms."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosscut.layout.cuts import normal_cuts, usual_cuts
from crosscut.layout.errors import LayoutError, nearest
from crosscut.layout.mesh import AXES, Mesh
from crosscut.layout.store import STORE_AXES, Context, Precision, Recompute, Schedule, Store, choice, whole
from crosscut.layout.toml import write_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS: dict[str, tuple[str, ...]] = {
    "mesh": (*AXES, "order"),
    "cuts": (),  # its keys are dims: cuts.py checks them
    "store": ("zero", "optimizer", "gradients", "parameters", "reshard"),
    "schedule": ("name", "micro_batches", "virtual_stages"),
    "recompute": ("policy", "regather"),
    "precision": ("compute", "reduce"),
    "context": ("method",),
}


@dataclass(frozen=True)
class Layout:
    """Mesh + cuts + store + schedule + recompute + precision + context method.

    Make one with `Layout.of("dp=2,tp=2", zero=1)` or `Layout.from_toml(...)`; change one with `adjusted`. Equal layouts
    compare equal, and `Layout.from_toml(layout.to_toml()) == layout`.
    """

    mesh: Mesh
    cuts: Mapping[str, tuple[str, ...]]  # dim -> axes, outermost first
    store: Store = field(default_factory=Store)
    schedule: Schedule = field(default_factory=Schedule)
    recompute: Recompute = field(default_factory=Recompute)
    precision: Precision = field(default_factory=Precision)
    context: Context = field(default_factory=Context)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", normal_cuts(self.cuts, self.mesh))
        pp, m = self.mesh.size("pp"), self.schedule.micro_batches
        if pp > 1 and not self.cuts.get("layers"):
            raise LayoutError(f'pp={pp} cuts no layers; add layers = "pp" to [cuts]')
        if pp > 1 and self.schedule.name == "interleaved" and m % pp:
            raise LayoutError(
                f"[schedule] interleaved needs micro_batches in multiples of pp={pp}, not {m}; use {-(-m // pp) * pp}"
            )
        if pp > 1 and self.store.zero == 2:
            raise LayoutError(
                f"zero=2 with pp={pp} would reduce every gradient once a micro-batch; "
                "use zero=1, or zero=3 (once a step)"
            )
        for key in ("optimizer", "gradients", "parameters"):
            axes = getattr(self.store, key)
            # zero = N on one data-parallel rank stores nothing cut, and explain says so; an axis by name is meant.
            lost = [a for a in axes if self.mesh.size(a) == 1] if axes != ("dp",) else []
            if lost:
                there = [a for a in STORE_AXES if self.mesh.size(a) > 1]
                raise LayoutError(
                    f"[store] {key} = {list(axes)}: the mesh has no axis {lost[0]!r} of more than one rank; use "
                    f"{' or '.join(repr(a) for a in there) or 'zero = 0'}"
                )
            if axes != tuple(sorted(axes, key=self.mesh.axes.index)):
                raise LayoutError(
                    f"[store] {key} = {list(axes)} must be outermost first, as the mesh: {list(self.mesh.axes)}"
                )

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(self.cuts.items()), self.store, self.schedule, self.recompute, self.precision))

    @classmethod
    def of(
        cls,
        mesh: str | Mapping[str, int | str] | Mesh = "dp=1",
        *,
        zero: int | None = None,
        sp: bool = False,
        schedule: str | None = None,
        micro_batches: int | None = None,
        virtual_stages: int | None = None,
        cuts: Mapping[str, str | tuple[str, ...]] | None = None,
        reshard: str | None = None,
        recompute: str | None = None,
        regather: bool | None = None,
        compute: str | None = None,
        reduce: str | None = None,
        context: str | None = None,
        world_size: int | None = None,
    ) -> Layout:
        """The short form: a mesh takes the usual cuts of its axis names (`cuts.USUAL_CUTS`) unless `cuts` says others.

        `zero` 0 to 3 is the store over dp; `sp` adds tp to what cuts seq. Raises LayoutError, one line, for anything
        unknown or contradictory, and for a mesh whose product is not `world_size` (if that is given).
        """
        grid = Mesh.of(mesh, world_size)
        base = cls(grid, normal_cuts(cuts, grid) if cuts is not None else usual_cuts(grid))
        return base.adjusted(
            zero=zero, sp=sp or None, schedule=schedule, micro_batches=micro_batches, virtual_stages=virtual_stages,
            reshard=reshard, recompute=recompute, regather=regather, compute=compute, reduce=reduce, context=context,
        )  # fmt: skip

    def adjusted(
        self,
        *,
        mesh: str | Mapping[str, int | str] | Mesh | None = None,
        zero: int | None = None,
        sp: bool | None = None,
        schedule: str | None = None,
        micro_batches: int | None = None,
        virtual_stages: int | None = None,
        reshard: str | None = None,
        recompute: str | None = None,
        regather: bool | None = None,
        compute: str | None = None,
        reduce: str | None = None,
        context: str | None = None,
        world_size: int | None = None,
    ) -> Layout:
        """This layout with what is given changed: what flags do to a layout file.

        A new mesh keeps cuts that were written by hand, and takes the usual ones where the old had the usual ones; so
        does a new compute dtype with the one of the reduction.
        """
        grid, cuts = self.mesh, dict(self.cuts)
        if mesh is not None:
            grid = Mesh.of(mesh, world_size)
            usual = dict(self.cuts) == usual_cuts(self.mesh, self.sp)
            cuts = usual_cuts(grid, self.sp and grid.size("tp") > 1) if usual else cuts
        elif world_size is not None:
            Mesh.of(grid, world_size)
        if sp is not None:
            seq = [a for a in cuts.get("seq", ()) if a != "tp"] + (["tp"] if sp and grid.size("tp") > 1 else [])
            cuts = {**cuts, "seq": tuple(seq)}
        name = schedule if schedule is not None else self.schedule.name
        if virtual_stages is None:  # the name alone is enough: interleaved has 2, the others 1
            virtual_stages = max(2, self.schedule.virtual_stages) if name == "interleaved" else 1
        sched = Schedule(
            name, micro_batches if micro_batches is not None else self.schedule.micro_batches, virtual_stages
        )
        store = self.store
        if zero is not None:
            store = Store.of_stage(zero, store.reshard)
        if reshard is not None or (zero is not None and zero == 3):
            default = "step" if grid.size("pp") > 1 else "use"
            store = replace(store, reshard=reshard if reshard is not None else default)
        rec = Recompute(
            recompute if recompute is not None else self.recompute.policy,
            regather if regather is not None else self.recompute.regather,
        )
        precision = self.precision
        if compute is not None or reduce is not None:
            by_hand = precision != _precision(precision.compute, None)
            reduce = precision.reduce if reduce is None and by_hand else reduce
            precision = _precision(compute if compute is not None else precision.compute, reduce)
        method = Context(context) if context is not None else self.context
        return Layout(grid, cuts, store, sched, rec, precision, method)

    @classmethod
    def from_toml(cls, source: str | Path, world_size: int | None = None) -> Layout:
        """A layout from TOML text, or from the file that a Path (or a one-line string ending in .toml) names."""
        text, name = str(source), "layout"
        if isinstance(source, Path) or (text.endswith(".toml") and "\n" not in text):
            name = text
            try:
                text = Path(source).read_text(encoding="utf-8")
            except OSError as err:
                raise LayoutError(f"cannot read layout file {name!r}: {err.strerror or err}") from None
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as err:
            raise LayoutError(f"{name}: not valid TOML: {err}") from None
        return cls.from_dict(data, world_size)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], world_size: int | None = None) -> Layout:
        """A layout from the sections of a layout file as nested dicts. Unknown sections and keys raise LayoutError."""
        for section, body in data.items():
            if section not in SECTIONS:
                raise LayoutError(f"unknown layout section [{section}]{nearest(section, SECTIONS)}")
            if not isinstance(body, Mapping):
                raise LayoutError(f"{section} = {body!r} must be a section: [{section}]")
            for key in body:
                if section not in ("mesh", "cuts") and key not in SECTIONS[section]:
                    raise LayoutError(f"[{section}] unknown key {key!r}{nearest(key, SECTIONS[section])}")
        sizes = dict(data.get("mesh", {"dp": 1}))
        order = sizes.pop("order", None)
        mesh = Mesh.of(sizes or {"dp": 1}, world_size, tuple(order) if order is not None else None)
        cuts = normal_cuts(data["cuts"], mesh) if "cuts" in data else usual_cuts(mesh)
        sched = dict(data.get("schedule", {}))
        if sched.get("name") == "interleaved":
            sched.setdefault("virtual_stages", 2)
        precision = data.get("precision", {})
        return cls(
            mesh,
            cuts,
            _store(data.get("store", {}), mesh),
            Schedule(**sched),
            Recompute(**data.get("recompute", {})),
            _precision(precision.get("compute", "fp32"), precision.get("reduce")),
            Context(**data.get("context", {})),
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The sections of the layout file; `from_dict` gives the same layout back."""
        mesh: dict[str, Any] = {a: n for a, n in self.mesh.sizes.items() if n > 1} or {"dp": 1}
        if self.mesh.axes != AXES:
            mesh["order"] = list(self.mesh.axes)
        store: dict[str, Any] = {}
        if self.store == Store.of_stage(self.store.zero, self.store.reshard):
            store["zero"] = self.store.zero
        else:
            for key in ("optimizer", "gradients", "parameters"):
                store[key] = list(getattr(self.store, key))
        store["reshard"] = self.store.reshard
        s, r, p = self.schedule, self.recompute, self.precision
        return {
            "mesh": mesh,
            "cuts": {d: axes[0] if len(axes) == 1 else list(axes) for d, axes in self.cuts.items() if d != "kv_heads"},
            "store": store,
            "schedule": {"name": s.name, "micro_batches": s.micro_batches, "virtual_stages": s.virtual_stages},
            "recompute": {"policy": r.policy, "regather": r.regather},
            "precision": {"compute": p.compute, "reduce": p.reduce},
            "context": {"method": self.context.method},
        }

    def to_toml(self) -> str:
        """The layout as the text of a layout file."""
        return write_toml(self.to_dict())

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step."""
        return self.schedule.micro_batches

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks: pp times the virtual stages of a rank (1 without pp)."""
        pp = self.mesh.size("pp")
        return pp * self.schedule.virtual_stages if pp > 1 else 1

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of size > 1 that cut the batch, outermost first."""
        return self.axes_of("batch")

    @property
    def sp(self) -> bool:
        """Whether tp also cuts seq."""
        return "tp" in self.cuts.get("seq", ())

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """The axes of size > 1 that cut `dim` where no other dim of the tensor takes them, outermost first."""
        return self.mesh.ordered(self.cuts.get(dim, ()))

    def describe(self) -> str:
        """One short line: `"dp=2,tp=2 zero=1 sp"`."""
        words = [self.mesh.describe()]
        words += [f"zero={self.store.zero}"] if self.store.zero else []
        words += ["sp"] if self.sp and self.mesh.size("tp") > 1 else []
        if self.mesh.size("pp") > 1:
            words.append(self.schedule.name)
        words += [f"micro_batches={self.micro_batches}"] if self.micro_batches > 1 else []
        return " ".join(words)


def _precision(compute: str, reduce: str | None) -> Precision:
    return Precision(compute, reduce if reduce is not None else "fp64" if compute == "fp64" else "fp32")


def _store(body: Mapping[str, Any], mesh: Mesh) -> Store:
    by_hand = [k for k in ("optimizer", "gradients", "parameters") if k in body]
    if "zero" in body and by_hand:
        raise LayoutError(f"[store] zero = {body['zero']} already says {by_hand[0]}; write one or the other")
    parts = {k: (body[k],) if isinstance(body[k], str) else tuple(body[k]) for k in by_hand}
    zero = whole("store", "zero", body.get("zero", 0), least=0)
    three = zero == 3 or bool(parts.get("parameters"))
    default = "step" if three and mesh.size("pp") > 1 else "use"
    reshard = choice("store", "reshard", body.get("reshard", default), ("use", "step"))
    return Store(reshard=reshard, **parts) if by_hand else Store.of_stage(zero, reshard)
