"""`crosscut sample RUN --prompt "def "`: write text with a trained model. One process, whatever layout trained it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from crosscut.cli.output import add_json_argument, check_destination, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "sample",
        help="write text with a trained model",
        description="Write text with the newest checkpoint of a run, in one process, whatever layout trained it.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder (runs/latest is the newest), or a checkpoint folder")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with (default: a new file)")
    parser.add_argument("--max-bytes", type=int, default=400, metavar="N", help="bytes to write (default 400)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest (default 0.8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed writes another text (default 0)")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the text to stdout."""
    check_destination(args.json)
    if args.max_bytes < 0:
        raise ValueError(f"--max-bytes {args.max_bytes}: must be 0 or more")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature}: must be 0 or more, and finite")
    from crosscut.train.run_folder import RUNS, latest_run
    from crosscut.train.sample import find, sample_run

    place = Path(args.run)
    if place == RUNS / "latest":  # where the file system has no links, `latest` is a file that holds the name
        place = latest_run(RUNS) or place
    checkpoint = find(place, args.step)
    text = sample_run(checkpoint, args.prompt, args.max_bytes, args.temperature, args.seed)
    if args.json != "-":
        print(text)
    if args.json:
        write_json(args.json, "crosscut.sample", {"checkpoint": str(checkpoint), "prompt": args.prompt, "text": text})
    return 0
