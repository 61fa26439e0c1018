"""The recorder of one rank of `crosscut train`, and the monitor where no other process watches."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.comm.errors import RankError
from crosscut.watch import program
from crosscut.watch.autopsy import autopsy
from crosscut.watch.facts import Verdict
from crosscut.watch.folder import path_of
from crosscut.watch.recorder import Recorder, obey
from crosscut.watch.ring import SET_UP
from crosscut.watch.watchdog import Watchdog, end_ranks, write_autopsy

if TYPE_CHECKING:
    from crosscut.comm.context import Context


class HungError(RuntimeError):
    """A rank hung: the verdict of the watchdog, one line."""

    exit_code = 3


class HostWatch:
    """The watchdog as a thread of the process that starts the ranks: a context manager around their run. Ranks that are
    started in it record in `run`, from before they meet. When it finds something it ends the ranks, and the block ends
    with `HungError`. Ranks that die are the launcher's to see.
    """

    def __init__(self, run: Path, hang_timeout_s: float | None, set_up_s: float, *, active: bool) -> None:
        self._dog = Watchdog(run, hang_timeout_s, since=time.time(), deaths=False, set_up_s=set_up_s)
        self._set_up_s = set_up_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if active else None
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> HostWatch:
        if self._thread is not None:
            self._undo = program.record_started(self._dog.run, self._set_up_s)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._undo()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(5)
            for rank in self._dog.rings():
                path_of(self._dog.run, rank, "stop").unlink(missing_ok=True)
        found = self._dog.verdict
        if found is not None and isinstance(error, RuntimeError):
            print("\n".join(found.lines()[1:]), file=sys.stderr)
            raise HungError(found.text) from error

    def _watch(self) -> None:
        if self._dog.watch(self._ended.is_set) is not None:
            end_ranks(self._dog.run, self._dog.rings())

    def explain(self, error: BaseException) -> None:
        """Leave word of a rank's failure, as the launcher saw it, for `crosscut why`."""
        if isinstance(error, RankError) and self._dog.verdict is None:
            found = autopsy(self._dog.facts(stacks=False), error.world_size)
            if error.rank not in found.culprits:
                kind = "exception" if error.traceback_text else "dead_rank"
                found = Verdict(kind, str(error), [error.rank], evidence=found.evidence)
            elif found.verdict == "dead_rank":  # the launcher knows the signal
                found.text, found.evidence = str(error), [found.text, *found.evidence]
            write_autopsy(self._dog.run, found)


def record_run(ctx: Context, run: Path, limits: tuple[float | None, float]) -> Recorder | None:
    """The recorder of this rank, in `run` unless it records elsewhere already (`python -m crosscut.watch`).

    The rank is in its set-up until the caller ends that. A world of one rank makes no calls and is not recorded.
    limits: seconds without progress, and the same for the set-up.
    """
    if ctx.world_size == 1:
        return None
    recorder = None if ctx.backend == "threads" else program.adopt(ctx.rank, ctx.world_size)
    if recorder is None:
        recorder = Recorder(run, ctx.rank, ctx.world_size, ctx.device.type)
        ctx.observe(recorder)
        if ctx.backend != "threads":  # whose ranks are one process: a signal would be everybody's
            recorder.hook_process()
            obey(recorder)
            if ctx.local_rank == 0:  # ranks of several hosts, which have agreed on a folder only now
                program.start_monitor(run, limits[0])
    recorder.complete = recorder.ring.complete  # its calls do not end the set-up
    recorder.ring.section(SET_UP, limits[1])
    return recorder
