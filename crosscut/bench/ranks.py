"""What a rank of a benchmark does, and how rank 0 says what was measured: a line of JSON at a time, in a file, so that
nothing is lost when the run is stopped.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch

from crosscut.bench import calls, trials
from crosscut.bench.data import DTYPES, is_correct
from crosscut.bench.definitions import algbw_gbs, busbw_gbs
from crosscut.bench.machine import measure_rank
from crosscut.bench.matrix import measure_pairs
from crosscut.bench.plan import Cell, Plan, Variant
from crosscut.bench.sides import Side, Sides
from crosscut.comm.context import Context


class Events:
    """Rank 0's file. The other ranks say nothing."""

    def __init__(self, ctx: Context, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8") if ctx.rank == 0 else None  # noqa: SIM115 (closed in __exit__)

    def say(self, kind: str, **values: Any) -> None:
        """One line: {"kind": kind, ...}."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def rank_main(ctx: Context, plan: Plan, backends: tuple[str, ...], with_shm: bool, path: str) -> None:
    """Measure on this rank. `with_shm`: shared memory starts the trials, also if it is not measured itself."""
    torch.set_num_threads(1)
    with Events(ctx, path) as events:
        sides = Sides(ctx, backends, with_shm)
        _measure(ctx, plan, sides, events)
        sides.start()
        sides.close()


def _measure(ctx: Context, plan: Plan, sides: Sides, events: Events) -> None:
    """Everything in the plan that the ranks of this world can measure."""
    if plan.with_machine and ctx.backend != "threads":
        events.say("machine", **measure_rank(ctx, sides))
    for cell in plan.cells():
        events.say("cell", op=cell.op, bytes=cell.num_bytes)
        for event in measure_cell(ctx, plan, cell, sides, lambda: events.say("tick")):
            events.say(**event)
    for side in sides.all if plan.matrix else []:
        for row in measure_pairs(ctx, side, sides):
            events.say("pair", **row)


def measure_cell(ctx: Context, plan: Plan, cell: Cell, sides: Sides, tick: Any) -> list[dict[str, Any]]:
    """All variants of one operation at one size, interleaved: the events to say. Collective."""
    by_name = {side.backend: side for side in sides.all}
    variants = plan.variants(cell.op, cell.num_bytes, list(by_name))
    buffers = {
        device: calls.Buffers.make(cell.op, ctx.rank, ctx.world_size, cell.count, DTYPES[plan.dtype], device)
        for device in {side.device for side in sides.all} | {torch.device("cpu")}
    }
    made = [_call(variant, by_name, buffers) for variant in variants]
    correct = []
    for variant, call in zip(variants, made, strict=True):
        own = True
        if variant.via != "copy":
            b = buffers[by_name[variant.backend].device]
            b.fill()
            b.out.zero_()
            own = is_correct(call(), cell.op, ctx.rank, ctx.world_size, cell.count)
        correct.append(own)
    all_correct = [all(column) for column in zip(*ctx.all_gather_object(correct, tag="correct"), strict=True)]
    for b in buffers.values():
        b.rest()

    def slowest(own: list[float]) -> list[float]:
        return [max(column) for column in zip(*ctx.all_gather_object(own, tag="times"), strict=True)]

    times = trials.interleave(
        made, plan.trials, start=sides.start, finish=sides.synchronize, slowest=slowest, tick=tick
    )
    return _events(plan, cell, variants, times, all_correct)


def _call(variant: Variant, sides: dict[str, Side], buffers: dict[torch.device, calls.Buffers]) -> calls.Call:
    if variant.via == "copy":
        return calls.by_copying(buffers[torch.device("cpu")])
    side = sides[variant.backend]
    if variant.via == "torch":
        return calls.by_torch(side.torch_group, buffers[side.device])
    group = side.checked if variant.via == "checked" and side.checked is not None else side.group
    return calls.by_group(group, buffers[side.device], variant.algorithm)


def _events(
    plan: Plan, cell: Cell, variants: list[Variant], times: list[list[float]], correct: list[bool]
) -> list[dict[str, Any]]:
    """The rows of a cell, and the ratios of its paired trials."""
    n, found = plan.world_size, []
    by_variant = dict(zip(variants, times, strict=True))
    for variant, own, ok in zip(variants, times, correct, strict=True):
        median = statistics.median(own)
        rates = {
            "time_us_median": median * 1e6,
            "time_us_p95": trials.p95(own) * 1e6,
            "algbw_gbs": algbw_gbs(cell.num_bytes, median),
            "busbw_gbs": busbw_gbs(cell.op, n, cell.num_bytes, median),
        }
        where = {"op": cell.op, "backend": variant.backend, "via": variant.via, "algorithm": variant.algorithm}
        if variant.via == "copy":
            found.append({"kind": "copy", "op": cell.op, "world_size": n, "bytes": cell.num_bytes, **rates})
            continue
        found.append({"kind": "row", **where, "world_size": n, "bytes": cell.num_bytes, **rates, "correct": ok})
        for other in (Variant("gloo", variant.via), Variant("memory", "copy")):
            if other in by_variant and other != variant:
                ratio = trials.paired(by_variant[other], own)
                versus = "copy limit" if other.via == "copy" else other.backend
                found.append(
                    {"kind": "ratio", **where, "bytes": cell.num_bytes, "versus": versus, "speed_ratio": ratio}
                )
    return found
