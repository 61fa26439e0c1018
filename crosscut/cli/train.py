"""`crosscut train [CONFIG.toml]`: train a model on text under a declared layout, and go on with a run that stopped."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from crosscut.cli.config_flags import LAYOUT_FLAGS, RUN_FLAGS, add_config_arguments, overrides_of, world_size_of
from crosscut.cli.output import add_json_argument, check_destination, write_json

if TYPE_CHECKING:
    from crosscut.train.config import Config
    from crosscut.train.run_folder import Start

SIGTERM_CODE = 143


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train a model on text under a declared layout",
        description="Train a model on real text under a declared layout. By default the text is the source of this "
        "Python's standard library, so there is nothing to download.",
    )
    add_config_arguments(parser)
    group = parser.add_argument_group("run")
    group.add_argument("--steps", metavar="N", help="optimizer steps in all")
    group.add_argument("--seed", metavar="N", help="of weights and data order")
    group.add_argument("--deterministic", action="store_const", const=True, help="only deterministic algorithms")
    group.add_argument("--backend", metavar="NAME", help="nccl, shm, gloo or threads (default: what fits this machine)")
    group.add_argument("--device", metavar="NAME", help="cpu or cuda")
    group.add_argument(
        "--check", action="store_true", help="compare the ranks' calls before data move (docs/checked.md)"
    )
    group.add_argument("--resume", metavar="RUN|latest|auto", help="go on with a run, under this or any other layout")
    group.add_argument("--overwrite", action="store_const", const=True, help="replace an existing run folder")
    group.add_argument("--eval-only", action="store_true", help="print the validation loss and stop")
    group.add_argument("--dry-run", action="store_true", help="check everything, print bytes and memory, start nothing")
    group.add_argument("--print-config", action="store_true", help="print the merged config and where values came from")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run is finished."""
    check_destination(args.json)
    config, start = resolve(args)
    if args.print_config:
        print(config.to_toml(), end="")
        return 0
    from crosscut.train import preflight

    launched = "RANK" in os.environ  # torchrun has started this process: it is one rank of several
    # Rank 0 alone looks at the run folder when there are several of us: it may just have made it.
    found = preflight.check(config, start, launched=launched, check_folder=not (launched or args.eval_only))
    if args.dry_run:
        for line in preflight.lines(found) if args.json != "-" else ():
            print(line)
        if args.json:
            write_json(args.json, "crosscut.dry_run", preflight.as_json(found))
        return 0
    summary = launch(config, start, eval_only=args.eval_only, to_stderr=args.json == "-", check=args.check or None)
    if args.json and os.environ.get("RANK", "0") == "0":
        write_json(args.json, "crosscut.train", summary)
    return 0


def resolve(args: argparse.Namespace) -> tuple[Config, Start]:
    """The config and where the run goes. A run that goes on brings its config along, unless CONFIG is given."""
    from crosscut.train import run_folder, toml
    from crosscut.train.config import load_config

    overrides = overrides_of(args, (*LAYOUT_FLAGS, *RUN_FLAGS))
    path, tables = args.config, toml.read(args.config) if args.config else None
    asked = {key: overrides.get(f"run.{key}", (tables or {}).get("run", {}).get(key)) for key in ("dir", "resume")}
    resume = overrides.get("resume", asked["resume"])
    checkpoint = run_folder.find_checkpoint(str(resume), asked["dir"]) if resume is not None else None
    if checkpoint is not None and path is None:
        saved = run_folder.saved_config(run_folder.run_of(checkpoint))
        if saved is not None:
            path, tables = str(saved), run_folder.inherited(saved)
    config = load_config(path, overrides, world_size=world_size_of(args), tables=tables)
    return config, run_folder.start_of(config, checkpoint)


def launch(
    config: Config, start: Start, *, eval_only: bool, to_stderr: bool, check: bool | None = None
) -> dict[str, Any]:
    """Run every rank; returns the summary. The run folder says how it ended. check: as in `crosscut.spawn`."""
    from crosscut.comm.launch import spawn
    from crosscut.train import run_folder
    from crosscut.train.loop import Job, run_rank
    from crosscut.watch.training import HostWatch, record_run

    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, or cuBLAS stays free to vary
    size, monitored = config.layout.mesh.world_size, "RANK" not in os.environ
    watched = size > 1 and config.run.backend != "threads"  # whose ranks are this process
    record = partial(record_run, monitored=monitored, hang_timeout_s=config.run.hang_timeout_s)
    job = Job(config, start, to_stderr=to_stderr, eval_only=eval_only, record=record)
    began = _summary_time(start.folder)
    dog = HostWatch(start.folder, config.run.hang_timeout_s, active=monitored and watched and not eval_only)
    try:
        # As one of torchrun's ranks this process may be inside a collective, where a handler would not run.
        with nullcontext() if "RANK" in os.environ else terminated_cleanly(), dog:
            summaries = spawn(
                run_rank,
                job,
                world_size=size,
                backend=config.run.backend,
                device=config.run.device,
                timeout_s=config.run.timeout_s,
                check=check,
            )
    except BaseException as error:
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        speaks = os.environ.get("RANK", "0") == "0"
        if speaks and not eval_only and _summary_time(start.folder) != began:  # this run has got as far as its folder
            run_folder.mark(start.folder, "interrupted" if stopped else "failed")
            print(f"run       {start.folder} ({'interrupted' if stopped else 'failed'})", file=sys.stderr)
            dog.explain(error)
        raise
    return dict(summaries[0])


def _summary_time(folder: Path) -> int:
    from crosscut.train.run_folder import SUMMARY

    path = folder / SUMMARY
    return path.stat().st_mtime_ns if path.exists() else 0


@contextmanager
def terminated_cleanly() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does: everything started in it is stopped; then exit code 143."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(SIGTERM_CODE)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
