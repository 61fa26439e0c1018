"""What a rank of the benchmark of steps does: every contender of a cell in turn, trial by trial."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from crosscut.bench import trials
from crosscut.bench.ranks import Events
from crosscut.bench.steps import contenders
from crosscut.bench.steps.memory import peak_bytes
from crosscut.bench.steps.silent import SilentWorld
from crosscut.bench.steps.workloads import WORKLOADS, Workload
from crosscut.comm.context import Context
from crosscut.comm.ledger import Ledger

MIN_TRIALS = 3


@dataclass(frozen=True)
class StepPlan:
    """What is measured. `seconds`: about how long the trials of one cell may take; `trials`: at most so many."""

    workloads: tuple[str, ...]
    parallels: tuple[str, ...]
    backends: tuple[str, ...]
    world_size: int
    seconds: float
    trials: int
    single_s: dict[str, float] = field(default_factory=dict)  # of workloads measured on one device already

    def num_cells(self) -> int:
        """Rows of the result."""
        return len(self.workloads) * len(self.parallels) * len(self.backends)


def rank_main(ctx: Context, plan: StepPlan, path: str) -> None:
    """Measure every cell of one back end."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # in all contenders: what is not communicated may be any number
    with Events(ctx, path) as events:
        for name in plan.workloads:
            workload = WORKLOADS[name]
            single_s = plan.single_s.get(name) or _single(ctx, workload)
            for parallel in plan.parallels:
                events.say("cell", workload=name, parallel=parallel, backend=ctx.backend)
                events.say("row", **_cell(ctx, plan, workload, parallel, single_s))


def _single(ctx: Context, workload: Workload) -> float:
    """Seconds of one device's step with the best number of micro-batches; rank 0 measures while the others wait."""
    best = float("inf")
    if ctx.rank == 0:
        rows = workload.batch()[0].size(0)
        for pieces in (1, 2, 4, 8):
            if rows % pieces == 0:
                step = contenders.single(workload, pieces)
                step()
                best = min(best, min(trials.timed(step, 1, _nothing, _nothing) for _ in range(2)))
    return float(min(ctx.all_gather_object(best, tag="single")))


def _nothing() -> None:
    """No barrier and no device to wait for."""


def _cell(ctx: Context, plan: StepPlan, workload: Workload, parallel: str, single_s: float) -> dict[str, Any]:
    ours_ctx, quiet_ctx, quiet = _contexts(ctx)
    made = [
        contenders.ours(workload, parallel, ours_ctx),
        contenders.peer(workload, parallel, ctx),
        contenders.ours(workload, parallel, quiet_ctx),
    ]
    for step in made:
        step()
    made.append(_copying(_arriving_bytes(ours_ctx.ledger, ctx.world_size)))
    quiet.silence()

    def start() -> None:
        ctx.world.barrier(kind="control")

    def slowest(own: list[float]) -> list[float]:
        return [max(column) for column in zip(*ctx.all_gather_object(own, tag="times"), strict=True)]

    once = slowest([trials.timed(step, 1, start, _nothing) for step in made])
    count = max(MIN_TRIALS, min(plan.trials, int(plan.seconds / sum(once))))
    gc.collect()
    gc.disable()
    try:
        ours, peer, no_comm, copying = trials.interleave(
            made, count, start=start, finish=_nothing, slowest=slowest, known=once
        )
    finally:
        gc.enable()
    made.clear()
    peaks = [peak_bytes(lambda: contenders.ours(workload, parallel, _contexts(ctx)[0])),
             peak_bytes(lambda: contenders.peer(workload, parallel, ctx))]  # fmt: skip
    ours_peak, peer_peak = (int(max(column)) for column in zip(*ctx.all_gather_object(peaks, tag="peaks"), strict=True))
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    low, high = trials.median_interval(ratios)
    ours_s, no_comm_s = statistics.median(ours), statistics.median(no_comm)
    return {
        "workload": workload.name,
        "parallel": parallel,
        "backend": ctx.backend,
        "world_size": ctx.world_size,
        "trials": count,
        "ours_ms": ours_s * 1e3,
        "peer_ms": statistics.median(peer) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "no_comm_ms": no_comm_s * 1e3,
        "exposed": statistics.median(a / b for a, b in zip(ours, no_comm, strict=True)),
        "floor": 1 + statistics.median(a / b for a, b in zip(copying, no_comm, strict=True)),
        "single_ms": single_s * 1e3,
        "efficiency": single_s / (ctx.world_size * ours_s),
        "peak_memory_bytes": ours_peak,
        "peer_peak_memory_bytes": peer_peak,
    }


def _arriving_bytes(counted: Ledger, size: int) -> int:
    """After one step, the least that must have reached a rank from its peers in calls that handed over those bytes:
    (n-1)/n of a tensor to gather it or to reduce a part of it, so twice for an all_reduce (Patarasuk and Yuan 2009)."""
    part = (size - 1) / size
    share = {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "all_to_all": part}
    ops = [item for ops in counted.totals().values() for item in ops.items()]
    return int(sum(share.get(op, 1) * num_bytes for op, num_bytes in ops))


def _copying(num_bytes: int) -> Callable[[], object]:
    """Copying so many bytes: what is left of communication when nothing but the data itself costs time."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    to = torch.zeros_like(source)
    return lambda: to.copy_(source)


def _contexts(ctx: Context) -> tuple[Context, Context, SilentWorld]:
    """Two more contexts on the same ranks, since one context has one mesh: a real one and one to be silenced."""
    quiet = SilentWorld(ctx.transport)
    return Context(ctx.transport), Context(quiet), quiet
