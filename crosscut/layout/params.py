"""Parameters under a layout: the sizes of named dims, which axes cut which tensor dim, local shapes, stages, store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from crosscut.layout.cuts import PRECEDENCE, WIDTH_DIMS, claims
from crosscut.layout.errors import LayoutError, divisors, listed, nearest
from crosscut.layout.layout import Layout
from crosscut.layout.plan import ParamPlan, Range
from crosscut.layout.spec import UNNAMED, DimExpr, ModelSpec, ParamSpec, Row, matches
from crosscut.layout.stages import Stages


@dataclass(frozen=True)
class Sizes:
    """The size of every named dim of a model. `batch` is one micro-batch over all ranks, `seq` a whole sequence."""

    of: Mapping[str, int]

    def size(self, expr: DimExpr) -> int:
        """The size of a dim expression. Raises LayoutError when a name's size is unknown."""
        for name in (f for part in expr.parts for f in part.factors):
            if name not in self.of:
                raise LayoutError(f"the size of dim {name!r} is not known; give it: Dims(..., sizes={{{name!r}: ...}})")
        return sum(expr.part_sizes(self.of))


def dim_sizes(spec: ModelSpec) -> dict[str, int]:
    """The size of each named dim, from `Dims.sizes` and the shapes of the parameters.

    Raises LayoutError when a row has another number of dims than its parameter, when two parameters disagree on a size,
    and when a product has more than one unknown factor.
    """
    known = dict(spec.dims.sizes)
    source = dict.fromkeys(known, "sizes")
    rows: list[tuple[ParamSpec, Row]] = []
    for p in spec.params:
        row = spec.dims.row(p.name)
        if row is not None:
            if len(row) != len(p.shape):
                raise LayoutError(
                    f"parameter {p.name} has shape {p.shape}, but its row names {len(row)} dims: "
                    f"({', '.join(e.text for e in row)})"
                )
            rows.append((p, row))
    open_ = [(p, d, expr) for p, row in rows for d, expr in enumerate(row) if expr.names]
    while open_:
        left = []
        for p, d, expr in open_:
            missing = [n for n in expr.names if n not in known]
            if not missing:
                _agree(p, d, expr, known, source)
            elif len(missing) == 1 and UNNAMED not in expr.parts[0].factors:
                known[missing[0]] = _solve(p, d, expr, missing[0], known)
                source[missing[0]] = p.name
            else:
                left.append((p, d, expr))
        if len(left) == len(open_):
            p, d, expr = left[0]
            names = [n for n in expr.names if n not in known]
            raise LayoutError(
                f"parameter {p.name}, dim {expr.text!r} of size {p.shape[d]}: {' and '.join(names)} not told by "
                f"shapes; give one: Dims(..., sizes={{{names[0]!r}: ...}})"
            )
        open_ = left
    return known


def _agree(p: ParamSpec, d: int, expr: DimExpr, known: Mapping[str, int], source: Mapping[str, str]) -> None:
    if UNNAMED in expr.parts[0].factors:
        return
    size = sum(expr.part_sizes(known))
    if size != p.shape[d]:
        told = ", ".join(f"{n}={known[n]} (from {source[n]})" for n in expr.names)
        raise LayoutError(f"parameter {p.name}: dim {d} has size {p.shape[d]}, but {expr.text} = {size} with {told}")


def _solve(p: ParamSpec, d: int, expr: DimExpr, name: str, known: Mapping[str, int]) -> int:
    """The one unknown in a sum of products, given that the sum is the tensor's size along d."""
    given = coefficient = 0
    for part in expr.parts:
        others = prod(known[f] for f in part.factors if f != name)
        power = part.factors.count(name)
        if power > 1:
            raise LayoutError(f"parameter {p.name}: dim {expr.text!r} names {name} twice; give its size")
        given, coefficient = (given, coefficient + others) if power else (given + others, coefficient)
    rest = p.shape[d] - given
    if rest <= 0 or rest % coefficient:
        raise LayoutError(
            f"parameter {p.name}: dim {d} has size {p.shape[d]}, which {expr.text!r} makes with no whole {name}"
        )
    return rest // coefficient


def check_table(spec: ModelSpec, layout: Layout) -> None:
    """Every row must fit something; under axes that cut more than the batch every parameter must have a row."""
    names = [p.name for p in spec.params]
    modules = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)}
    for pattern, _ in spec.dims.params:
        if not any(matches(pattern, n) for n in names):
            raise LayoutError(f"dims table: row {pattern!r} fits no parameter of {spec.name}{nearest(pattern, names)}")
    for pattern, _ in spec.dims.boundaries:
        if not any(matches(pattern, m) for m in modules):
            hint = nearest(pattern, sorted(modules))
            raise LayoutError(f"dims table: boundary {pattern!r} fits no module of {spec.name}{hint}")
    needs = [a for a in layout.mesh.axes if layout.mesh.size(a) > 1 and a not in layout.batch_axes]
    missing = [p for p in spec.params if spec.dims.row(p.name) is None and p.tied_to is None]
    if needs and missing:
        first = missing[0]
        example = repr(tuple("embed" if d else "mlp" for d in range(len(first.shape))))
        raise LayoutError(
            f"{needs[0]}={layout.mesh.size(needs[0])} needs a row for every parameter of {spec.name}; without one: "
            f"{listed(p.name for p in missing)}; a row reads Dims({{{first.name!r}: {example}, ...}})"
        )


