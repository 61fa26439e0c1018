"""What recording costs: the same done with and without the recorder of `crosscut.watch`, in turn within each trial."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crosscut.bench import trials
from crosscut.bench.measure import Event, following, sigterm
from crosscut.bench.ranks import Events
from crosscut.bench.steps import contenders
from crosscut.bench.steps.silent import SilentWorld
from crosscut.bench.steps.workloads import WORKLOADS
from crosscut.comm.call import Call
from crosscut.comm.context import Context
from crosscut.comm.group import Group
from crosscut.comm.intercept import intercept
from crosscut.comm.launch import spawn
from crosscut.comm.shm import platform
from crosscut.watch.recorder import Observer, Recorder

LIMIT_US, LIMIT_SHARE = 2.0, 0.01  # what is promised: a call, a step
NUMBERS = 1024  # of a call: 4 KiB
SILENT = ", nothing sent"
STEPS = (("mlp", "ddp"), ("mlp", "tp"), ("transformer-small", "ddp"), ("transformer-small", "tp"))
MIN_TRIALS, MAX_TRIALS, WARM_UP = 6, 600, 3
Do = Callable[[], Any]


@dataclass(frozen=True)
class RecorderPlan:
    """seconds: about how long the trials of a row may take."""

    seconds: float
    world_size: int = 2

    def worlds(self) -> tuple[str, ...]:
        """Back ends, each a world of ranks: crosscut's groups on threads and on what `crosscut train` takes, with the
        steps; torch's calls on Gloo.
        """
        return "threads", "gloo" if platform.why_not() else "shm", "stock"

    def num_rows(self) -> int:
        """Rows of the result."""
        return 1 + 3 * 3 + len(STEPS) + 3


@dataclass
class RecorderCost:
    """What was measured. `error`: what ended the run early."""

    plan: RecorderPlan
    rows: list[Event] = field(default_factory=list)
    error: BaseException | None = None


def measure(plan: RecorderPlan, on_event: Callable[[Event], None] = lambda event: None) -> RecorderCost:
    """Measure all rows. What ends the ranks early stands in `error`, and the rows measured until then stay."""
    result, before = RecorderCost(plan), torch.get_num_threads()

    def take(event: Event) -> None:
        if event["kind"] == "row":
            row = {key: value for key, value in event.items() if key != "kind"}
            if row["of"] == "step":
                row["calls_share"] = _share_of_calls(row, result.rows)
            result.rows.append(row)
        on_event(event)

    with tempfile.TemporaryDirectory(prefix="crosscut-bench-") as folder:
        try:
            with sigterm():
                take({"kind": "row", **_ring_write(Path(folder), plan.seconds)})
                for world in plan.worlds():
                    path = Path(folder) / f"{world}.jsonl"
                    path.touch()
                    with following(path, take):
                        backend = "gloo" if world == "stock" else world
                        check = None if backend == "threads" else False
                        n = plan.world_size
                        spawn(rank_main, plan, world, str(path), world_size=n, backend=backend, check=check)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            result.error = error
        finally:
            torch.set_num_threads(before)  # ranks that are threads have set it
    return result


def _share_of_calls(step: Event, rows: list[Event]) -> float:
    """What the calls of a step add to it, by what such calls cost alone: of a percent, trials of steps show little."""
    dearest = max(row["added_us_median"] for row in rows if row["of"] == "group" and row["backend"] == step["backend"])
    return float(step["calls"] * dearest / step["plain_us_median"])


def rank_main(ctx: Context, plan: RecorderPlan, world: str, path: str) -> None:
    """Measure the rows of one world of ranks."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    folder = Path(path).with_suffix("")
    with Events(ctx, path) as events:
        if world == "stock":
            rows = _stock(ctx, plan, folder)
        else:
            rows = _groups(ctx, plan, folder)
            if world != "threads":
                rows = [*rows, *((name, partial(_step, ctx, plan, folder, name, parallel)) for name, parallel in STEPS)]
        for what, row in rows:
            events.say("cell", what=what, backend=ctx.backend)
            events.say("row", **row())


