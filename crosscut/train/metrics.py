"""What a run measures: a line a step in metrics.jsonl, the bytes predicted and counted, the memory."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.layout.plan import Plan

if TYPE_CHECKING:
    from crosscut.comm.context import Context

Totals = dict[str, dict[str, int]]  # axis -> op -> bytes


class MetricsFile:
    """Appends one JSON object a line; each line is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a line. Numbers that JSON cannot hold (nan, inf) become null."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def first_loss(path: Path) -> float | None:
    """The loss of the first line of a metrics file, None if it has none."""
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    return json.loads(line)["loss"] if line else None


def predicted_bytes(plan: Plan, pp: int, steps: int) -> Totals:
    """What the rules say that one rank at pp coordinate `pp` hands to collectives in `steps` steps."""
    out: Totals = {}
    for rule in plan.rules(pp):
        ops = out.setdefault(rule.axis, {})
        ops[rule.op] = ops.get(rule.op, 0) + rule.bytes * steps
    return out


def add_totals(parts: Iterable[Totals]) -> Totals:
    """Totals added up."""
    out: Totals = {}
    for part in parts:
        for axis, ops in part.items():
            into = out.setdefault(axis, {})
            for op, count in ops.items():
                into[op] = into.get(op, 0) + count
    return out


def compare(predicted: Totals, counted: Totals) -> dict[str, dict[str, dict[str, int]]]:
    """{axis: {op: {predicted, counted}}}; an op that moves no bytes on either side is left out."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    for axis in dict.fromkeys((*predicted, *counted)):
        ours, seen = predicted.get(axis, {}), counted.get(axis, {})
        for op in dict.fromkeys((*ours, *seen)):
            if ours.get(op, 0) or seen.get(op, 0):
                pair = {"predicted": ours.get(op, 0), "counted": seen.get(op, 0)}
                out.setdefault(axis, {})[op] = pair
    return out


def peak_memory_bytes(ctx: Context) -> int:
    """The most memory that this rank has held: of the device on a GPU, else of the process (shared by rank threads)."""
    import torch

    if ctx.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(ctx.device))
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
