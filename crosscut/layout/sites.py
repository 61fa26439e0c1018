"""From the dims table to the boundaries of a model, each with the actions that its cut weights make necessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crosscut.layout.cuts import claims
from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.layout.placements import FEATURES, LEAD, OWED, SHARED, WHOLE, Cut, Flow, Inside, cut
from crosscut.layout.plan import Action, ParamPlan, Site
from crosscut.layout.spec import UNNAMED, DimExpr, ModelSpec, ParamSpec
from crosscut.layout.stages import Stages


@dataclass(frozen=True)
class Draft:
    """A boundary before its actions are chosen, with the parameters inside it."""

    module: str
    in_dims: tuple[str, ...]
    out_dims: tuple[str, ...]
    params: tuple[ParamSpec, ...]
    first: int  # index of its first parameter: registration order stands for execution order
    declared: bool

    @property
    def is_embedding(self) -> bool:
        """Whether ids go in."""
        return any(p.kind == "embedding.weight" for p in self.params)


def outside(dims: tuple[str, ...], layout: Layout) -> tuple[tuple[str, ...], ...]:
    """The axes that cut each dim of a hidden value outside boundaries."""
    return claims([DimExpr.parse(d).names for d in dims], layout.cuts, layout.mesh)


def flow_of(dims: tuple[str, ...], axis: str, layout: Layout) -> Flow:
    """How a hidden value of these dims is placed over `axis` outside boundaries."""
    for name, axes in zip(dims, outside(dims, layout), strict=True):
        if axis in axes:
            return cut(name if name in LEAD else FEATURES)
    return WHOLE


def lead_dims(seq: int | None) -> tuple[str, ...]:
    """The dims that every hidden value begins with."""
    return ("batch",) if seq is None else ("batch", "seq")


def find_drafts(spec: ModelSpec, params: Mapping[str, ParamPlan], lead: tuple[str, ...]) -> list[Draft]:
    """Every boundary: the declared ones, and each Embedding and cut Linear outside them, in order of registration.

    Raises LayoutError for a boundary inside a boundary, and for another kind of cut parameter outside any.
    """
    modules: dict[str, list[tuple[int, ParamSpec]]] = {}
    for i, p in enumerate(spec.params):
        parts = p.name.split(".")
        owners = [m for k in range(1, len(parts)) if spec.dims.boundary(m := ".".join(parts[:k])) is not None]
        if len(owners) > 1:
            raise LayoutError(f"boundary {owners[1]!r} is inside boundary {owners[0]!r}; declare one of them")
        if owners:
            modules.setdefault(owners[0], []).append((i, p))
        elif p.kind == "embedding.weight" or (p.kind.startswith("linear") and _sibling_cut(p, params)):
            modules.setdefault(p.module, []).append((i, p))
        elif params[p.name].cut_axes:
            raise LayoutError(
                f"parameter {p.name} ({p.kind}) is cut over {'+'.join(params[p.name].cut_axes)} but is inside no "
                "boundary; declare the module that uses it as one"
            )
    drafts = []
    for module, held in modules.items():
        inside = tuple(p for _, p in held)
        declared = spec.dims.boundary(module)
        if declared is not None:
            ins, outs = declared.in_dims, declared.out_dims
        elif inside[0].kind == "embedding.weight":
            ins, outs = lead, (*lead, _text(params[inside[0].name], 1))
        else:
            weight = next(p for p in inside if p.kind == "linear.weight")
            ins, outs = (*lead, _text(params[weight.name], 1)), (*lead, _text(params[weight.name], 0))
        drafts.append(Draft(module, ins, outs, inside, held[0][0], declared is not None))
    return sorted(drafts, key=lambda d: d.first)


def _text(p: ParamPlan, d: int) -> str:
    return p.dims[d] if p.dims else UNNAMED


def _sibling_cut(p: ParamSpec, params: Mapping[str, ParamPlan]) -> bool:
    weight = params.get(f"{p.module}.weight")
    return bool(params[p.name].cut_axes or (weight is not None and weight.cut_axes))


def inside_of(draft: Draft, axis: str, params: Mapping[str, ParamPlan]) -> Inside:
    """Which cut weights act inside a boundary, over one axis."""
    plans = [(p.kind, params[p.name]) for p in draft.params]
    return Inside(
        columns=any(k == "linear.weight" and axis in p.axis_cuts[0] for k, p in plans),
        rows=any(k == "linear.weight" and axis in p.axis_cuts[1] for k, p in plans),
        vocab=any(k == "embedding.weight" and axis in p.axis_cuts[0] for k, p in plans),
    )


def site_axes(draft: Draft, params: Mapping[str, ParamPlan], layout: Layout) -> tuple[str, ...]:
    """The axes that cut a weight inside a boundary, outermost first. Raises LayoutError when its columns differ in
    theirs, or its rows, or when a cut and a whole Embedding share a boundary."""
    for kind, d, word in (
        ("linear.weight", 0, "columns"),
        ("linear.weight", 1, "rows"),
        ("embedding.weight", 0, "vocab"),
    ):
        held = {params[p.name].axis_cuts[d]: p.name for p in draft.params if p.kind == kind}
        some = {axes: name for axes, name in held.items() if axes}
        if len(some) > 1 or (kind == "embedding.weight" and len(held) > 1):
            (a, name_a), (b, name_b) = list(held.items())[:2] if len(some) < 2 else list(some.items())[:2]
            raise LayoutError(
                f"boundary {draft.module!r}: {word} of {name_a} are cut over {'+'.join(a) or 'nothing'}, those of "
                f"{name_b} over {'+'.join(b) or 'nothing'}; make them boundaries of their own"
            )
    return layout.mesh.ordered({a for p in draft.params for a in params[p.name].cut_axes})


def make_site(
    draft: Draft, params: Mapping[str, ParamPlan], layout: Layout, stages: Stages, needs_grad: bool
) -> tuple[Site, tuple[str, ...]]:
    """A boundary with its actions, and the axes over which a value is cut or partial inside it."""
    axes = site_axes(draft, params, layout)
    inside = {a: inside_of(draft, a, params) for a in axes}
    entry = entry_actions(draft, inside, layout, needs_grad)
    exit_ = exit_actions(draft, inside, layout)
    biases = tuple(
        p.name
        for p in draft.params
        if p.kind == "linear.bias" and f"{p.module}.weight" in params and params[f"{p.module}.weight"].axis_cuts[1]
    )
    return Site(draft.module, draft.in_dims, draft.out_dims, entry, exit_, biases, stages.of(draft.module)), axes


def entry_actions(draft: Draft, inside: Mapping[str, Inside], layout: Layout, needs_grad: bool) -> tuple[Action, ...]:
    """What happens to the input: gathered where its seq is cut, and marked as read by several ranks' columns.

    Ids come whole over the axes that cut seq for sequence parallelism; where the look-up is not vocab-cut they are cut
    first.
    """
    if draft.is_embedding:
        axes = tuple(a for a in outside(draft.in_dims, layout)[-1] if draft.in_dims[-1] == "seq" and a not in inside)
        return (Action("slice", axes, len(draft.in_dims) - 1, False),) if axes else ()
    gathers: dict[str, list[str]] = {}
    enters: list[str] = []
    for axis, held in inside.items():
        if held.columns:
            flow = flow_of(draft.in_dims, axis, layout)
            if flow == WHOLE:
                enters.append(axis)
            elif isinstance(flow.value, Cut):
                gathers.setdefault(flow.value.dim, []).append(axis)
    out = [Action("gather", tuple(a), _index(draft.in_dims, d), needs_grad) for d, a in gathers.items()]
    return (*out, Action("enter", tuple(enters), None, needs_grad)) if enters else tuple(out)


def exit_actions(draft: Draft, inside: Mapping[str, Inside], layout: Layout) -> tuple[Action, ...]:
    """What happens to the output: a partial sum is reduced, whole or straight to its cut; cut features are gathered."""
    todo: dict[tuple[str, int | None], list[str]] = {}
    for axis, held in inside.items():
        flow = OWED if held.rows or held.vocab else cut(FEATURES) if held.columns else SHARED
        end = flow_of(draft.out_dims, axis, layout)
        if flow == end:
            continue
        where = _index(draft.out_dims, end.value.dim) if isinstance(end.value, Cut) else None
        if flow == OWED:
            steps: list[tuple[str, int | None]] = [("scatter_sum", where) if where is not None else ("leave", None)]
        elif flow == cut(FEATURES):
            steps = [("gather", -1), ("slice", where)] if where is not None else [("gather_replicated", -1)]
        else:
            steps = []
        for one in steps:
            todo.setdefault(one, []).append(axis)
    order = ("scatter_sum", "leave", "gather", "gather_replicated", "slice")
    return tuple(
        Action(fn, tuple(axes), dim) for (fn, dim), axes in sorted(todo.items(), key=lambda kv: order.index(kv[0][0]))
    )


def _index(dims: tuple[str, ...], dim: str) -> int:
    return -1 if dim == FEATURES else dims.index(dim)
