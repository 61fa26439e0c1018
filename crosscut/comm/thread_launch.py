"""Start a world whose ranks are threads of this process."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from crosscut.comm.backends.thread_state import ThreadState
from crosscut.comm.backends.threads import ThreadRank, ThreadWorld
from crosscut.comm.context import Context
from crosscut.comm.errors import CommError, DeadlockError, MismatchError, PeerError, StuckError, one_line, rank_error
from crosscut.comm.site import short_path

_POLL_S = 0.2  # how often the launcher looks for a stuck rank; a finished world wakes it at once
_GRACE_S = 2.0  # how long stopped ranks get to end
_OUTER = ("_bootstrap", "_bootstrap_inner", "run", "rank_main")
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugger.py", "ipdb", "pudb")


class _Stopped(BaseException):
    """Raised inside a rank's running code by Ctrl-C or a time-out."""


def run_threads(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    size: int,
    timeout_s: float,
    why: str,
    check: str,
) -> list[Any]:
    """`fn(ctx, *args, **kwargs)` on `size` ranks; their values in rank order, or the first real error."""
    import torch

    world = ThreadWorld(size)
    baton, modes = world.baton, ThreadState()
    values: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}
    failed_at = [0.0]

    def rank_main(rank: int) -> None:
        error: BaseException | None = None
        baton.start(rank)
        ctx = Context(
            ThreadRank(world, rank),
            backend_why=why,
            threads=torch.get_num_threads(),
            threads_why="rank threads run one at a time and share torch's threads",
            check_why=check,
        )
        try:
            with modes.entered():
                values[rank] = fn(ctx, *args, **kwargs)
                ctx.close()
        except BaseException as raised:
            error = errors[rank] = raised
            failed_at[0] = failed_at[0] or time.monotonic()
            ctx.close(failed=True)
        baton.finish(rank, error)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"crosscut-rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    before = baton.launcher_random
    try:
        for thread in threads:
            thread.start()
        _watch(world, threads, timeout_s)
        for thread in threads:
            thread.join()
    except BaseException as outside:  # Ctrl-C, or a stuck rank
        baton.fail(outside)
        _interrupt(threads[baton.holder])
        baton.finished.wait(_GRACE_S)
        raise
    finally:
        before.load()
    if errors:
        _raise_first(world, errors, failed_at[0])
    if world.leftover():
        raise CommError(f"every rank has returned, but {world.leftover()}; receive every message that is sent")
    return values


def _watch(world: ThreadWorld, threads: list[threading.Thread], timeout_s: float) -> None:
    """Wait until all ranks are done; raise StuckError when one holds the baton for `timeout_s`."""
    baton = world.baton
    while not baton.finished.wait(min(_POLL_S, timeout_s)):
        holder, since = baton.holder, baton.held_since
        if time.monotonic() - since < timeout_s:
            continue
        frame = sys._current_frames().get(threads[holder].ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        if any(part.filename.endswith(_DEBUGGERS) for part in stack):
            baton.held_since = time.monotonic()  # somebody is looking at it
            continue
        shown = " > ".join(
            f"{short_path(part.filename)}:{part.lineno} in {part.name}" for part in stack if part.name not in _OUTER
        )
        error = StuckError(
            f"rank {holder} of {world.size} has been outside any collective for {timeout_s:g} s while the others "
            f"wait; it is at: {shown}. If it is only slow, raise timeout_s"
        )
        error.add_note("".join(stack.format()))
        raise error


def _interrupt(thread: threading.Thread) -> None:
    """Ask Python to raise in the thread at its next line. A thread inside a C call ends when that returns."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))


def _raise_first(world: ThreadWorld, errors: dict[int, BaseException], failed_at: float) -> None:
    """Raise the first real error. A mismatch or a deadlock is about several ranks and names them: raised as it is."""
    first, error = next(((r, e) for r, e in errors.items() if not isinstance(e, PeerError)), next(iter(errors.items())))
    folded = {rank: one_line(other) for rank, other in errors.items() if rank != first}
    if isinstance(error, (DeadlockError, MismatchError)):
        raise error
    stopped = sorted(rank for rank, other in errors.items() if isinstance(other, PeerError))
    text = "".join(traceback.format_exception(error))
    raise rank_error(
        error,
        rank=first,
        world_size=world.size,
        stopped=stopped,
        seconds=time.monotonic() - failed_at,
        traceback_text=text,
        folded=folded,
    ) from error
