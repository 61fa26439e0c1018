"""The recorder of one rank of `crosscut train`, and the monitor where no other process watches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.comm.errors import RankError
from crosscut.watch.autopsy import autopsy
from crosscut.watch.facts import Verdict
from crosscut.watch.recorder import Recorder, obey, record_context
from crosscut.watch.watchdog import Watchdog, end_ranks, write_autopsy

if TYPE_CHECKING:
    from crosscut.comm.context import Context


class HungError(RuntimeError):
    """A rank hung: the verdict of the watchdog, one line."""

    exit_code = 3


class HostWatch:
    """The watchdog as a thread of the process that started the ranks: a context manager around their run. When it finds
    something it ends the ranks, and the block ends with `HungError`. Ranks that die are the launcher's to see.
    """

    def __init__(self, run: Path, hang_timeout_s: float | None, *, active: bool) -> None:
        self._dog = Watchdog(run, hang_timeout_s, since=time.time(), deaths=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if active else None

    def __enter__(self) -> HostWatch:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(5)
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


def record_run(ctx: Context, run: Path, monitored: bool, hang_timeout_s: float | None) -> Recorder | None:
    """Record this rank in `run`. `monitored`: the process that started the ranks watches them; else the first rank of
    each host starts a monitor. A world of one rank makes no calls and is not recorded.
    """
    if ctx.world_size == 1:
        return None
    recorder = Recorder(run, ctx.rank, ctx.world_size, ctx.device.type)
    record_context(ctx, recorder)
    if ctx.backend == "threads":  # one process: a deadlock is found at once, and a signal would be everybody's
        return recorder
    recorder.hook_process()
    if not monitored:
        obey(recorder)
        if ctx.local_rank == 0:
            words = [str(run), str(hang_timeout_s or 0), str(os.getpid())]
            subprocess.Popen([sys.executable, "-m", "crosscut.watch.monitor", *words], start_new_session=True)
    return recorder