Rows = list[tuple[str, Callable[[], Event]]]


def _ring_write(folder: Path, seconds: float) -> Event:
    """What a record costs alone: a call begins and is done."""
    recorder = Recorder(folder / "alone", 0, 2)
    like = Call("all_reduce", "dp", "grads", "step", "train.py:210", 1, (NUMBERS,), "float32", "sum")
    mark = recorder.mark(recorder.lane("dp", (0, 1)), like, 4 * NUMBERS)
    begin, complete = recorder.begin, recorder.ring.complete
    times: list[float] = []
    ends = time.perf_counter() + min(seconds, 1.0)
    while len(times) < MIN_TRIALS or (time.perf_counter() < ends and len(times) < MAX_TRIALS):
        began = time.perf_counter()
        for seq in range(1000):
            complete(begin(mark, seq))
        times.append((time.perf_counter() - began) / 1000)
    return _row("write", "a record written", "", [[0.0] * len(times), times])


def _groups(ctx: Context, plan: RecorderPlan, folder: Path) -> Rows:
    """crosscut's calls: over the back end, and (on threads) over one that does nothing, which shows the rest alone."""
    takes_turns = ctx.backend == "threads"  # the cost of all ranks adds up
    over = [("", _pair(ctx, ctx.transport, folder), ctx.world_size if takes_turns else 1)]
    if takes_turns:
        silent = SilentWorld(ctx.transport)
        over.insert(0, (SILENT, _pair(ctx, silent, folder), 1))
        silent.silence()

    def two_messages(group: Group, x: torch.Tensor) -> Do:
        if group.rank > 1:
            return lambda: None
        other = 1 - group.rank
        first, second = (group.send, group.recv) if group.rank == 0 else (group.recv, group.send)

        def run() -> None:
            first(x, other)
            second(x, other)

        return run

    def row(name: str, groups: list[Group], make: Callable[[Group, torch.Tensor], Do], per: int) -> Event:
        x = torch.zeros(NUMBERS)
        times = _interleave(ctx, plan, [make(group, x) for group in groups], per, alone=name.endswith(SILENT))
        return _row("group", name, ctx.backend, times)

    kinds: dict[str, tuple[Callable[[Group, torch.Tensor], Do], int]] = {
        "all_reduce": (lambda group, x: lambda: group.all_reduce(x), 1),
        "all_gather": (lambda group, x: lambda: group.all_gather(x), 1),
        "send, recv": (two_messages, 2),
    }
    rows: Rows = []
    for added, pair, ranks in over:
        for name, (make, calls) in kinds.items():
            rows.append((name + added, partial(row, name + added, [one.world for one in pair], make, calls * ranks)))
    return rows


def _step(ctx: Context, plan: RecorderPlan, folder: Path, name: str, parallel: str) -> Event:
    plain, recorded = _pair(ctx, ctx.transport, folder)
    steps = [contenders.ours(WORKLOADS[name], parallel, one) for one in (plain, recorded)]
    steps[1]()
    before = sum(calls for calls, _ in recorded.ledger.counters.values())
    steps[1]()
    calls = sum(calls for calls, _ in recorded.ledger.counters.values()) - before
    times = _interleave(ctx, plan, steps, factor=4)
    axis = "dp" if parallel == "ddp" else parallel
    what = f"{name}, {axis}={ctx.world_size}"
    return _row("step", what, ctx.backend, times, calls)


