"""Start the ranks, follow what they say, and keep what they have measured, however it ends."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.bench.plan import Plan
from crosscut.bench.ranks import rank_main
from crosscut.comm.launch import spawn
from crosscut.comm.shm import platform

Event = dict[str, Any]
_POLL_S = 0.1
# How an event's kind is called in the result.
_TABLES = {"row": "rows", "ratio": "ratios", "copy": "copy_limit", "pair": "matrix"}


@dataclass
class Measured:
    """What was measured: tables of plain values. `error`: what ended the run early, if anything did."""

    plan: Plan
    rows: list[Event] = field(default_factory=list)
    ratios: list[Event] = field(default_factory=list)
    copy_limit: list[Event] = field(default_factory=list)
    matrix: list[Event] = field(default_factory=list)
    machine: Event = field(default_factory=dict)
    error: BaseException | None = None

    def add(self, event: Event) -> None:
        """Take in what rank 0 said."""
        kind, values = event["kind"], {key: value for key, value in event.items() if key != "kind"}
        if kind == "machine":
            self.machine = values
        elif kind in _TABLES:
            getattr(self, _TABLES[kind]).append(values)

    @property
    def is_correct(self) -> bool:
        """Every result equalled its definition."""
        return all(row["correct"] for row in self.rows)


def measure(plan: Plan, on_event: Callable[[Event], None] = lambda event: None) -> Measured:
    """Measure everything, world by world. Never raises for what ends the ranks: Ctrl-C, SIGTERM, a rank that fails and
    a time-out end up in `error`, and what was measured until then stays.

    on_event: called from another thread with each event, for a progress bar.
    """
    result = Measured(plan)

    def take(event: Event) -> None:
        result.add(event)
        on_event(event)

    with tempfile.TemporaryDirectory(prefix="crosscut-bench-") as folder:
        for world in plan.worlds():
            path = Path(folder) / f"{world[0]}.jsonl"
            path.touch()
            try:
                with following(path, take), _torch_threads(), sigterm():
                    backend = "threads" if world == ("threads",) else "gloo"
                    with_shm = backend != "threads" and platform.why_not() is None
                    size, check = plan.world_size, None if backend == "threads" else False
                    spawn(rank_main, plan, world, with_shm, str(path), world_size=size, backend=backend, check=check)
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                result.error = error
                break
    return result


@contextlib.contextmanager
def following(path: Path, take: Callable[[Event], None]) -> Iterator[None]:
    """Hand on each whole line of a file that grows; at the end, what is left of it."""
    stop = threading.Event()

    def follow() -> None:
        with path.open(encoding="utf-8") as file:
            line = ""
            while True:
                ended = stop.is_set()  # before reading: then what is read is all there will be
                while part := file.readline():
                    line += part
                    if line.endswith("\n"):
                        take(json.loads(line))
                        line = ""
                if ended:
                    return
                stop.wait(_POLL_S)

    thread = threading.Thread(target=follow, name="crosscut-bench-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def sigterm() -> Iterator[None]:
    """SIGTERM as SystemExit(143), so that it, too, leaves what was measured and no folder behind."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _torch_threads() -> Iterator[None]:
    """Ranks that are threads set the number of torch's threads for this whole process: put it back."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
