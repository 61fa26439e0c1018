"""The recorder inside a rank: every call into its ring, every exception and stack into the run folder.

`install()` is for programs of any kind: from the next `init_process_group` on, all calls of all process groups are
recorded, those of DDP's reducer, of FSDP, of DTensor and of functional collectives included. Given to
`Context.observe`, a recorder sees the calls of crosscut's groups, on every back end, with tags and axis names.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from crosscut.comm.errors import one_line
from crosscut.comm.observe import MAX_FORMS
from crosscut.comm.site import short_path
from crosscut.watch.folder import path_of, write_json
from crosscut.watch.ring import RingWriter

if TYPE_CHECKING:
    from crosscut.comm.call import Call
    from crosscut.comm.intercept import Asked, InterceptedGroup, Running

RUN = "CROSSCUT_WATCH_RUN"  # the run folder, for the ranks that a watched process starts
SET_UP_S = 600.0  # until the first call is done: building models, reading data, meeting the other ranks
STACK_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # users have plans for the others
HANG = 3
_AROUND = ("runpy", f"crosscut{os.sep}watch{os.sep}")  # frames around the program
_SOURCE = re.compile(r"\[[^\]]*\.(cc|cpp):\d+\]\s*")  # torch's errors begin with a line of its own source


class Recorder:
    """One rank's recorder: an `Observer` of `crosscut.comm.observe` that writes to a ring."""

    def __init__(self, run: Path, rank: int, world_size: int, device: str = "cpu") -> None:
        self.run, self.rank = run, rank
        for kind in ("error", "end", "stack"):
            path_of(run, rank, kind).unlink(missing_ok=True)
        ring = self.ring = RingWriter(
            path_of(run, rank, "ring"), rank, world_size, signal=int(STACK_SIGNAL), device=device
        )
        self.ring.section("set-up", SET_UP_S)
        self.lane, self.mark, self.begin, self.waits = ring.lane, ring.mark, ring.begin, ring.waits
        self.enter = ring.enter  # of calls that come once
        self.complete: Callable[[int], None] = self._first_complete  # record that a call is done

    def _first_complete(self, number: int) -> None:
        """The first call that is done ends the set-up."""
        self.ring.complete(number)
        self.ring.section("")
        self.complete = self.ring.complete

    def hook_process(self) -> None:
        """Write down what ends this process: exceptions, crashes, and Python's stacks whenever the signal comes."""
        self._stacks = path_of(self.run, self.rank, "stack").open("w")  # open as long as the process lives
        faulthandler.enable(self._stacks, all_threads=False)
        if hasattr(faulthandler, "register"):
            faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        before = sys.excepthook

        def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.failed(error)
            before(kind, error, trace)

        sys.excepthook = on_error

    def failed(self, error: BaseException) -> None:
        """Write down the exception that ends this rank."""
        frames = traceback.extract_tb(error.__traceback__)
        outside = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename] or list(frames)
        site = f"{short_path(outside[-1].filename)}:{outside[-1].lineno}" if outside else ""
        told = traceback.TracebackException.from_exception(error)
        told.stack[:] = [frame for frame in told.stack if not any(part in frame.filename for part in _AROUND)]
        text = "".join(told.format())
        body = {
            "pid": os.getpid(),
            "line": _SOURCE.sub("", one_line(error)),
            "site": site,
            "time_s": time.time(),
            "traceback": text,
        }
        with contextlib.suppress(OSError):  # the disk may be full: then the ring has to do
            write_json(path_of(self.run, self.rank, "error"), {**body, "in_call": self.ring.inside()})
        code = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else 1
        self.ring.end(code if isinstance(code, int) else 1)

    @contextlib.contextmanager
    def section(self, name: str, limit_s: float) -> Iterator[None]:
        """A part of the program that may go without a call for `limit_s`."""
        self.ring.section(name, limit_s)
        try:
            yield
        finally:
            self.ring.section("")

    def step(self, *_: Any) -> None:
        """One optimizer step more."""
        self.ring.step += 1


def obey(recorder: Recorder) -> None:
    """Let this rank end with exit code 3 when its monitor says so."""

    def listen(pipe: int) -> None:
        os.read(pipe, 1)
        os._exit(HANG)

    with contextlib.suppress(OSError, AttributeError):  # a disk or a system without pipes: then SIGKILL has to do
        path = path_of(recorder.run, recorder.rank, "stop")
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        threading.Thread(target=listen, args=(os.open(path, os.O_RDWR),), daemon=True).start()


class Observer:
    """What an intercepted process group tells (`crosscut.comm.intercept`), written to a ring."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._marks: dict[tuple[Any, ...], Any] = {}

    def on_call(self, group: InterceptedGroup, asked: Asked) -> Running:
        """Record the call, then let it be made."""
        call = asked.call
        key = (group, call[:5], call[6:])  # all but the number
        number = self._recorder.begin(self._marks.get(key) or self._mark(group, call, key), call.seq)
        return _Recorded(self._recorder, number, asked.start())

    def _mark(self, group: InterceptedGroup, call: Call, key: tuple[Any, ...]) -> Any:
        if len(self._marks) >= MAX_FORMS:  # shapes that change for ever
            self._marks.clear()
        name, recorder = group.group_name, self._recorder  # the name is the same on all ranks of the group
        lane = recorder.lane(group.label, group.ranks, zlib.crc32(name.encode()) & 0xFFFF)
        tag = int(call.tag or 0)  # torch's, of a message
        self._marks[key] = mark = recorder.mark(lane, call, _num_bytes(call, len(group.ranks)), True, tag)
        return mark

    def on_done(self, group: InterceptedGroup, call: Call, error: BaseException | None) -> None:
        """Nothing: the running call has been recorded by then."""

    def on_close(self, group: InterceptedGroup) -> None:
        """Let go of the group."""
        self._marks.clear()


class _Recorded:
    """A call of a process group under way: a `Running` of `crosscut.comm.intercept`."""

    __slots__ = ("_number", "_open", "_recorder", "work")

    def __init__(self, recorder: Recorder, number: int, work: Any) -> None:
        self._recorder, self._number, self.work, self._open = recorder, number, work, True

    def wait(self, timeout_s: float | None = None) -> None:
        if self._open:
            self._recorder.waits(self._number)
        if timeout_s is None:
            if self.work is not None:
                self.work.wait()
        else:
            self.work.wait(datetime.timedelta(seconds=timeout_s))
        self._finished()

    def done(self) -> bool:
        over = self.work is None or bool(self.work.is_completed())
        if over:
            self._finished()
        return over

    def _finished(self) -> None:
        if self._open:
            self._open = False
            self._recorder.complete(self._number)


def _num_bytes(call: Call, size: int) -> int:
    """What one rank hands to the call, from what is known of it: shapes may be several, of a coalesced call."""
    import torch

    shape: Any = call.shape
    shapes = shape if shape and isinstance(shape[0], tuple) else (shape,)
    dtype = getattr(torch, call.dtype.partition(",")[0], None)
    if not isinstance(dtype, torch.dtype) or call.op in ("recv", "barrier"):
        return 0
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize * (size if call.op == "all_gather" else 1)
