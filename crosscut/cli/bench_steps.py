"""`crosscut bench steps`: whole training steps beside stock PyTorch's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from crosscut.cli.output import check_destination, write_json

MOST_TRIALS = 60


def run(args: argparse.Namespace) -> int:
    """Measure; 0, or 130 after Ctrl-C, with what was measured until then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from crosscut.bench.plan import BACKENDS, check_backends, default_backends, words
    from crosscut.bench.steps.measure import measure, show, to_markdown
    from crosscut.bench.steps.ranks import StepPlan
    from crosscut.bench.steps.workloads import PARALLELS, WORKLOADS

    backends = words("--backends", args.backends, BACKENDS) if args.backends else default_backends(args.world_size)
    backends = tuple(b for b in ("gloo", "shm") if b in backends)  # what stock PyTorch and a CPU have in common
    if not backends:
        raise ValueError(f"--backends {args.backends}: steps are measured on gloo and shm")
    check_backends(backends, args.world_size)
    if not 2 <= args.world_size <= 4:
        raise ValueError(f"--world-size {args.world_size}: these models are cut over 2 to 4 ranks (they have 4 layers)")
    if args.trials is not None and args.trials < 1:
        raise ValueError(f"--trials {args.trials}: at least one")
    if args.seconds is not None and not 0 < args.seconds < float("inf"):
        raise ValueError(f"--seconds {args.seconds:g}: must be positive and finite")
    plan = StepPlan(
        workloads=words("--workloads", args.workloads, tuple(WORKLOADS)) if args.workloads else tuple(WORKLOADS),
        parallels=words("--parallels", args.parallels, PARALLELS) if args.parallels else PARALLELS,
        backends=backends,
        world_size=args.world_size,
        seconds=args.seconds or 5.0,
        trials=args.trials or MOST_TRIALS,
    )
    check_destination(args.json)
    check_destination(args.markdown, "--markdown")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("starting the ranks", total=plan.num_cells())

        def follow(event: dict[str, Any]) -> None:
            if event["kind"] == "row":
                progress.advance(task)
            else:
                progress.update(task, description=f"{event['workload']} {event['parallel']} on {event['backend']}")

        steps = measure(plan, follow)
    if steps.rows:
        if args.json:
            write_json(args.json, "crosscut.bench.steps", {"rows": steps.rows})
        if args.markdown:
            Path(args.markdown).write_text(to_markdown(steps), encoding="utf-8")
        if args.json != "-":
            show(steps, Console(highlight=False))
    if steps.error is not None:
        raise steps.error
    return 0
