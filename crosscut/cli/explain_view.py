"""The text of `crosscut explain`: mesh, cuts, parameters, rules, totals, for a terminal of about 100 columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from crosscut.cli.explain_bytes import rules_table, totals_table, verdict
from crosscut.cli.explain_parts import AXIS_COLORS, axes_in_color, grid
from crosscut.layout.collapse import ParamLine, collapse_params, ranges
from crosscut.layout.plan import ParamPlan, Plan

if TYPE_CHECKING:
    from crosscut.cli.counted import Counted

MAX_GRID = 64  # ranks drawn
WIDTH = 110  # columns where there is no terminal


def show(plan: Plan, stages: Sequence[int], *, rank: int | None, counted: Counted | None, origin: str) -> None:
    """Print everything about a plan, for the ranks at the pp coordinates `stages` (or for one `rank`)."""
    out = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    out.print()
    out.print(_headline(plan, origin))
    _section(out, "mesh", _mesh(plan, rank))
    _section(out, "cuts", _cuts(plan))
    _section(out, "parameters" if rank is None else f"parameters of rank {rank}", *_parameters(plan, stages, rank))
    if plan.layout.mesh.world_size == 1:
        _section(out, "communication", Text("none: one rank has nobody to talk to", style="dim"))
        return
    title = "communication of one step, of one rank" if rank is None else f"communication of one step, of rank {rank}"
    _section(out, title, rules_table(plan, stages, counted))
    _section(out, "bytes of one step", totals_table(plan, stages))
    if counted is not None:
        out.print(Padding(verdict(counted, stages), (1, 2, 0, 2), expand=False))
    out.print(Padding(_legend(plan), (1, 2, 1, 2), expand=False))


def _headline(plan: Plan, origin: str) -> Text:
    layout = plan.layout
    text = Text("  ")
    text.append(plan.spec.name, style="bold")
    text.append(f"  {plan.num_parameters:,} parameters", style="")
    tokens = f" x {plan.seq} tokens" if plan.seq is not None else ""
    text.append(f"  ·  batch {plan.batch}{tokens}  ·  {layout.precision.compute}", style="")
    if layout.precision.reduce != layout.precision.compute:
        text.append(f", gradients travel in {layout.precision.reduce}", style="")
    text.append("\n  ")
    text.append(axes_in_color(layout.mesh.describe()))
    words = layout.describe().split()[1:]
    text.append(("  " + "  ".join(words) if words else ""), style="bold")
    ranks = layout.mesh.world_size
    text.append(f"  ·  {ranks} rank{'s' * (ranks > 1)}", style="")
    text.append(f"  (mesh: {origin})", style="dim")
    return text


def _section(out: Console, title: str, *bodies: RenderableType) -> None:
    out.print()
    out.print(Text(f"  {title}", style="bold underline"))
    for body in bodies:
        out.print(Padding(body, (0, 2), expand=False))


# ---- mesh -----------------------------------------------------------------------------------------------------------


def _mesh(plan: Plan, rank: int | None) -> RenderableType:
    """The ranks as grids: the last axis across, the one before down, the others a grid each, side by side."""
    mesh = plan.layout.mesh
    axes = mesh.ordered(mesh.axes)
    if not axes:
        return Text("one rank", style="dim")
    if mesh.world_size > MAX_GRID:
        text = Text("too many ranks to draw; rank = ")
        for i, axis in enumerate(axes):
            stride = mesh.rank({axis: 1})
            text.append(" + " if i else "")
            text.append(f"{axis}", style=AXIS_COLORS[axis])
            text.append(f" x {stride}" if stride > 1 else "")
        return text
    across, down, outer = axes[-1], axes[-2] if len(axes) > 1 else None, axes[:-2]
    row = Table.grid(padding=(0, 4))
    cells = []
    for coords in product(*(range(mesh.size(a)) for a in outer)):
        fixed = dict(zip(outer, coords, strict=True))
        cells.append(_one_grid(plan, across, down, fixed, rank))
    row.add_row(*cells)
    return row


def _one_grid(plan: Plan, across: str, down: str | None, fixed: dict[str, int], rank: int | None) -> RenderableType:
    mesh = plan.layout.mesh
    table = Table(box=None, padding=(0, 1), show_header=True, pad_edge=False)
    corner = Text(" ").join(Text(f"{a}={i}", style=AXIS_COLORS[a]) for a, i in fixed.items()) if fixed else Text("")
    table.add_column(corner, justify="right")
    for i in range(mesh.size(across)):
        table.add_column(Text(f"{across}={i}", style=AXIS_COLORS[across]), justify="center")
    for j in range(mesh.size(down) if down else 1):
        head = Text(f"{down}={j}", style=AXIS_COLORS[down]) if down else Text("rank", style="dim")
        here = {**fixed, **({down: j} if down else {})}
        numbers = [mesh.rank({**here, across: i}) for i in range(mesh.size(across))]
        table.add_row(head, *(Text(str(n), style="reverse bold" if n == rank else "bold") for n in numbers))
    return table


# ---- cuts -----------------------------------------------------------------------------------------------------------


def _cuts(plan: Plan) -> RenderableType:
    if not plan.decisions:
        return Text("nothing is cut: every axis has one rank", style="dim")
    table = grid()
    for name in ("dim", "over", "resolved to", "why"):
        table.add_column(name, no_wrap=name in ("dim", "over"))
    for d in plan.decisions:
        if d.resolved != "ignored":
            over = axes_in_color("+".join(d.axes), "+")
            table.add_row(Text(d.dim, style="bold"), over, Text(d.resolved), Text(d.why, style="dim"))
    ignored = [d.dim for d in plan.decisions if d.resolved == "ignored"]
    if not ignored:
        return table
    return Group(table, Text(f"ignored, for {plan.spec.name} has no such dim: {', '.join(ignored)}", style="dim"))


# ---- parameters -----------------------------------------------------------------------------------------------------


def _parameters(plan: Plan, stages: Sequence[int], rank: int | None) -> list[RenderableType]:
    pipeline = plan.layout.mesh.size("pp") > 1
    lines = collapse_params(plan, stages)
    stored = len({_stored(line.param) for line in lines}) > 1  # where all are stored alike, the cuts have said so
    table = grid()
    table.add_column("name", overflow="fold")
    if pipeline and rank is None:
        table.add_column("pp", min_width=3, no_wrap=True)
    table.add_column("dims", overflow="fold")
    table.add_column("whole", justify="right", no_wrap=True)
    table.add_column("a rank's" if rank is None else "its slice", justify="right", no_wrap=rank is None)
    table.add_column("grad sum", no_wrap=True)
    if stored:
        table.add_column("stored", no_wrap=True)
    for line in lines:
        p = line.param
        cells: list[RenderableType] = [_param_name(line)]
        if pipeline and rank is None:
            cells.append(Text(ranges(line.stages), style=AXIS_COLORS["pp"]))
        summed = axes_in_color(plan.layout.mesh.label(p.sum_axes), "+")
        cells += [_dims(p), Text(_shape(p.shape)), _held(plan, p, rank), summed]
        if stored:
            cells.append(Text(_stored(p), style="dim"))
        table.add_row(*cells)
    return [table, _held_in_all(plan, stages)]


def _stored(p: ParamPlan) -> str:
    """What is kept cut over which axes."""
    kept = "params" if p.store_parameters else "grads" if p.store_gradients else "state"
    return f"{kept}/{'+'.join(p.store_optimizer)}" if p.store_optimizer else "-"


def _param_name(line: ParamLine) -> Text:
    text = Text(line.name)
    if line.param.tied_to is not None:
        text.append(f" = {line.param.tied_to}", style="dim")
    if not line.param.requires_grad:
        text.append(" frozen", style="dim")
    return text


def _dims(p: ParamPlan) -> Text:
    """`heads*head_dim/tp, embed`: each dim, and the axes that cut it."""
    if not p.dims:
        return Text("no row" if p.shape else "-", style="dim")
    text = Text()
    for d, (name, axes) in enumerate(zip(p.dims, p.axis_cuts, strict=True)):
        text.append(", " if d else "")
        text.append(name, style="bold" if axes else "")
        for axis in axes:
            text.append(f"/{axis}", style=f"bold {AXIS_COLORS[axis]}")
    return text


def _held(plan: Plan, p: ParamPlan, rank: int | None) -> Text:
    if rank is None:
        same = p.local_shape == p.shape
        return Text(_shape(p.local_shape), style="dim" if same else "bold")
    mesh = plan.layout.mesh
    held = p.ranges(mesh.coords(rank), mesh.sizes)
    text = Text()
    for d, ranges_ in enumerate(held):
        text.append(", " if d else "[")
        whole = len(ranges_) == 1 and ranges_[0] == (0, p.shape[d])
        text.append(":" if whole else "|".join(f"{a}:{b}" for a, b in ranges_), style="dim" if whole else "bold")
    return text.append("]" if held else "all of it")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _held_in_all(plan: Plan, stages: Sequence[int]) -> Text:
    """The numbers a rank holds, for each of the stages."""
    held = []
    for pp in stages:
        params = plan.stage_params(pp).values()
        held.append(sum(_product(p.local_shape) for p in params))
    gathered = any(p.store_parameters for p in plan.params.values())
    text = Text("a rank computes with " if gathered else "a rank holds ", style="dim")
    if len(set(held)) == 1:
        text.append(f"{held[0]:,}", style="bold")
    else:
        for i, (pp, n) in enumerate(zip(stages, held, strict=True)):
            text.append(", " if i else "", style="dim")
            text.append(f"{n:,}", style="bold")
            text.append(f" (pp={pp})", style=AXIS_COLORS["pp"])
    return text.append(f" of {plan.num_parameters:,} numbers", style="dim")


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _legend(plan: Plan) -> Text:
    text = Text("Bytes are what one rank hands to the call (of all_gather the output, of recv nothing).", style="dim")
    if plan.layout.micro_batches > 1:
        text.append(f" Calls count all {plan.layout.micro_batches} micro-batches of the step.")
    return text
