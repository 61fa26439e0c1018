"""Run the benchmark of steps, back end by back end, and show it."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from crosscut.bench.machine import host
from crosscut.bench.measure import following, sigterm
from crosscut.bench.steps.ranks import StepPlan, rank_main
from crosscut.bench.steps.workloads import WORKLOADS
from crosscut.comm.launch import spawn

Row = dict[str, Any]
EXPLANATION = """\
ours, peer  a step (forward, backward, AdamW), slowest rank, medians of trials
            in turn
peer        stock PyTorch (DDP, FSDP2, DTensor, pipelining 1F1B), same back end
ratio       ours / peer within trials; (95%): the interval that holds its median
no comm     ours with collectives that do nothing; exposed: ours / no comm
floor       the least that exposed can be with no core to spare: what must reach
            a rank is copied once, after the work
eff.        one device at its best number of micro-batches / (ranks x ours)
MB          most bytes allocated at once in a step, ours/peer, of the rank with
            the most"""


@dataclass
class Steps:
    """What was measured. `error`: what ended the run early."""

    plan: StepPlan
    rows: list[Row] = field(default_factory=list)
    error: BaseException | None = None


def measure(plan: StepPlan, on_event: Callable[[Row], None] = lambda event: None) -> Steps:
    """Measure all cells. What ends the ranks early stands in `error`, and the rows measured until then stay."""
    result = Steps(plan)

    def take(event: Row) -> None:
        if event["kind"] == "row":
            result.rows.append({key: value for key, value in event.items() if key != "kind"})
        on_event(event)

    with tempfile.TemporaryDirectory(prefix="crosscut-bench-") as folder:
        for backend in plan.backends:
            path = Path(folder) / f"{backend}.jsonl"
            path.touch()
            try:
                with following(path, take), sigterm():
                    known = {row["workload"]: row["single_ms"] / 1e3 for row in result.rows}
                    spawn(
                        rank_main, replace(plan, single_s=known), str(path), world_size=plan.world_size, backend=backend
                    )
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                result.error = error
                break
    return result


COLUMNS = ("", "on", "ours ms", "peer ms", "ratio", "(95%)", "no comm", "exposed", "floor", "eff.", "MB")


def cells(row: Row) -> tuple[str, ...]:
    """A row in words, under COLUMNS."""
    return (
        row["parallel"], row["backend"], f"{row['ours_ms']:.1f}", f"{row['peer_ms']:.1f}", f"{row['ratio']:.2f}",
        f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}", f"{row['no_comm_ms']:.1f}", f"{row['exposed']:.2f}",
        f"{row['floor']:.2f}", f"{row['efficiency']:.0%}",
        f"{row['peak_memory_bytes'] / 1e6:.0f}/{row['peer_peak_memory_bytes'] / 1e6:.0f}",
    )  # fmt: skip


def by_workload(steps: Steps) -> list[tuple[str, list[Row]]]:
    """A title and the rows of each workload."""
    found = []
    for name in steps.plan.workloads:
        rows = [row for row in steps.rows if row["workload"] == name]
        if rows:
            found.append((f"{WORKLOADS[name].text}; on one device {rows[0]['single_ms']:.1f} ms", rows))
    return found


def show(steps: Steps, console: Console) -> None:
    """A table for each workload, and what the columns mean."""
    for title, rows in by_workload(steps):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("", "on", "(95%)") else "right", no_wrap=True)
        for row in rows:
            table.add_row(*cells(row))
        console.print(title)
        console.print(table)
        console.print()
    console.print(EXPLANATION)


def to_markdown(steps: Steps) -> str:
    """The same tables for a document."""
    plan, lines = steps.plan, ["# Benchmark of training steps", ""]
    made = f"Made by `crosscut bench steps --world-size {plan.world_size} --markdown FILE`"
    lines += [f"{made} on {datetime.date.today()}: {_machine()}. One thread a rank.", ""]
    if steps.error is not None:
        lines += ["The run was stopped early: rows are missing.", ""]
    for title, rows in by_workload(steps):
        lines += [f"**{title}**", "", "| " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
        lines.append("")
    return "\n".join([*lines, "```", EXPLANATION, "```", ""])


def _machine() -> str:
    """The machine in a few words."""
    found = host()
    return f"{found['cpu']}, {found['cores']} cores, Python {found['python']}, torch {found['torch']}"
