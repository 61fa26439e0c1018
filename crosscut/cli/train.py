"""`crosscut train [CONFIG.toml]`: train a model on text under a declared layout, and go on with a run that stopped."""

from __future__ import annotations

import argparse
import os
import re
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

    found = preflight.check(config, start, launched=_launched(), check_folder=not args.eval_only)
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
    return config, run_folder.start_of(config, checkpoint, _launch_time() if _launched() else None)


def _launched() -> bool:
    """Whether torchrun has started this process: then it is one rank of several."""
    return "RANK" in os.environ


def _launch_time() -> float | None:
    """When torchrun started (a second later for each restart): all ranks of a host name the run folder alike."""
    from crosscut.watch.ring import process_start

    ticks = process_start(os.getppid())
    if not ticks:
        return None
    boot = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
    assert boot is not None
    return int(boot[1]) + ticks // os.sysconf("SC_CLK_TCK") + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def launch(
    config: Config, start: Start, *, eval_only: bool, to_stderr: bool, check: bool | None = None
) -> dict[str, Any]:
    """Run every rank; returns the summary. The run folder says how it ended. check: as in `crosscut.spawn`."""
    from crosscut.comm.errors import RankError
    from crosscut.comm.launch import spawn
    from crosscut.comm.launched import launched
    from crosscut.train import run_folder
    from crosscut.train.loop import Job, run_rank
    from crosscut.watch.program import install, watched
    from crosscut.watch.training import HostWatch, HungError, record_run

    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, or cuBLAS stays free to vary
    size, run, place = config.layout.mesh.world_size, config.run, launched()
    recorded = size > 1 and not eval_only
    active = recorded and run.backend != "threads" and not watched()  # else the ranks are this process
    limits = (run.hang_timeout_s, run.set_up_timeout_s)
    job = Job(config, start, to_stderr=to_stderr, eval_only=eval_only, record=partial(record_run, limits=limits))
    began = _summary_time(start.folder)
    undo = run_folder.ready(start.folder) if recorded else lambda: None
    dog = HostWatch(start.folder, *limits, active=active and place is None)
    if active and place is not None and (run.dir or start.checkpoint or place.local_world_size == place.world_size):
        # All ranks know the folder already: they record from before they meet.
        install(start.folder, hang_timeout=run.hang_timeout_s, set_up_timeout=run.set_up_timeout_s)
    try:
        # As one of torchrun's ranks this process may be inside a collective, where a handler would not run.
        with nullcontext() if place is not None else terminated_cleanly(), dog:
            summaries = spawn(
                run_rank,
                job,
                world_size=size,
                backend=run.backend,
                device=run.device,
                timeout_s=run.timeout_s,
                check=check,
            )
    except BaseException as error:
        if (place is None or place.rank == 0) and not eval_only:
            begun = _summary_time(start.folder) != began  # this run has come to its first step
            status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            if begun:
                run_folder.mark(start.folder, status)
            if begun or isinstance(error, HungError) or (isinstance(error, RankError) and not error.traceback_text):
                print(f"run       {start.folder} ({status})", file=sys.stderr)
                dog.explain(error)
            elif place is None:
                undo()
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
