"""The watchdog over all ranks of a host: sees who makes no progress, who has died and whose calls differ. No torch.

It looks at the rings from outside, so that no loop that holds a rank's GIL can keep it from looking. Progress is that
of sequence numbers: a rank that lives and makes no call makes none. It fires when a call has waited for longer than the
time-out and those it waits for have made no call in that time either: a rank that is only slow goes on now and then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crosscut.watch.autopsy import autopsy
from crosscut.watch.case import Case, began
from crosscut.watch.facts import SCHEMA, VERSION, Facts, Verdict
from crosscut.watch.folder import AUTOPSY, LEDGER, facts_of, look_at, path_of, write_json
from crosscut.watch.lanes import Calls
from crosscut.watch.reading import Ring, RingFile
from crosscut.watch.ring import FAILED, FINISHED, RUNNING, SET_UP

HANG_S, SET_UP_S = {"cpu": 60.0, "cuda": 300.0}, 600.0
POLL_S, MATCH_S = 0.1, 1.0
_GRACE_S = 0.4  # after the first death: who else ended, and with what error
_LEFT_S = 1.0  # others wait for this long for a rank that has ended: it will not come
_STALE_S = 3.0  # a rank may have started this much before the watchdog
_SILENT = 10  # times the time-out: nobody waits, and nobody makes a call
_KEPT = 256  # calls of a lane kept for comparing


@dataclass
class _Seen:
    """One rank as the watchdog knows it."""

    file: RingFile
    entered: int = -1
    progress: float = field(default_factory=time.monotonic)
    matched: int = 0
    ring: Ring | None = None


class Watchdog:
    """Looks at a run folder until all ranks have ended, or something is wrong.

    hang_timeout_s: None takes 60 s on CPUs and 300 s on GPUs. since: rings that are older belong to an earlier run.
    deaths: look for ranks that died, too; False where a launcher sees to it. set_up_s: how long a rank may take to its
    first call where no ring of that rank says so; None takes 600 s, and lets ranks that nobody waits for take longer.
    """

    def __init__(
        self,
        run: Path,
        hang_timeout_s: float | None = None,
        *,
        since: float = 0.0,
        deaths: bool = True,
        set_up_s: float | None = None,
    ) -> None:
        self.run, self._timeout_s, self._since, self._deaths = run, hang_timeout_s, since, deaths
        self._set_up_s, self._in_set_up = set_up_s or SET_UP_S, set_up_s is not None
        self._ranks: dict[int, _Seen] = {}
        self._calls = Calls()
        self._match_at = self._discover_at = 0.0
        self._began = time.time()
        self._oom_before = _oom_kills()
        self.verdict: Verdict | None = None

    def watch(self, stop: Callable[[], bool]) -> Verdict | None:
        """Look every 0.1 s until `stop()`; the verdict if something is wrong, with the autopsy written."""
        while not stop():
            if (found := self.look()) is not None:
                return found
            time.sleep(POLL_S)
        return None

    def over(self) -> bool:
        """Whether every rank that was seen has ended."""
        heads = [seen.ring for seen in self._ranks.values() if seen.ring is not None]
        return bool(heads) and len(heads) >= heads[0].world_size and not any(look_at(ring)[0] for ring in heads)

    def alive(self) -> bool:
        """Whether a rank that was seen still lives."""
        return any(seen.ring is not None and look_at(seen.ring)[0] for seen in self._ranks.values())

    def rings(self) -> dict[int, Ring]:
        """The headers of all ranks."""
        return {rank: seen.file.head() for rank, seen in self._ranks.items()}

    def look(self) -> Verdict | None:
        """One look at everything."""
        now = time.monotonic()
        self._discover(now)
        dead, left = [], []
        for rank, seen in self._ranks.items():
            seen.ring = ring = seen.file.head()
            if ring.entered != seen.entered:
                seen.entered, seen.progress = ring.entered, now
            if ring.ended == FAILED or (ring.ended == RUNNING and not look_at(ring)[0]):
                dead.append(rank)
            elif ring.ended == FINISHED:
                left.append(rank)
        if dead:
            return self._after_a_death() if self._deaths else None
        if now - self._match_at > MATCH_S:
            self._match_at = now
            if self._differs():
                return self._found(self.facts(stacks=True))
        quiet = [now - seen.progress for rank, seen in self._ranks.items() if rank not in left]
        limit = self._limit()
        if quiet and (max(quiet) > limit or (left and max(quiet) > _LEFT_S)):
            return self._hangs(now, limit, left)
        return None

    def _limit(self) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        return max((HANG_S.get(seen.ring.device, 60.0) for seen in self._ranks.values() if seen.ring), default=60.0)

    def _discover(self, now: float) -> None:
        if now < self._discover_at:
            return
        self._discover_at = now + (0.2 if len(self._ranks) < 2 else 1.0)
        for rank in [rank for rank, seen in self._ranks.items() if not seen.file.path.exists()]:
            del self._ranks[rank]  # it was another rank after all
        for path in (self.run / LEDGER).glob("rank-*.ring"):
            with contextlib.suppress(ValueError, OSError):
                inode = path.stat().st_ino
                if any(seen.file.inode == inode for seen in self._ranks.values()):
                    continue
                file = RingFile(path)
                head = file.head()
                started = head.start_wall_ns / 1e9
                # Dead when it is first seen, and older than this watchdog: left by an earlier run.
                if started >= self._since and (started >= self._began - _STALE_S or look_at(head)[0]):
                    self._ranks[head.rank] = _Seen(file)

    def _after_a_death(self) -> Verdict | None:
        time.sleep(_GRACE_S)
        return self._found(self.facts(stacks=False))

    def _differs(self) -> bool:
        """Whether calls that were made since the last look differ between ranks."""
        for rank, seen in self._ranks.items():
            ring = seen.file.read(after=seen.matched)
            seen.matched = ring.records[-1].number if ring.records else seen.matched
            self._calls.add(rank, ring.records)
        found = self._calls.first_divergence()
        for lane in self._calls.collectives.values():
            for seq in sorted(lane)[:-_KEPT]:
                del lane[seq]
        for messages in self._calls.messages.values():
            for seq in [seq for seq, both in messages.items() if len(both) == 2][:-_KEPT]:
                del messages[seq]
        return found is not None

    def _hangs(self, now: float, limit: float, left: list[int]) -> Verdict | None:
        facts = self.facts(stacks=False)
        case = Case(facts, len(facts))
        waits = case.waits()
        quiet = {rank: now - seen.progress for rank, seen in self._ranks.items()}
        for rank in waits:
            awaited = _awaited(rank, waits)
            gone = [other for other in awaited if other in left]
            if gone and quiet[rank] > _LEFT_S:
                return self._found(self.facts(stacks=True))
            allowed = max([limit, *(self._allowed(other, rank) for other in awaited)])
            age = (time.monotonic_ns() - began(waits[rank][0])) / 1e9
            if age > limit and all(quiet.get(other, age) > allowed for other in awaited):
                return self._found(self.facts(stacks=True))
        alive = [rank for rank in self._ranks if rank not in left]
        least = min((quiet[rank] for rank in alive), default=0.0)
        inside = any(not record.is_async or record.waiting for rank in alive for record in case.open.get(rank, []))
        allowed = max([limit, *(self._allowed(rank) for rank in alive)])
        told = self._in_set_up and all(self._section(rank) == SET_UP for rank in alive)
        if alive and least > allowed * (1 if inside or told else _SILENT):
            return self._found(self.facts(stacks=True), silent_s=least)
        return None

    def _section(self, rank: int) -> str | None:
        ring = self._ranks[rank].ring if rank in self._ranks else None
        return None if ring is None else ring.section

    def _allowed(self, rank: int, waiter: int = -1) -> float:
        """How long a rank may go without a call: the limit of the section that it is in. One that has not started to
        record is in its set-up if the one that waits for it is.
        """
        ring = self._ranks[rank].ring if rank in self._ranks else None
        if ring is None:
            return self._set_up_s if self._section(waiter) == SET_UP else 0.0
        return ring.section_limit_s if ring.section else 0.0

    def facts(self, *, stacks: bool) -> dict[int, Facts]:
        """What is known of every rank now. `stacks`: have every rank write its Python stacks first."""
        self._discover_at = 0.0
        self._discover(time.monotonic())
        heads = {rank: seen.file.head() for rank, seen in self._ranks.items()}
        if stacks:
            collect_stacks(self.run, heads)
        out = {}
        for rank, seen in self._ranks.items():
            ring = seen.file.read()
            out[rank] = facts_of(self.run, ring)
            out[rank].oom_killed = out[rank].oom_killed or _oom_kills() > self._oom_before
        return out

    def _found(self, facts: dict[int, Facts], silent_s: float = 0.0) -> Verdict | None:
        size = max((fact.ring.world_size for fact in facts.values() if fact.ring is not None), default=0)
        found = autopsy(facts, size)
        if found.verdict in ("none", "straggler") and silent_s:
            where = "; ".join(f"rank {rank} is at {fact.stack[0]}" for rank, fact in facts.items() if fact.stack)
            found = Verdict(
                "stuck_outside", f"no rank has made a call for {silent_s:.0f} s: {where}", sorted(facts), None, None
            )
        if found.verdict in ("none", "straggler", "desync"):
            return None
        self.verdict = found
        write_autopsy(self.run, found)
        return found


def write_autopsy(run: Path, found: Verdict) -> None:
    """Leave the verdict in the run folder."""
    with contextlib.suppress(OSError):
        (run / f"{AUTOPSY}.txt").write_text("\n".join(found.lines()) + "\n", encoding="utf-8")
        write_json(run / f"{AUTOPSY}.json", {"schema": SCHEMA, "version": VERSION, **found.as_json()})


def collect_stacks(run: Path, rings: Mapping[int, Ring], wait_s: float = 1.0) -> None:
    """Have every rank of this host that lives write its Python stacks: also one that is stuck in C or holds the GIL,
    since the fault handler runs in the signal itself. A stopped rank cannot: /proc tells.
    """
    waiting = {}
    for rank, ring in rings.items():
        alive, state = look_at(ring)
        path = path_of(run, rank, "stack")
        if alive and ring.signal and ring.host == os.uname().nodename and state != "stopped" and path.exists():
            waiting[rank] = (path, path.stat().st_size)
            with contextlib.suppress(OSError):
                os.kill(ring.pid, ring.signal)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and any(path.stat().st_size == size for path, size in waiting.values()):
        time.sleep(0.02)
    if waiting:
        time.sleep(0.05)  # the last one may still write


def end_ranks(run: Path, rings: Mapping[int, Ring]) -> None:
    """End the ranks of this host: with exit code 3 where a rank can still hear it, else by SIGKILL."""
    own = [ring for ring in rings.values() if ring.host == os.uname().nodename and look_at(ring)[0]]
    for ring in own:
        pipe = path_of(run, ring.rank, "stop")
        with contextlib.suppress(OSError):
            handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(handle, b"3")
            os.close(handle)
    heard = any(path_of(run, ring.rank, "stop").exists() for ring in own)
    ending = any(ring.ended == FAILED for ring in own)  # by its exception: with its own exit code, if it is let
    deadline = time.monotonic() + (1.5 if ending else 0.5 if heard else 0.0)
    while time.monotonic() < deadline and any(look_at(ring)[0] for ring in own):
        time.sleep(0.02)
    for ring in own:
        if look_at(ring)[0]:
            with contextlib.suppress(OSError):
                os.kill(ring.pid, signal.SIGKILL)


def _awaited(rank: int, waits: Mapping[int, tuple[object, list[int]]]) -> set[int]:
    """Whom a rank waits for, directly or through others."""
    found: set[int] = set()
    left = list(waits[rank][1])
    while left:
        other = left.pop()
        if other not in found and other != rank:
            found.add(other)
            left += waits[other][1] if other in waits else []
    return found


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since the start."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
