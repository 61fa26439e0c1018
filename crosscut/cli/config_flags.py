"""The arguments of every command that takes a config: CONFIG, the short flags, `--section.key value`. No torch."""

from __future__ import annotations

import argparse
import os
from typing import Any

LAYOUT_FLAGS = ("mesh", "layout", "zero", "sp", "schedule", "micro_batches", "model")
RUN_FLAGS = ("steps", "seed", "deterministic", "backend", "device", "resume", "overwrite")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and the flags that say a layout and a model; `args.overrides` takes the `--section.key` flags."""
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="a config file (default: the defaults)")
    add_layout_arguments(parser)


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say a layout and a model, without CONFIG."""
    parser.set_defaults(takes_config=True)
    group = parser.add_argument_group("layout (flag > --layout > config file > default)")
    group.add_argument("--mesh", metavar="AXES", help="pp=2,dp=2,tp=2: ranks by axis, with the usual cuts of each axis")
    group.add_argument("--layout", metavar="FILE", help="a layout file; replaces the layout in CONFIG")
    group.add_argument("--zero", metavar="N", help="ZeRO stage over dp, 0 to 3")
    group.add_argument("--sp", action=argparse.BooleanOptionalAction, default=None, help="sequence parallelism over tp")
    group.add_argument("--schedule", metavar="NAME", help="gpipe, 1f1b or interleaved")
    group.add_argument("--micro-batches", metavar="N", help="micro-batches a step (without pp: accumulation)")
    group.add_argument("--world-size", type=int, metavar="N", help='ranks in all, for a mesh with dp="auto"')
    group.add_argument("--model", metavar="NAME", help="transformer, mlp or FILE.py:FUNCTION")
    parser.epilog = "Any config key is a flag: --section.key value, e.g. --optimizer.lr 1e-3 --mesh.dp 4."


def overrides_of(args: argparse.Namespace, names: tuple[str, ...] = LAYOUT_FLAGS) -> dict[str, Any]:
    """What the flags say, as `load_config` takes it; the short flags `names` and the `--section.key` ones."""
    short = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return {**short, **args.overrides}


def world_size_of(args: argparse.Namespace) -> int | None:
    """--world-size; else the WORLD_SIZE of a launcher such as torchrun that has started this process; else None."""
    if args.world_size is not None:
        if args.world_size < 1:
            raise ValueError(f"--world-size {args.world_size}: must be at least 1")
        return int(args.world_size)
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if "RANK" in os.environ and size.isdigit() else None
