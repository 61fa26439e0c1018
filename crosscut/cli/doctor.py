"""`crosscut doctor`: look whether training can work here, and say what to change."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING

from crosscut.cli.output import add_json_argument, check_destination, write_json

if TYPE_CHECKING:
    from crosscut.doctor.finding import Finding

STYLES = {"ok": "green", "warn": "yellow", "problem": "bold red"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="look whether training can work here, and say what to change",
        description="Looks at torch, back ends, devices and their links, limits and names; each line is ok, warn or "
        "problem, with what to do. Exit code 1 if training could not work.",
    )
    parser.add_argument("--paste", action="store_true", help="a plain block for a bug report, without names and paths")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Examine; 0, or 1 if something must be put right before training."""
    from crosscut import __version__
    from crosscut.doctor.examine import can_train, examine, names_here, paste

    check_destination(args.json)
    if args.paste and args.json == "-":
        raise ValueError("--paste and --json - both write to stdout; take one, or --json FILE")
    findings = examine()
    if args.json:
        rows = [{"name": f.name, "status": f.status, "text": f.text, "fix": f.fix} for f in findings]
        write_json(args.json, "crosscut.doctor", {"can_train": can_train(findings), "rows": rows})
    if args.paste or (args.json != "-" and importlib.util.find_spec("rich") is None):
        sys.stdout.write(paste(findings, __version__, names_here()))
    elif args.json != "-":
        _show(findings, can_train(findings))
    return 0 if can_train(findings) else 1


def _show(findings: list[Finding], works: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(finding.status, style=STYLES[finding.status]), finding.name, text)
    console.print(table)
    worst = "training can work here" if works else "training cannot work here until the problems are put right"
    console.print(Text(f"\n{worst}", style="bold" if works else "bold red"))
