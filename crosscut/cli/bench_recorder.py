"""`crosscut bench recorder`: what recording adds to a call and to a training step."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from crosscut.cli.output import check_destination, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from crosscut.bench.recorder import RecorderCost

EXPLANATION = """\
without, with  medians of trials in turn; calls of 4 KiB, the slowest rank's
added          with - without within trials, median; (95%): its interval
holds          all of the interval keeps the promise; ?: a part of it
calls          a step's calls times the dearest of such calls above, of without
nothing sent   over a back end that does nothing: what is added, without noise
torch          torch.distributed as under crosscut.watch.install()"""


def run(args: argparse.Namespace) -> int:
    """Measure; 0, or 130 after Ctrl-C, with what was measured until then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from crosscut.bench.recorder import RecorderPlan, measure

    if not 2 <= args.world_size <= 4:
        raise ValueError(f"--world-size {args.world_size}: these models are cut over 2 to 4 ranks (they have 4 layers)")
    if args.seconds is not None and not 0 < args.seconds < float("inf"):
        raise ValueError(f"--seconds {args.seconds:g}: must be positive and finite")
    check_destination(args.json)
    plan = RecorderPlan(args.seconds or 2.0, args.world_size)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("starting the ranks", total=plan.num_rows())

        def follow(event: dict[str, Any]) -> None:
            if event["kind"] == "row":
                progress.advance(task)
            else:
                progress.update(task, description=f"{event['what']} on {event['backend']}")

        cost = measure(plan, follow)
    if cost.rows:
        if args.json:
            body = {"world_size": plan.world_size, "threads_per_rank": 1, "complete": cost.error is None}
            write_json(args.json, "crosscut.bench.recorder", {**body, "rows": cost.rows})
        if args.json != "-":
            show(cost, Console(highlight=False))
    if cost.error is not None:
        raise cost.error
    return 0


def show(cost: RecorderCost, console: Console) -> None:
    """A table of calls, one of steps, what the columns mean, and whether what is promised holds."""
    from crosscut.bench.recorder import LIMIT_SHARE, LIMIT_US

    for of, title in (
        ("write", f"a record alone, us; promised: {LIMIT_US:g} at most"),
        ("group", f"a call of crosscut's, us; promised: {LIMIT_US:g} more at most"),
        ("torch", f"a call of torch's, us; promised: {LIMIT_US:g} more at most"),
        ("step", f"a training step, ms; promised: {LIMIT_SHARE:.0%} more at most"),
    ):
        rows = [row for row in cost.rows if row["of"] == of]
        if rows:
            counts = [sum(row["holds"] is value for row in rows) for value in _WORDS]
            console.print(f"{title}; holds: " + ", ".join(map("{} {}".format, _WORDS.values(), counts)))
            console.print(_table(of == "step", rows))
            console.print()
    console.print(EXPLANATION)


def _table(is_step: bool, rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    name, percent, form, scale = ("share", 100, "{:.1f}%", 1e-3) if is_step else ("added_us", 1, "{:.2f}", 1)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "on", "without", "with", "added", "(95%)", "holds", *(("calls",) if is_step else ())):
        table.add_column(column, justify="left" if column in ("", "on") else "right", no_wrap=True)
    for row in rows:
        times = [f"{row[key] * scale:.2f}" for key in ("plain_us_median", "recorded_us_median")]
        median, low, high = (form.format(row[f"{name}_{part}"] * percent) for part in ("median", "low", "high"))
        calls = (f"{row['calls']}: {row['calls_share']:.2%}",) if is_step else ()
        table.add_row(row["what"], row["backend"], *times, median, f"{low}..{high}", _WORDS[row["holds"]], *calls)
    return table


_WORDS = {True: "yes", False: "no", None: "?"}
