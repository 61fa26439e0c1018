"""Over which axes the gradient of each parameter is summed, and the check of every boundary against the placements."""

from __future__ import annotations

from collections.abc import Mapping

from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.layout.placements import FEATURES, LEAD, WHOLE, Cut, Flow, Partial, cut, walk
from crosscut.layout.plan import LossPlan, ParamPlan, Site
from crosscut.layout.sites import Draft, flow_of, inside_of, outside
from crosscut.layout.spec import DimExpr, ModelSpec

Placed = tuple[Draft, Site, tuple[str, ...]]  # a boundary, derived, and the axes that cut something inside it


def acting_dims(p: ParamPlan, lead: tuple[str, ...]) -> tuple[str, ...]:
    """The dims of the value that a parameter outside boundaries acts on: the leading ones and its own last dim."""
    return (*lead, p.dims[-1]) if p.dims else lead


def head_axes(p: ParamPlan, layout: Layout) -> tuple[str, ...]:
    """The axes that cut the heads of the value a per-head parameter (QK-norm: dims head_dim alone) acts on."""
    names = {n for d in p.dims for n in DimExpr.parse(d).names}
    if "head_dim" in names and not names & {"heads", "kv_heads"}:
        return layout.axes_of("heads")
    return ()


def sum_axes(p: ParamPlan, placed: Placed | None, lead: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """The axes over which the gradient of `p` is summed: those that cut the value it acts on and not `p` itself."""
    if placed is None:
        dims = acting_dims(p, lead)
        acting = {a for name, axes in zip(dims, outside(dims, layout), strict=True) if name in LEAD for a in axes}
    else:
        draft, site, inner = placed
        if p.name in site.row_biases:  # added to what the exit gives out
            dims = site.out_dims
            acting = {a for axes in outside(dims, layout) for a in axes}
        else:
            acting = {a for axes in outside(draft.in_dims, layout) for a in axes}
            acting -= {a for action in site.entry if action.fn == "gather" for a in action.axes}
            acting |= set(inner) if not draft.is_embedding else set()
    acting |= set(head_axes(p, layout))
    return layout.mesh.ordered(acting - set(p.cut_axes))


def check(
    spec: ModelSpec,
    params: Mapping[str, ParamPlan],
    placed: list[Placed],
    lead: tuple[str, ...],
    loss: LossPlan,
    final_dims: tuple[str, ...],
    layout: Layout,
) -> None:
    """Walk every boundary over every axis, then every parameter's gradient, then the loss.

    Raises LayoutError for a partial value or gradient that meets anything but the reduction it is owed.
    """
    axes = [a for a in layout.mesh.axes if layout.mesh.size(a) > 1 and a != "pp"]
    partial: dict[str, set[str]] = {p.name: set() for p in spec.params}
    inside_some = set()
    for draft, site, _ in placed:
        for axis in axes:
            start, end = flow_of(site.in_dims, axis, layout), flow_of(site.out_dims, axis, layout)
            if draft.is_embedding and start == cut("seq") and axis not in layout.batch_axes:
                start = WHOLE  # ids come whole over the axes of sequence parallelism
            acted = walk(site, axis, start, inside_of(draft, axis, params), end)
            for p in draft.params:
                inside_some.add(p.name)
                if acted.value == Partial() and p.kind not in ("embedding.weight", "linear.bias"):
                    raise LayoutError(
                        f"boundary {site.module!r} over {axis}: {p.name} acts on a look-up that is still partial; "
                        "make the Embedding its own boundary"
                    )
                if _gradient_is_partial(end if p.name in site.row_biases else acted):
                    partial[p.name].add(axis)
    for p in spec.params:
        plan = params[p.name]
        for axis in axes:
            if p.name not in inside_some:
                flow = flow_of(acting_dims(plan, lead), axis, layout)
                if flow.value == Partial():
                    raise LayoutError(f"parameter {p.name} over {axis}: it acts on a value that is {flow}")
                if _gradient_is_partial(flow):
                    partial[p.name].add(axis)
            if axis in head_axes(plan, layout):
                partial[p.name].add(axis)
        owed = layout.mesh.ordered(partial[p.name] - set(plan.cut_axes))
        if owed != plan.sum_axes:
            raise LayoutError(
                f"parameter {p.name}: its gradient is partial over {'+'.join(owed) or 'no axis'} but is summed over "
                f"{'+'.join(plan.sum_axes) or 'no axis'}"
            )
    _check_loss(final_dims, loss, axes, layout)


def _gradient_is_partial(flow: Flow) -> bool:
    """Whether ranks of the axis each hold only a part of the gradient of a whole weight that acts on `flow`."""
    return isinstance(flow.value, Cut) or flow.grad == Partial()


def _check_loss(final_dims: tuple[str, ...], loss: LossPlan, axes: list[str], layout: Layout) -> None:
    for axis in axes:
        flow = flow_of(final_dims, axis, layout)
        if flow == cut(FEATURES) and axis not in loss.vocab_axes:
            raise LayoutError(
                f"the loss over {axis}: the model's output ({' '.join(final_dims)}) is cut along its last dim, and a "
                f"{loss.kind} loss reads it as whole; give the last module a boundary that gathers it"
            )
        cuts_labels = isinstance(flow.value, Cut) and flow != cut(FEATURES)
        if cuts_labels != (axis in loss.label_axes):
            word = "does not sum" if cuts_labels else "sums"
            raise LayoutError(f"the loss over {axis}: the output is {flow.value}, yet the token count {word} over it")
