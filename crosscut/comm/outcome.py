"""How the ranks of a world ended, and which error to show for it: the first real one. No torch."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from dataclasses import dataclass
from typing import Any

from crosscut.comm.errors import PeerError, one_line, rank_error, ranks_text


@dataclass(frozen=True)
class Failure:
    """How a rank failed, as it says itself."""

    line: str  # "ValueError: what it says"
    traceback_text: str
    is_peer: bool  # stopped by another rank's failure
    is_value_error: bool
    time_s: float  # on the clock that all processes of a host share
    error: BaseException | None  # where it can be pickled


def describe_failure(error: BaseException) -> Failure:
    """What is told of an exception, with the exception itself if it can be pickled."""
    carried: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        carried = None
    return Failure(
        line=one_line(error),
        traceback_text="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        is_peer=isinstance(error, PeerError),
        is_value_error=isinstance(error, ValueError),
        time_s=time.monotonic(),
        error=carried,
    )


@dataclass
class End:
    """What is known of one rank's end. Nothing set: it was stopped, or left with exit code 0."""

    returned: bool = False
    value: Any = None
    failure: Failure | None = None  # what it says itself
    exit_code: int | None = None  # of a process that ended without a word; below 0: by that signal
    pid: int | None = None
    started: bool = True  # its function began


def settle(ends: list[End], ended: float) -> list[Any]:
    """The ranks' values, in rank order; or raise `RankError` for the first real error, the others folded.

    `ended`: when the world ended (`time.monotonic`).
    """
    if all(end.returned for end in ends):
        return [end.value for end in ends]
    failures = {rank: end.failure for rank, end in enumerate(ends) if end.failure is not None}
    real = sorted((failure.time_s, rank) for rank, failure in failures.items() if not failure.is_peer)
    died = [rank for rank, end in enumerate(ends) if end.failure is None and end.exit_code is not None]
    silent = [rank for rank, end in enumerate(ends) if not end.returned and rank not in failures]
    first = real[0][1] if real else died[0] if died else silent[0] if silent else min(failures)
    failure = failures.get(first)
    told: Any
    returned = [rank for rank, end in enumerate(ends) if end.returned]
    if failure is not None and failure.is_peer and returned:
        told = f"raised {failure.line}; {ranks_text(returned)} had returned by then: look there for a call too few"
    elif failure is not None:
        told = failure.error if failure.error is not None else f"raised {failure.line}"
    else:
        told = _how_it_ended(ends[first], [rank for rank in silent if rank != first])
    began = failure.time_s if failure is not None else ended
    text = "" if failure is None else failure.traceback_text
    error = rank_error(
        told,
        rank=first,
        world_size=len(ends),
        stopped=[rank for rank, end in enumerate(ends) if rank != first and not end.returned],
        seconds=max(0.0, time.monotonic() - began),
        traceback_text=text,
        folded={rank: other.line for rank, other in failures.items() if rank != first},
        is_value_error=failure is not None and failure.is_value_error,
    )
    if text:
        error.__cause__ = _RemoteTraceback(text)
    raise error


def _how_it_ended(end: End, others: list[int]) -> str:
    """A sentence about a process that could not say itself why it ended."""
    pid = f"(pid {end.pid}) " if end.pid is not None else ""
    if end.exit_code is None:
        also = f" (or one of ranks {','.join(map(str, others))})" if others else ""
        return f"{pid}ended with exit code 0 but without returning{also}; look for os._exit() in it"
    if end.exit_code < 0:
        try:
            name = signal.Signals(-end.exit_code).name
        except ValueError:
            name = f"signal {-end.exit_code}"
        hint = {"SIGKILL": " (out of memory?)", "SIGSEGV": " (a crash in native code)"}.get(name, "")
        return f"{pid}was killed by {name}{hint}"
    if not end.started:
        return (
            f"{pid}ended with exit code {end.exit_code} before its function began; its output says why (is spawn "
            f"called under if __name__ == '__main__'?)"
        )
    return f"{pid}ended with exit code {end.exit_code} without returning"


class _RemoteTraceback(Exception):  # shown as the cause, as multiprocessing does
    """The traceback of another process, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])