def _stock(ctx: Context, plan: RecorderPlan, folder: Path) -> Rows:
    """torch's own calls, on pairs of equal groups of which the second is recorded as `crosscut.watch.install` does."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the back end that does nothing)

    recorder, ranks = Recorder(folder, ctx.rank, ctx.world_size), list(range(ctx.world_size))
    silent, gloo = ([dist.new_group(ranks, backend=backend) for _ in range(2)] for backend in ("fake", "gloo"))
    for groups in (silent, gloo):
        groups[1] = intercept(Observer(recorder), groups[1]).group

    def all_reduce(group: Any) -> Do:
        x = torch.zeros(NUMBERS)
        return lambda: dist.all_reduce(x, group=group)

    def reducer(group: Any) -> Do:
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.02)
        x = torch.ones(4, 64)
        return lambda: model(x).sum().backward()

    def row(name: str, make: Callable[[Any], Do], groups: list[Any], backend: str = "gloo") -> Event:
        made = [make(group) for group in groups]
        made[1]()
        before = recorder.ring.entered
        made[1]()
        calls = recorder.ring.entered - before
        return _row("torch", name, backend, _interleave(ctx, plan, made, calls, alone=name.endswith(SILENT)), calls)

    return [
        ("all_reduce", partial(row, f"all_reduce{SILENT}", all_reduce, silent, "")),
        ("all_reduce", partial(row, "all_reduce", all_reduce, gloo)),
        ("DDP", partial(row, "DDP's all_reduce", reducer, gloo)),
    ]


def _pair(ctx: Context, world: Any, folder: Path) -> tuple[Context, Context]:
    """Two contexts on the same connection; the second is recorded."""
    plain, recorded = Context(world), Context(world)
    recorded.observe(Recorder(folder, ctx.rank, ctx.world_size))
    return plain, recorded


def _interleave(
    ctx: Context, plan: RecorderPlan, calls: list[Do], per: int = 1, factor: float = 1, alone: bool = False
) -> list[list[float]]:
    """Seconds of the slowest rank, divided by `per`: [without, with the recorder][trial]. alone: the calls wait for
    nobody, so trials need no common start, and rank 0's are taken.
    """

    def start() -> None:
        if not alone:
            ctx.world.barrier(kind="control")

    def slowest(own: list[float]) -> list[float]:
        return [
            column[0] if alone else max(column) for column in zip(*ctx.all_gather_object(own, tag="times"), strict=True)
        ]

    def nothing() -> None:
        """There is no device to wait for."""

    for _ in range(WARM_UP):
        for call in calls:
            call()
    once = slowest([trials.timed(call, 3, start, nothing) for call in calls])
    each = sum(seconds * trials.repeats(seconds) + 2e-4 for seconds in once)
    count = max(MIN_TRIALS, min(MAX_TRIALS, int(factor * plan.seconds / each)))
    gc.collect()
    gc.disable()
    try:
        times = trials.interleave(calls, count, start=start, finish=nothing, slowest=slowest)
    finally:
        gc.enable()
    return [[seconds / per for seconds in own] for own in times]


def _row(kind: str, what: str, backend: str, times: list[list[float]], calls: int = 1) -> Event:
    """Seconds without and with, in the words of the result. calls: recorded ones, of a rank."""
    plain, recorded = times
    added = [(b - a) * 1e6 for a, b in zip(plain, recorded, strict=True)]
    low, high = trials.median_interval(added)
    row = {
        "of": kind,
        "what": what,
        "backend": backend,
        "trials": len(added),
        "calls": calls,
        "plain_us_median": statistics.median(plain) * 1e6,
        "recorded_us_median": statistics.median(recorded) * 1e6,
        "added_us_median": statistics.median(added),
        "added_us_low": low,
        "added_us_high": high,
    }
    if kind == "step":
        shares = [b / a - 1 for a, b in zip(plain, recorded, strict=True)]
        low, high = trials.median_interval(shares)
        row |= {"share_median": statistics.median(shares), "share_low": low, "share_high": high}
    limit = LIMIT_SHARE if kind == "step" else LIMIT_US
    return row | {"holds": True if high <= limit else False if low > limit else None}
