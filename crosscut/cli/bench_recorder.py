"""`crosscut bench recorder`: what recording adds to a call and to a training step."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from crosscut.cli.output import check_destination, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from crosscut.bench.recorder import RecorderCost

EXPLANATION = """\
without, with  medians of trials in turn, slowest rank; calls: of 4 KiB, a rank's; step: forward, backward, AdamW
added          with - without within trials, median; (95%): the interval that holds it; for a step, of without
nothing sent   over a back end that does nothing: what is added is not lost in the noise of the rest
torch          torch.distributed under crosscut.watch.install()"""


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
    from rich.table import Table

    from crosscut.bench.recorder import LIMIT_SHARE, LIMIT_US

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "on", "without", "with", "added", "(95%)", "holds"):
        table.add_column(column, justify="left" if column in ("", "on") else "right", no_wrap=True)
    for row in cost.rows:
        step = row["of"] == "step"
        unit, scale = ("ms", 1e-3) if step else ("us", 1.0)
        times = [f"{row[key] * scale:.1f} {unit}" for key in ("plain_us_median", "recorded_us_median")]
        values = [row[key] * (100 if step else 1) for key in (_KEYS[step])]
        added = [f"{values[0]:+.2f}{'%' if step else ' us'}", f"{values[1]:.2f} to {values[2]:.2f}"]
        what = {"torch": "torch: ", "step": "step: "}.get(row["of"], "") + row["what"]
        table.add_row(what, row["backend"], *times, *added, _WORDS[row["holds"]])
    console.print(table)
    console.print(EXPLANATION)
    for told, rows in (
        (f"{LIMIT_US:g} us a call of crosscut's", [row for row in cost.rows if row["of"] in ("write", "group")]),
        (f"{LIMIT_US:g} us a call of torch's", [row for row in cost.rows if row["of"] == "torch"]),
        (f"{LIMIT_SHARE:.0%} of a step", [row for row in cost.rows if row["of"] == "step"]),
    ):
        counts = [sum(row["holds"] is value for row in rows) for value in (True, False, None)]
        console.print(
            f"{told}: holds in {counts[0]} rows, not in {counts[1]}, not to be told from noise in {counts[2]}"
        )


_KEYS = {
    False: ("added_us_median", "added_us_low", "added_us_high"),
    True: ("share_median", "share_low", "share_high"),
}
_WORDS = {True: "yes", False: "no", None: "?"}
