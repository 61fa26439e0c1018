"""`crosscut bench`: measure collectives, training steps, the recorder, or the machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.bench.definitions import OPS
from crosscut.bench.plan import BACKENDS, QUICK, SIZES, TRIALS
from crosscut.cli.output import add_json_argument, check_destination, write_json
from crosscut.layout.errors import nearest

if TYPE_CHECKING:
    from crosscut.bench.measure import Measured
    from crosscut.bench.plan import Plan

BENCHES = {
    "collectives": "time, algbw and busbw of every operation, size and back end, in turn within each trial",
    "steps": "whole training steps, crosscut's beside stock PyTorch's, on the same back end",
    "recorder": "what the recorder of crosscut.watch adds to a call and to a training step",
    "machine": "copying, matrix products, a latency and a bandwidth per operation: the machine's profile",
}
# Which options go with which of them only.
ONLY = {
    **dict.fromkeys(("ops", "sizes", "algorithms", "csv", "plot", "quick", "dtype"), ("collectives",)),
    "out": ("machine",),
    **dict.fromkeys(("workloads", "parallels", "markdown"), ("steps",)),
    "seconds": ("steps", "recorder"),
    **dict.fromkeys(("backends", "trials"), ("collectives", "steps", "machine")),
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure collectives, whole training steps, what recording costs, or the machine",
        description="; ".join(f"{name}: {text}" for name, text in BENCHES.items())
        + ". Ctrl-C keeps what was measured.",
    )
    parser.add_argument("name", metavar="|".join(BENCHES), help="what to measure")
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    parser.add_argument(
        "--backends", metavar="NAME,...", help=f"of {', '.join(BACKENDS)} (default: all but threads; not for recorder)"
    )
    parser.add_argument(
        "--trials", type=int, metavar="N", help=f"default {TRIALS}, with --quick {QUICK['trials']}; not for recorder"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="of trials for each row: steps (default 5), recorder (default 2)"
    )
    add_json_argument(parser)
    of = parser.add_argument_group("bench collectives")
    of.add_argument("--quick", action="store_true", default=None, help="under a minute: few operations and sizes")
    of.add_argument("--ops", metavar="OP,...", help=f"which operations, of {', '.join(OPS)} (default: all)")
    of.add_argument("--sizes", metavar="SIZE,...", help=f"bytes of the whole array (default {SIZES})")
    of.add_argument("--algorithms", metavar="NAME,...|all", help="also the algorithms by hand, such as ring")
    of.add_argument("--dtype", metavar="NAME", help="fp64, fp32 (default), fp16, bf16, int64, int32, int8, uint8")
    of.add_argument("--csv", metavar="FILE", help="write the rows as CSV")
    of.add_argument("--plot", metavar="FILE.html", help="write curves of time and busbw over size")
    of = parser.add_argument_group("bench steps")
    of.add_argument("--workloads", metavar="NAME,...", help="of mlp, transformer, transformer-small (default: all)")
    of.add_argument("--parallels", metavar="NAME,...", help="of ddp, fsdp, tp, pp (default: all)")
    of.add_argument("--markdown", metavar="FILE", help="write the tables for a document")
    of = parser.add_argument_group("bench machine")
    of.add_argument("--out", metavar="FILE", help="where to write the profile (default: crosscut's cache)")


def run(args: argparse.Namespace) -> int:
    """Measure; 0, 1 if a result was wrong, 130 after Ctrl-C."""
    if args.name not in BENCHES:
        raise ValueError(f"unknown bench {args.name!r}{nearest(args.name, BENCHES)}")
    for option, names in ONLY.items():
        if args.name not in names and getattr(args, option) is not None:
            raise ValueError(f"--{option} goes with bench {' and '.join(names)}, not with {args.name}")
    from crosscut.comm.launched import launched

    if launched() is not None:
        raise ValueError("RANK is set: bench starts its ranks itself; run it once, without torchrun")
    if args.name == "steps":
        from crosscut.cli.bench_steps import run as run_steps

        return run_steps(args)
    if args.name == "recorder":
        from crosscut.cli.bench_recorder import run as run_recorder

        return run_recorder(args)
    return _machine(args) if args.name == "machine" else _collectives(args)


def _collectives(args: argparse.Namespace) -> int:
    from rich.console import Console

    from crosscut.bench import plot, show
    from crosscut.bench.plan import make_plan

    plan = make_plan(
        ops=args.ops,
        sizes=args.sizes,
        world_size=args.world_size,
        backends=args.backends,
        algorithms=args.algorithms,
        dtype=args.dtype or "fp32",
        trials=args.trials,
        quick=bool(args.quick),
    )
    for flag in ("json", "csv", "plot"):
        check_destination(getattr(args, flag), f"--{flag}")
        if flag != "json" and getattr(args, flag) == "-":
            raise ValueError(f"--{flag} -: only --json writes to stdout; give a file")
    if args.plot:
        plot.require()
    measured = _measure(plan)
    if measured.rows or isinstance(measured.error, (KeyboardInterrupt, SystemExit)):
        if args.json:
            write_json(args.json, "crosscut.bench.collectives", show.to_json(measured))
        if args.csv:
            show.write_csv(args.csv, measured.rows)
        if args.plot:
            plot.write_plot(args.plot, measured)
        if args.json != "-" and measured.rows:
            show.collectives(measured, Console(highlight=False))
    if measured.error is not None:
        raise measured.error
    return 0 if measured.is_correct else 1


def _machine(args: argparse.Namespace) -> int:
    from rich.console import Console

    from crosscut.bench import machine, show
    from crosscut.bench.plan import Plan, check_backends, check_memory, default_backends, words

    if args.world_size < 2:
        raise ValueError(f"--world-size {args.world_size}: a collective needs 2 ranks or more")
    if args.trials is not None and args.trials < 1:
        raise ValueError(f"--trials {args.trials}: at least one")
    backends = words("--backends", args.backends, BACKENDS) if args.backends else default_backends(args.world_size)
    if backends == ("threads",):
        raise ValueError("--backends threads: bench machine needs ranks that are processes; add gloo")
    check_backends(backends, args.world_size)
    check_memory([machine.COPY_BYTES], args.world_size, backends)
    path = Path(args.out) if args.out else machine.profile_path()
    if not args.out:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{path.parent}: cannot be made ({error.strerror}); say --out FILE") from error
    check_destination(str(path), "--out" if args.out else "the profile")
    check_destination(args.json)
    plan = Plan(
        ops=machine.OPS,
        sizes=machine.SIZES,
        world_size=args.world_size,
        backends=backends,
        trials=args.trials or 10,
        vias=("group",),
        matrix=False,
        with_machine=True,
    )
    measured = _measure(plan)
    if measured.error is not None:  # half a profile would mislead whoever reads it
        raise measured.error
    profile = {
        "host": machine.host(),
        "cores": machine.host()["cores"],
        "world_size": args.world_size,
        **measured.machine,
        "links": machine.links(measured.rows),
    }
    write_profile(path, profile)
    if args.json:
        write_json(args.json, "crosscut.machine", profile)
    if args.json != "-":
        show.machine(profile, path, Console(highlight=False))
    return 0 if measured.is_correct else 1


def write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Whole or not at all: whoever plans may be reading it."""
    text = json.dumps({"schema": "crosscut.machine", "version": 1, **profile}, indent=2) + "\n"
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error


def _measure(plan: Plan) -> Measured:
    """Measure, with a progress bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from crosscut.bench.measure import measure
    from crosscut.bench.sizes import size_text

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("starting the ranks", total=plan.num_ticks())

        def follow(event: dict[str, Any]) -> None:
            if event["kind"] == "tick":
                progress.advance(task)
            elif event["kind"] == "cell":
                progress.update(task, description=f"{event['op']} {size_text(event['bytes'])}")
            elif event["kind"] == "pair":
                progress.update(task, description="from rank to rank")

        return measure(plan, follow)
