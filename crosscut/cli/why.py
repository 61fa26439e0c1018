"""`crosscut why RUN`: who hung, who died, and what came first; from the ledgers of a run, dead or alive."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from crosscut.cli.output import add_json_argument, check_destination, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "why",
        help="say who hung or died, and what came first",
        description="Read the ledgers of a run (crosscut train, python -m crosscut.watch) or PyTorch Flight Recorder "
        "dumps, and say what went wrong, first divergence first. A run that is still alive is read as it is.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run folder, or a folder of Flight Recorder dumps; by default the run in runs/ that recorded last",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 0 whatever it is. Raises ValueError (exit code 2) if RUN cannot be read."""
    from crosscut.watch.facts import SCHEMA, VERSION
    from crosscut.watch.folder import diagnose, newest_run

    check_destination(args.json)
    run = Path(args.run) if args.run is not None else newest_run()
    found = diagnose(run)
    if args.json != "-":
        if args.run is None:
            print(f"run: {run}")
        if found.alive:
            print("the run is alive; this is how it stands now")
        print("\n".join(_folded(found.lines()) if sys.stdout.isatty() else found.lines()))
    if args.json:
        write_json(args.json, SCHEMA, found.as_json(), VERSION)
    return 0


def _folded(lines: list[str]) -> list[str]:
    """Long lines, folded between words: a terminal folds within them."""
    width, out = shutil.get_terminal_size().columns, []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        fill = textwrap.TextWrapper(
            width, subsequent_indent=2 * indent * " ", break_long_words=False, break_on_hyphens=False
        )
        out += fill.wrap(line) if len(line) > width else [line]
    return out
