"""The part of a rank that waits: for the other ranks' calls, and for the calls themselves.

There is no helper thread. Inside every checked call and every wait this rank takes in what the others have said, in all
groups, and starts what has been agreed; so a rank that waits for one call still does its part in all others.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from crosscut.comm.call import END, Call
from crosscut.comm.checked.post import Frame, Post
from crosscut.comm.checked.room import ASK, CALL, MAIL, TOLD, Room, decode
from crosscut.comm.checked.ticket import NoData, Ticket
from crosscut.comm.errors import CommError, PeerError, StuckError, ranks_text

_SPIN_S = 200e-6  # a rank that is a little late is waited for awake, giving the core away between looks
_SLEEP_S = 0.02  # what others say wakes a rank; their end and the time-out are looked for this often
_POLL_S = 0.001  # while a call is under way whose end wakes nobody
_LOOK_S = 0.2  # after which one looks whether those who do not come are alive
_ASK_S = 0.3  # how long the others get to say where they are


class Checker:
    """Checked mode of one rank of a world of processes. Collective to make. store: of torch's, shared by all ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.lock = threading.RLock()
        self.post = Post(store, rank, size, timeout_s, self._take)
        self._rooms: dict[int, Room] = {}
        self._early: dict[int, list[Frame]] = {}  # for groups that this rank has not made yet
        self._under_way: list[Ticket] = []  # started and perhaps not done: some move only when they are asked
        self._last: dict[int, tuple[int, Call | Frame]] = {}  # by rank: its count of calls, and the last that is known
        self._waiting: dict[int, Ticket] = {}  # by thread
        self._told: dict[int, dict[str, Any]] = {}

    def room(self, name: str, label: str, ranks: Sequence[int], timeout_s: float | None = None) -> Room:
        """The room of a group. `name`: equal on all its ranks, and different for every group."""
        with self.lock:
            room = Room(self, name, label, ranks, self.timeout_s if timeout_s is None else timeout_s)
            self._rooms[room.key] = room
            for frame in self._early.pop(room.key, ()):
                room.take(frame)
            return room

    def leave(self, room: Room) -> None:
        """A group is destroyed."""
        with self.lock:
            self._rooms.pop(room.key, None)

    # -- hearing ------------------------------------------------------------------------------------------------------

    def note(self, call: Call) -> None:
        """This rank makes a call."""
        if call.op != END:
            self.post.calls += 1
            self._last[self.rank] = (self.post.calls, call)

    def led(self, rank: int, calls: int, call: Call) -> None:
        """The leader of a group had made this call, its own so many'th."""
        if call.op != END and (rank not in self._last or calls >= self._last[rank][0]):
            self._last[rank] = (calls, call)

    def started(self, ticket: Ticket) -> None:
        """A call is under way."""
        if ticket.work is not None:
            self._under_way.append(ticket)

    def _take(self, frame: Frame) -> None:
        if frame.kind == ASK:
            self._answer(frame)
        elif frame.kind == TOLD:
            self._told[frame.source] = json.loads(frame.payload)
        else:
            room = self._rooms.get(frame.room)
            if frame.kind in (CALL, MAIL):
                self._last[frame.source] = (frame.calls, frame)
            if room is None:
                self._early.setdefault(frame.room, []).append(frame)
                return
            room.take(frame)

    def progress(self) -> None:
        """Take in what was said and start what may start. The lock is held."""
        self.post.pump()
        if self._under_way:
            self._under_way = [t for t in self._under_way if t.error is None and not t.over and not t.work.done()]

    def poke(self) -> None:
        """`progress`, for a rank that polls."""
        with self.lock:
            self.progress()
        time.sleep(0)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, ticket: Ticket, timeout_s: float, *, only_start: bool = False) -> None:
        """Return when the call is done (or under way). Raises what was found wrong with it."""
        if ticket.over:
            return
        me = threading.get_ident()
        self._waiting[me] = ticket
        try:
            begun, pause = time.monotonic(), 0.0
            while True:
                with self.lock:
                    self.progress()
                    waited = time.monotonic() - begun
                    if waited > _LOOK_S and not ticket.compared:
                        self._look(ticket)
                        if waited > timeout_s and ticket.error is None:
                            self._stuck(ticket, timeout_s)
                    if ticket.error is not None:
                        raise _again(ticket.error)
                    if only_start and ticket.work is not None:
                        return
                    if self._over(ticket, waited > timeout_s):
                        break
                    limit = _POLL_S if self._under_way or ticket.work is not None else _SLEEP_S
                if waited < _SPIN_S:
                    time.sleep(0)
                else:
                    pause = min(limit, pause + 20e-6)
                    self.post.sleep(pause)
        finally:
            self._waiting.pop(me, None)
        ticket.work.wait()
        ticket.over = True

    def _over(self, ticket: Ticket, expired: bool) -> bool:
        """Whether the call needs nothing any more but its own `wait`."""
        if ticket.work is None:
            return False
        if ticket.work.done():
            return True
        if not ticket.compared:
            return False
        if ticket.call.peer is not None:
            return True  # both ends have started it, and torch's own messages cannot be asked whether they are done
        # As long as another call of this rank waits to be started, this one may need that.
        owed = any(room.waits_for_others() for room in self._rooms.values())
        return not owed or expired or any(rank in self.post.gone for rank in ticket.room.ranks)

    def _look(self, ticket: Ticket) -> None:
        """Give the group up if those for whom a call waits are gone."""
        room, post = ticket.room, self.post
        missing = [room.ranks[r] for r in room.missing(ticket)]
        post.watch(missing)
        gone = [rank for rank in missing if rank in post.gone]
        if not gone or (ticket.expected and len(gone) < len(missing)):
            return
        error = PeerError(f"{ticket.call.where()}: {post.who(gone[0])} {post.gone[gone[0]]}")
        room.give_up(error)
        ticket.fail(error)

    # -- who is missing -----------------------------------------------------------------------------------------------

    def _stuck(self, ticket: Ticket, timeout_s: float) -> None:
        """The time-out is over: ask everybody where they are, and say it on every rank of the group."""
        room, call = ticket.room, ticket.call
        self._told.clear()
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.post.watch(others)
        for rank in others:
            if self.post.reaches(rank):
                self.post.send(rank, ASK, room.key, ticket.number)
        deadline = time.monotonic() + _ASK_S
        while time.monotonic() < deadline and len(self._told) < len(others) and ticket.error is None:
            self.progress()
            self.post.sleep(0.001)
        if ticket.error is not None:
            return  # another rank was first
        wanted = ticket.expected or tuple(range(len(room.ranks)))
        came = {self.rank: call.site} | (room.came(ticket.number) if call.peer is None else {})
        came |= {rank: told["site"] for rank, told in self._told.items() if told["site"] and call.peer is None}
        missing = [room.ranks[r] for r in wanted if room.ranks[r] not in came]
        if not missing:
            missing = [room.ranks[r] for r in room.missing(ticket)]
        sites = list(dict.fromkeys(came[rank] for rank in sorted(came)))
        told = "; ".join(self._whereabouts(rank) for rank in missing[:8])
        error = StuckError(
            f"{call.where() if call.peer is not None else call.name()}: {ranks_text(sorted(came))} called it at "
            f"{' and '.join(sites[:3])} and waited {timeout_s:g} s for {ranks_text(missing)}: {told}; if only slow, "
            f"raise the time-out"
        )
        room.give_up(error)
        ticket.fail(error)

    def _whereabouts(self, rank: int) -> str:
        """What a rank has called last, as it says or as anybody has seen."""
        who = self.post.who(rank)
        told = self._told.get(rank)
        if told is not None and told["waits"]:
            return f"{who} waits in {told['waits']}"
        known = [self._known(rank)]
        known += [tuple(other["known"][str(rank)]) for other in self._told.values() if str(rank) in other["known"]]
        _, text = max(known)
        if not text:
            return f"{who} has not made any call"
        return f"{who} has called last {text}" + ("" if told is not None else ", and does not say where it is now")

    def _known(self, rank: int) -> tuple[int, str]:
        """The last call that a rank is known here to have made: its count, and the call."""
        if rank not in self._last:
            return 0, ""
        count, known = self._last[rank]
        if isinstance(known, Frame):
            known = decode(known.payload.partition(b"\n")[2] or known.payload, known.number)
        return count, known.where()

    def _answer(self, frame: Frame) -> None:
        """Say where this rank is: in which call it waits, whether it is the one that is asked about."""
        waits = [ticket for ticket in self._waiting.values() if ticket.error is None]
        room = self._rooms.get(frame.room)
        same = next((t for t in waits if t.room is room and t.number == frame.number and t.call.peer is None), None)
        told = {
            "site": same.call.site if same is not None else "",
            "waits": waits[0].call.where() if waits else "",
            "known": {str(rank): self._known(rank) for rank in self._last},
        }
        self.post.send(frame.source, TOLD, frame.room, frame.number, json.dumps(told).encode())

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """This rank has returned from its function: wait until all have, group by group. A call that another rank still
        makes, and this one has not, is a mismatch, found here at once instead of at the time-out.
        """
        with self.lock:
            self.progress()
            rooms = [room for room in self._rooms.values() if room.broken is None]
            tickets = [room.collective(Call(END, "", "", "control", "", 0), NoData) for room in rooms]
        for ticket in tickets:
            with contextlib.suppress(PeerError, StuckError):  # whoever has met those says so itself
                self.wait(ticket, float("inf"))

    def close(self, failed: bool) -> None:
        """Say goodbye."""
        with self.lock:
            self._rooms.clear()
            self.post.close("has failed" if failed else "has left")


def _again(error: BaseException) -> BaseException:
    """The same error, for each thread or wait that meets it."""
    return type(error)(str(error)) if isinstance(error, CommError) else error