def row_claims(p: ParamSpec, row: Row, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """The axes that cut each tensor dim of a parameter, with every cut checked to divide whole units.

    Raises LayoutError for a dim that does not divide, a cut factor that is not the outermost of its product, parts of a
    fused dim cut differently, and a Linear whose two dims want the same axis.
    """
    cut_axes = claims([expr.names for expr in row], layout.cuts, layout.mesh)
    for expr, axes in zip(row, cut_axes, strict=True):
        wanted = {}
        for part in expr.parts:
            cuttable = [f for f in part.factors if layout.axes_of(f) and f in PRECEDENCE]
            wanted[part.label or part.factors[0]] = tuple(a for f in cuttable for a in layout.axes_of(f) if a in axes)
            if cuttable and axes and cuttable[0] != part.factors[0]:
                raise LayoutError(
                    f"parameter {p.name}: {cuttable[0]} is cut but stands inside {'*'.join(part.factors)}; "
                    "a cut dim must be the outermost factor"
                )
        if len(set(wanted.values())) > 1:
            raise LayoutError(f"parameter {p.name}: the parts of {expr.text!r} are cut over different axes {wanted}")
    if p.kind == "linear.weight" and len(row) == 2:
        both = set(layout.mesh.axes)
        for expr in row:
            both &= {a for n in expr.names if n in WIDTH_DIMS for a in layout.axes_of(n)}
        if both:
            axis = min(both)
            raise LayoutError(
                f"parameter {p.name}: axis {axis!r} is cut twice: both {row[0].text} and {row[1].text} take it"
            )
        if cut_axes[0] and cut_axes[1]:
            raise LayoutError(f"parameter {p.name}: a Linear is cut by columns or by rows, not by both {cut_axes}")
    return cut_axes


def check_divides(name: str, size: int, axes: tuple[str, ...], layout: Layout) -> None:
    """Raise LayoutError unless `size` units of dim `name` divide over `axes`."""
    count = layout.mesh.size(axes)
    if size % count:
        label = layout.mesh.label(axes)
        raise LayoutError(f"{name}={size} cannot be cut over {label}={count}; use {label} in {divisors(size)}")


def plan_params(spec: ModelSpec, layout: Layout, sizes: Sizes, stages: Stages) -> dict[str, ParamPlan]:
    """Every parameter's plan but for `sum_axes`, which needs the boundaries."""
    check_table(spec, layout)
    rows = {p.name: spec.dims.row(p.name) for p in spec.params}
    for p in spec.params:  # divisibility by dim name first: one error that names the dim, not the tensor
        for expr in rows[p.name] or ():
            for name in expr.names:
                if name in WIDTH_DIMS and layout.axes_of(name):
                    check_divides(name, sizes.of[name], layout.axes_of(name), layout)
    plans: dict[str, ParamPlan] = {}
    for p in spec.params:
        row = rows[p.name]
        if row is None and p.tied_to is not None:
            row = rows[p.tied_to]
        cut_axes = row_claims(p, row, layout) if row is not None else tuple(() for _ in p.shape)
        local = tuple(n // layout.mesh.size(axes) for n, axes in zip(p.shape, cut_axes, strict=True))
        root = p.tied_to or p.name
        held = sorted({stages.of(q.name) for q in spec.params if (q.tied_to or q.name) == root})
        store = layout.store
        taken = {a for axes in cut_axes for a in axes}
        kept = [
            layout.mesh.ordered(set(axes) - taken) if p.shape else ()
            for axes in (store.optimizer, store.gradients, store.parameters)
        ]
        plans[p.name] = ParamPlan(
            name=p.name,
            dims=tuple(e.text for e in row) if row is not None else (),
            shape=p.shape,
            local_shape=local,
            axis_cuts=cut_axes,
            parts=_parts(p, row, sizes),
            stages=tuple(held),
            sum_axes=(),
            store_optimizer=kept[0],
            store_gradients=kept[1],
            store_parameters=kept[2],
            tied_to=p.tied_to,
            requires_grad=p.requires_grad,
            layer=stages.layer_of(p.name),
        )
    for name, plan in plans.items():
        if plan.tied_to is not None and plan.axis_cuts != plans[plan.tied_to].axis_cuts:
            raise LayoutError(
                f"parameter {name} is tied to {plan.tied_to}, but their rows cut them differently; make the rows equal"
            )
    return plans


def _parts(p: ParamSpec, row: Row | None, sizes: Sizes) -> tuple[tuple[Range, ...], ...]:
    out: list[tuple[Range, ...]] = []
    for d, size in enumerate(p.shape):
        if row is None or len(row[d].parts) == 1:
            out.append(((0, size),))
            continue
        start, ranges = 0, []
        for width in row[d].part_sizes(sizes.of):
            ranges.append((start, start + width))
            start += width
        out.append(tuple(ranges))
    return tuple(out)
