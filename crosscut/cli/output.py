"""Machine-readable output: `--json FILE|-`, the same on every command.

The object begins with `schema` and `version`; tables stand under `rows`; the unit of a number stands in its key
(`_bytes`, `_s`, `_ms`, `_us`, `_gbs`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_json_argument(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add `--json FILE|-` to a command."""
    words = "write the result as JSON to FILE, or to stdout for -"
    parser.add_argument("--json", metavar="FILE|-", default=default, help=words)


def check_destination(destination: str | None, flag: str = "--json") -> None:
    """Raise ValueError now if `--json FILE` (or what `flag` says) could not be written at the end of a long run."""
    if destination is None or destination == "-":
        return
    path = Path(destination)
    if path.is_dir():
        raise ValueError(f"{flag} {destination}: is a folder; give a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "not writable" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{flag} {destination}: cannot be written ({reason})")


def write_json(destination: str, schema: str, body: Mapping[str, Any], version: int = 1) -> None:
    """Write `{"schema": schema, "version": version, **body}` to the file `destination`, or to stdout for `-`.

    Raises ValueError if the file cannot be written.
    """
    text = json.dumps({"schema": schema, "version": version, **body}, indent=2, allow_nan=True) + "\n"
    if destination == "-":
        sys.stdout.write(text)
        return
    try:
        Path(destination).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--json {destination}: cannot be written ({error.strerror})") from error
