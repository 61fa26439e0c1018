"""What each cut of a layout resolved to for one model, and why: the lines that `explain` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from crosscut.layout.cuts import WIDTH_DIMS
from crosscut.layout.layout import Layout
from crosscut.layout.params import Sizes
from crosscut.layout.plan import Decision, ParamPlan
from crosscut.layout.spec import ModelSpec
from crosscut.layout.stages import Stages


def decide(
    spec: ModelSpec, layout: Layout, sizes: Sizes, stages: Stages, params: Mapping[str, ParamPlan], seq: int | None
) -> tuple[Decision, ...]:
    """One decision for each cut whose axes have more than one rank, then one for the store."""
    return tuple(_decide(spec, layout, sizes, stages, params, seq))


def _decide(
    spec: ModelSpec, layout: Layout, sizes: Sizes, stages: Stages, params: Mapping[str, ParamPlan], seq: int | None
) -> Iterator[Decision]:
    mesh, m = layout.mesh, layout.micro_batches
    for dim in layout.cuts:
        axes = layout.axes_of(dim)
        if not axes:
            continue
        count, label = mesh.size(axes), mesh.label(axes)
        if dim == "layers":
            each = len(stages.layer_stages) // stages.num_stages
            v = layout.schedule.virtual_stages
            how = f"{len(stages.layer_stages)} layers -> {stages.num_stages} stages of {each}"
            ends = f"{_names(stages.before)} before, {_names(stages.after)} after"
            yield Decision(dim, axes, how, f"{v} stages a rank, dealt round; {ends}" if v > 1 else ends)
        elif dim == "batch":
            rows = sizes.of["batch"]
            each = rows // count
            how = f"{rows * m} rows -> {each} a rank" + (f", {m} times" if m > 1 else "")
            yield Decision(dim, axes, how, "the same data under every layout")
        elif dim not in sizes.of:
            yield Decision(dim, axes, "ignored", f"{spec.name} has no dim {dim}")
        elif dim == "seq":
            assert seq is not None
            takers = [d for d in WIDTH_DIMS if d != "kv_heads" and d in sizes.of and set(layout.axes_of(d)) & set(axes)]
            yield Decision(
                dim, axes, f"{seq} -> {seq // count} outside boundaries",
                f"inside, {', '.join(takers)} take {label} (SP)",
            )  # fmt: skip
        else:
            users = [p for p in params.values() if p.tied_to is None and any(_uses(d, dim) for d in p.dims)]
            cut = [p for p in users if set(p.cut_axes) & set(axes)]
            how = f"{sizes.of[dim]} -> {sizes.of[dim] // count} a rank"
            word = "kv_heads go with heads; " if dim == "kv_heads" else ""
            yield Decision(dim, axes, how, f"{word}cuts {len(cut)} parameter{'s' * (len(cut) != 1)}")
    store = layout.store
    if store.zero:
        axes = mesh.ordered(store.optimizer)
        kept = ("optimizer state", "gradients", "parameters")[: store.zero]
        what = " and ".join(filter(None, (", ".join(kept[:-1]), kept[-1])))
        if axes:
            how = f"zero={store.zero}: {what} kept cut"
            why = "along dim 0, padded in flight only"
            if store.zero == 3:
                why += "; gathered for each use" if store.reshard == "use" else "; gathered once a step"
            yield Decision("store", axes, how, why)
        else:
            yield Decision("store", store.optimizer, f"zero={store.zero} changes nothing", "its axis has one rank")


def _uses(text: str, dim: str) -> bool:
    return dim in text.replace(" + ", "*").replace(":", "*").split("*")


def _names(modules: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(modules[:-1]), *modules[-1:]))) or "nothing"
