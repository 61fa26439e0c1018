"""The baton: of the ranks that are threads of one process, exactly one runs at a time.

A rank keeps the baton until it waits for something that is not there yet; then the next rank that can go on, in rank
order, gets it. So a run is deterministic, and the moment nobody can go on is a deadlock, found at once: no time-out.
The random state is swapped at each hand-over. No torch collectives here: only who may run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from crosscut.comm.backends.rng import RandomState
from crosscut.comm.errors import DeadlockError, PeerError, one_line
from crosscut.comm.wording import waits_text

NOT_STARTED, RUNNABLE, WAITING, RETURNED, FAILED = "not started", "runnable", "waiting", "returned", "failed"


class Baton:
    """Lockstep for `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.finished = threading.Event()  # every rank has returned or failed
        self.failure: tuple[int, BaseException] | None = None  # the first; rank -1: from outside
        self.holder = 0
        self.held_since = time.monotonic()
        self._lock = threading.Lock()
        self._turn = [threading.Condition(self._lock) for _ in range(size)]
        self._state = [NOT_STARTED] * size
        self._ready: list[Callable[[], bool]] = [_always] * size
        self._waits: list[Callable[[], str]] = [str] * size
        self._error: list[BaseException | None] = [None] * size
        self.launcher_random = RandomState()
        self._random = [RandomState() for _ in range(size)]  # every rank starts from the launcher's state

    def start(self, rank: int) -> None:
        """First thing in a rank's thread: wait for the first turn."""
        with self._lock:
            while self.holder != rank:
                self._turn[rank].wait()
            self._resume(rank)

    def wait_until(self, rank: int, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Hand the baton on until `ready()`; `describe` says for what, if there is a deadlock.

        Raises PeerError once a rank has failed, and DeadlockError when no rank can go on.
        """
        with self._lock:
            self._raise_if_failed()
            if ready():
                return
            self._state[rank], self._ready[rank], self._waits[rank] = WAITING, ready, describe
            self._random[rank].save()
            self._pass_on(rank)
            while self.holder != rank:
                self._turn[rank].wait()
            self._resume(rank)
            error, self._error[rank] = self._error[rank], None
            if error is not None:
                raise error
            if not ready():
                self._raise_if_failed()

    def let_others_run(self, rank: int) -> None:
        """Hand the baton round once: for a rank that polls."""
        turns = iter((False, True))
        self.wait_until(rank, lambda: next(turns, True), lambda: "a poll")

    def finish(self, rank: int, error: BaseException | None = None) -> None:
        """Last thing in a rank's thread."""
        with self._lock:
            self._state[rank] = RETURNED if error is None else FAILED
            if error is not None and self.failure is None:
                self.failure = (rank, error)
            self._random[rank].save()
            self._pass_on(rank)

    def fail(self, error: BaseException) -> None:
        """From outside (Ctrl-C, a time-out): stop the ranks as they come to their next wait."""
        with self._lock:
            if self.failure is None:
                self.failure = (-1, error)

    def unfinished(self) -> list[int]:
        """The ranks that have neither returned nor failed."""
        return [rank for rank in range(self.size) if self._state[rank] not in (RETURNED, FAILED)]

    # All below: with the lock held.

    def _resume(self, rank: int) -> None:
        self._state[rank] = RUNNABLE
        self._random[rank].load()
        self.held_since = time.monotonic()

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            rank, error = self.failure
            who = "the world was stopped" if rank < 0 else f"rank {rank} failed"
            raise PeerError(f"stopped because {who}: {one_line(error)}")

    def _pass_on(self, rank: int) -> None:
        """Give the baton to the next rank, after `rank` in the round, that can go on."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        alive = [r for r in order if self._state[r] not in (RETURNED, FAILED)]
        if not alive:
            self.finished.set()
            return
        able = (r for r in alive if self.failure is not None or self._state[r] != WAITING or self._ready[r]())
        chosen = next(able, None)
        if chosen is None:
            self._deadlock(alive)
            chosen = min(alive)
        self.holder = chosen
        self._turn[chosen].notify()

    def _deadlock(self, alive: list[int]) -> None:
        """Every rank that is left waits: one error for all of them, which says for what each waits."""
        lines = []
        for rank in range(self.size):
            state = self._state[rank]
            lines.append(waits_text([rank], self._waits[rank]()) if state == WAITING else f"rank {rank} has {state}")
        text = "deadlock: no rank can go on: " + "; ".join(lines)
        for rank in alive:
            self._error[rank] = DeadlockError(text)
            self._ready[rank] = _always


def _always() -> bool:
    return True
