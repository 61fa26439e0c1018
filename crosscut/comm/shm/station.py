"""The part of a process that waits: progress of all its groups, a short spin, then sleep.

There is no helper thread: calls go on while somebody issues one or waits for one. `wait` runs every call under way, in
every group, as far as it can go, so that a rank that waits for one call still does its part in all others. If nothing
moves it spins briefly (giving the core away between looks), then sleeps:

    this rank                        a peer
    ASLEEP = ANYTHING                POSTED = k + 1        (or DONE, SENT, TAKEN)
    fence                            fence
    look once more                   if ASLEEP: ASLEEP = 0, wake
    futex wait while ASLEEP

Whoever comes second sees what the other has written. The sleep also ends by itself every 50 ms, to look whether the
awaited peers live and whether the time-out is over.

One `Station` a process: a thread can sleep on one word only, so all groups of a process share it. It holds no group's
state, and it goes when the last group does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from crosscut.comm.shm import futex
from crosscut.comm.shm.layout import ANYTHING, ASLEEP, EXACTLY
from crosscut.comm.shm.peers import Page, Peers

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Operation

_SLEEP_S = 0.05
_LOOKS = 8  # between looks at the clock
_SPIN_S, _SPIN_MIN_S = 200e-6, 2e-6
_PROBE = 16
_SHORT_LOOKS = 1000


class Station:
    """Progress and waiting for all groups of this process. Threads may use it at the same time."""

    def __init__(self) -> None:
        self.page = Page()
        self.peers = Peers()
        self.lock = threading.RLock()
        self.active: list[Channel] = []  # channels with calls under way
        self.channels: set[Channel] = set()
        self.crowded = False  # more ranks than cores: spinning would take the core from whom one waits for
        self._sleepers = 0
        self._spin_s = _SPIN_S
        self.looks = self.max_looks = _SHORT_LOOKS  # how often a short call looks before it is queued
        self._waits = 0
        self._cores = len(os.sched_getaffinity(0))

    def join(self, channel: Channel) -> None:
        """A group is there."""
        with self.lock:
            self.channels.add(channel)
            pids = {peer.pid for one in self.channels for peer in one.peers}
            self.crowded = len(pids) > self._cores
            self.looks = self.max_looks = 2 if self.crowded else _SHORT_LOOKS

    def leave(self, channel: Channel) -> None:
        """A group is gone."""
        with self.lock:
            self.channels.discard(channel)
            if channel in self.active:
                self.active.remove(channel)

    def progress(self) -> bool:
        """Run every call as far as it goes; whether anything moved. The lock is held."""
        moved = False
        for channel in self.active if len(self.active) == 1 else tuple(self.active):
            before = channel.moves
            channel.advance()
            moved |= channel.moves != before
        return moved

    def wait(self, operation: Operation) -> None:
        """Return when the call is finished. Raises its error; StuckError if its group stands still for its time-out."""
        with self.lock:
            while not operation.finished:
                if self._spin(operation):
                    continue
                self._sleep(operation)
        if operation.error is not None:
            raise operation.error

    def wait_for(self, over: Callable[[], bool]) -> None:
        """Go on with the calls under way until `over()`: for calls of another back end."""
        pause_s = 0.0
        while not over():
            with self.lock:
                moved = self.progress()
            pause_s = 0.0 if moved else min(0.001, pause_s + 20e-6)
            time.sleep(pause_s)

    def _spin(self, operation: Operation) -> bool:
        """Look again and again for a short while. True if something moved.

        How long adapts: spinning that has led to nothing is halved, since then the peers are busy, or want this core;
        now and then it is tried in full.
        """
        for _ in range(2 if self.crowded else _LOOKS):
            if self.progress() or operation.finished:
                return True
        if self.crowded:
            return False
        self._waits += 1
        limit = _SPIN_S if self._waits % _PROBE == 0 else self._spin_s
        end = time.perf_counter() + limit
        while time.perf_counter() < end:
            for _ in range(_LOOKS):
                if self.progress() or operation.finished:
                    self._spin_s = _SPIN_S
                    return True
        self._spin_s = max(_SPIN_MIN_S, limit / 2)
        return False

    def looked_in_vain(self) -> None:
        """A short call has looked for its peers and goes to sleep: let the next one look less, as in `_spin`."""
        self._waits += 1
        self.looks = self.max_looks if self._waits % _PROBE == 0 else max(2, self.looks // 2)

    def _sleep(self, operation: Operation) -> None:
        """Sleep until something moves. Every now and then look whether it still can."""
        words, address, channel = self.page.words, self.page.address, operation.channel
        while True:
            exact = not self._sleepers and len(self.active) == 1 and self.active[0].tell_need()
            asleep = words[ASLEEP] = EXACTLY if exact else ANYTHING
            futex.fence()
            if self.progress() or operation.finished:
                self._awake(channel)
                return
            if channel.moves != operation.moves:
                operation.moves, operation.since = channel.moves, time.monotonic()
            left = operation.timeout_s - (time.monotonic() - operation.since)
            self._sleepers += 1
            self.lock.release()
            try:
                futex.wait(address, asleep, max(0.001, min(_SLEEP_S, left)))
            finally:
                self.lock.acquire()
                self._sleepers -= 1
                self._awake(channel)
            if self.progress() or operation.finished:
                return
            waited = time.monotonic() - operation.since
            channel.check(operation, operation.timeout_s if waited > operation.timeout_s else None)

    def _awake(self, channel: Channel) -> None:
        if not self._sleepers:
            self.page.words[ASLEEP] = 0
            channel.forget_need()

    def wake_threads(self) -> None:
        """Another thread of this process may sleep for what has just finished."""
        if self._sleepers:
            self.page.words[ASLEEP] = 0
            futex.wake(self.page.address)


_stations: dict[int, Station] = {}  # by process id: a forked child must not use its parent's


def station() -> Station:
    """The station of this process."""
    pid = os.getpid()
    if pid not in _stations:
        _stations.clear()
        _stations[pid] = Station()
    return _stations[pid]


def close_if_idle(one: Station) -> None:
    """Let go of the station when its last group is gone."""
    if not one.channels and _stations.get(os.getpid()) is one:
        del _stations[os.getpid()]
        one.page.close()
