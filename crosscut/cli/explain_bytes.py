"""The tables of `crosscut explain` about communication: every rule of a step, totals, what a run counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from crosscut.cli.explain_parts import AXIS_COLORS, axes_in_color, grid, size
from crosscut.layout.collapse import RuleLine, collapse_rules, ranges
from crosscut.layout.plan import Plan

if TYPE_CHECKING:
    from crosscut.cli.counted import Counted

PHASES = {
    "forward": "forward",
    "recompute": "recompute: the forward of the layers again, before their backward",
    "backward": "backward",
    "step": "once a step",
}


# ---- rules ----------------------------------------------------------------------------------------------------------


def rules_table(plan: Plan, stages: Sequence[int], counted: Counted | None) -> RenderableType:
    """Every communication of a step by phase; with `counted`, what a run's ledgers say beside it."""
    several = len(stages) > 1
    table = grid()
    table.add_column("where", overflow="fold")
    if several:
        table.add_column("pp", min_width=3, no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("over", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("each", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    if counted is not None:
        table.add_column("counted a step", justify="right", no_wrap=True)
    phase = ""
    for line in collapse_rules(plan, stages):
        if line.rule.phase != phase:
            if phase:
                table.add_row()
            phase = line.rule.phase
            table.add_row(Text(PHASES[phase], style="bold italic"))
        table.add_row(*_rule_cells(plan, line, several, counted, stages))
    return table


def _rule_cells(
    plan: Plan, line: RuleLine, several: bool, counted: Counted | None, stages: Sequence[int]
) -> list[RenderableType]:
    r = line.rule
    where = Text("  " + line.site)
    detail = r.where if not r.note else "entry, again" if r.where else r.note
    where.append(f" {detail}", style="dim")
    cells: list[RenderableType] = [where]
    if several:
        everyone = len(line.stages) == len(stages)
        cells.append(Text("all" if everyone else ranges(line.stages), style="dim" if everyone else AXIS_COLORS["pp"]))
    cells += [Text(r.op), axes_in_color(r.axis, "+")]
    if r.calls is None:
        cells += [Text("buckets", style="dim"), Text("-", style="dim")]
    else:
        cells += [Text(f"{r.calls}"), Text(size(r.bytes // r.calls) if r.bytes else "-", style="dim")]
    cells.append(Text(f"{r.bytes:,}" if r.bytes else "-", style="bold" if r.bytes else "dim"))
    if counted is not None:
        cells.append(_counted_cell(line, counted))
    return cells


def _counted_cell(line: RuleLine, counted: Counted) -> Text:
    """What a step moved on average, and whether it is what was derived."""
    pairs = [
        counted.pairs[pp][(tag, line.rule.axis, line.rule.op)]
        for pp, tags in zip(line.stages, line.tags, strict=True)
        for tag in tags
    ]
    if all(p.equal(counted.steps) for p in pairs):
        return Text(f"{line.rule.bytes:,} " if line.rule.bytes else "- ", style="green").append("=")
    first = counted.pairs[line.stages[0]]
    total = sum(first[(tag, line.rule.axis, line.rule.op)].counted_bytes for tag in line.tags[0])
    return Text(f"{total / max(counted.steps, 1):,.10g} ", style="bold red").append("≠")


def verdict(counted: Counted, stages: Sequence[int]) -> Text:
    """Whether the run did what was derived, and what it did besides."""
    stages = tuple(stages)
    text = Text()
    if counted.equal(stages):
        return text.append(f"counted = derived, to the byte, over {counted.steps} steps", style="bold green")
    text.append(f"counted and derived differ (over {counted.steps} steps)", style="bold red")
    for pp, pair in counted.not_derived(stages):
        tag, axis, op = pair.key
        text.append(f"\n  no rule says: {op} over {axis}, {pair.counted_bytes:,} bytes in {pair.counted_calls} calls")
        text.append(f" ({tag}, pp={pp})", style="dim")
    if counted.ranks_that_differ:
        text.append(f"\n  unlike the first rank of their stage: {ranges(counted.ranks_that_differ)}")
    return text


# ---- totals ---------------------------------------------------------------------------------------------------------


def totals_table(plan: Plan, stages: Sequence[int]) -> RenderableType:
    """Bytes of a step by axes and op: of one rank of each stage, and of all ranks."""
    world = plan.world_totals()
    by_stage = [plan.totals(pp) for pp in stages]
    several = len(stages) > 1
    table = grid()
    table.add_column("over", no_wrap=True)
    table.add_column("what", no_wrap=True)
    columns = _stage_columns(stages, by_stage)
    for name, _ in columns:
        table.add_column(name if several else "one rank", justify="right", no_wrap=True)
    table.add_column("all ranks", justify="right", no_wrap=True)
    table.add_column("")
    for axis in sorted(world, key=lambda label: (label.count("+"), -sum(world[label].values()))):
        for op, total in world[axis].items():
            each = [totals.get(axis, {}).get(op, 0) for _, totals in columns]
            if not any(each) and len(columns) < 2:
                continue
            table.add_row(
                axes_in_color(axis, "+"), Text(op), *(Text(f"{n:,}" if n else "-", style="bold") for n in each),
                Text(f"{total:,}" if total else "-"), Text(size(total) if total else "", style="dim"),
            )  # fmt: skip
    return table


def _stage_columns(
    stages: Sequence[int], by_stage: Sequence[dict[str, dict[str, int]]]
) -> list[tuple[str, dict[str, dict[str, int]]]]:
    """Stages with equal totals share a column."""
    groups: list[tuple[list[int], dict[str, dict[str, int]]]] = []
    for pp, totals in zip(stages, by_stage, strict=True):
        for held, same in groups:
            if same == totals:
                held.append(pp)
                break
        else:
            groups.append(([pp], totals))
    return [(f"pp={ranges(held)}", totals) for held, totals in groups]
