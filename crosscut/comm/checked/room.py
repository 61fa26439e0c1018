"""The calls of one group, as one of its ranks compares them with the others'.

A collective is told to the group's first rank (the leader), which compares when all have come and tells the others:

    rank 2 -- CALL k --> rank 0 (compares) -- SAME k, or FAIL k and why --> all

so each rank sends one frame a call, however large the group. A message is told by its sender to its receiver, which
compares it with its k-th receive from there: MAIL k -->, <-- SAME or FAIL. Nobody waits in the call that issues an
asynchronous one: what has been agreed is started, in the order of issue, inside any later call or wait.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn

from crosscut.comm.backends.matching import Order, check_message, check_same
from crosscut.comm.call import Call
from crosscut.comm.checked.ticket import Ticket
from crosscut.comm.errors import CommError, MismatchError, PeerError, StuckError

if TYPE_CHECKING:
    from crosscut.comm.checked.checker import Checker
    from crosscut.comm.checked.post import Frame

CALL, SAME, FAIL, MAIL, MAIL_SAME, ASK, TOLD = range(2, 9)  # kinds of frames
_ERRORS = {kind.__name__: kind for kind in (MismatchError, PeerError, StuckError, CommError)}
ANY = -1


def encode(call: Call) -> bytes:
    """A call as bytes: equal for calls that are equal in all that is compared and in their site."""
    return json.dumps([*call[:3], call.site, *call[6:]]).encode()


def decode(data: bytes, seq: int) -> Call:
    """What `encode` made."""
    op, label, tag, site, *rest = (_tuples(value) for value in json.loads(data))
    return Call(op, label, tag, "", site, seq, *rest)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Room:
    """One rank's side of a group in checked mode. `ranks`: of the world, in the group's order.

    Made by `Checker.room`; its methods are called with the checker's lock held.
    """

    def __init__(self, checker: Checker, name: str, label: str, ranks: Sequence[int], timeout_s: float) -> None:
        self.checker, self.name, self.label, self.timeout_s = checker, name, label, timeout_s
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(checker.rank)
        self.key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        self.broken: BaseException | None = None
        self.queue: deque[Ticket] = deque()  # collectives not yet compared, in order
        self._issued = 0
        self._own: dict[int, tuple[bytes, Call, int]] = {}  # at the leader, like the next
        self._heard: dict[int, dict[int, bytes]] = {}
        self._order = Order()
        self._sent: dict[tuple[int, int], Ticket] = {}  # (receiver, number) of sends not yet agreed
        self._sends: dict[int, int] = {}
        self._mail: dict[int, deque[tuple[int, int, bytes]]] = {}  # source -> (number, torch's tag, call) not yet taken
        self._receives: list[tuple[int, int, Ticket, Callable[[int], Any]]] = []

    # -- issuing ------------------------------------------------------------------------------------------------------

    def collective(self, call: Call, start: Callable[[], Any]) -> Ticket:
        """Tell a collective."""
        self._check_usable(call)
        self._issued += 1
        number, leader = self._issued, self.ranks[0]
        ticket = Ticket(self, call, start, number)
        data = encode(call)
        self.checker.note(call)
        self.queue.append(ticket)
        if self.rank == 0:
            self._own[number] = (data, call, self.checker.post.calls)
            self._judge(number)
        else:
            self.checker.post.send(leader, CALL, self.key, number, data)
        return ticket

    def send(self, call: Call, start: Callable[[], Any], peer: int, mail_tag: int = 0) -> Ticket:
        """Tell a message, and start it: what is sent does no harm before it is received."""
        self._check_usable(call)
        number = self._sends[peer] = self._sends.get(peer, 0) + 1
        ticket = Ticket(self, call, start, number, (peer,))
        self.checker.note(call)
        ticket.start()
        if ticket.error is None:
            self.checker.started(ticket)
            self._sent[peer, number] = ticket
            data = json.dumps(mail_tag).encode() + b"\n" + encode(call)
            self.checker.post.send(self.ranks[peer], MAIL, self.key, number, data)
        return ticket

    def receive(self, call: Call, start: Callable[[int], Any], peer: int, mail_tag: int = 0) -> Ticket:
        """Wait for the word of a message from `peer` (or from ANY rank), to compare it before it is received.

        `start` is told from whom.
        """
        self._check_usable(call)
        others = tuple(r for r in range(len(self.ranks)) if r != self.rank)
        ticket = Ticket(self, call, lambda: None, 0, others if peer == ANY else (peer,))
        self.checker.note(call)
        self._receives.append((peer, mail_tag, ticket, start))
        self._deliver()
        return ticket

    def _check_usable(self, call: Call) -> None:
        if self.broken is not None:
            self.refuse(call)

    def refuse(self, call: Call) -> NoReturn:
        """Raise what broke the group."""
        error = self.broken
        assert error is not None
        kind = type(error) if isinstance(error, CommError) else CommError
        raise kind(f"{call.where()}: this group cannot be used any more: {error}") from None

    # -- hearing ------------------------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """What another rank has said about this group."""
        source = self.ranks.index(frame.source)
        if frame.kind == CALL:
            self._heard.setdefault(frame.number, {})[source] = frame.payload
            self._judge(frame.number)
        elif frame.kind == SAME:
            self.checker.led(frame.source, int(frame.payload), self._agree(frame.number))
        elif frame.kind == FAIL:
            kind, text = json.loads(frame.payload)
            self._fail(frame.number, _ERRORS[kind](text))
        elif frame.kind == MAIL:
            tag, _, data = frame.payload.partition(b"\n")
            self._mail.setdefault(source, deque()).append((frame.number, int(tag), data))
            self._deliver()
        elif frame.kind == MAIL_SAME:
            ticket = self._sent.pop((source, frame.number), None)
            if ticket is not None:
                ticket.agreed = True

    def _judge(self, number: int) -> None:
        """At the leader: compare call `number` if all have made it."""
        heard = self._heard.get(number, {})
        if number not in self._own or len(heard) < len(self.ranks) - 1:
            return
        own, call, calls_made = self._own.pop(number)
        self._heard.pop(number, None)
        try:
            if all(data == own for data in heard.values()) and call.input_splits is None:
                self._order.same()
            else:
                calls = [call if r == 0 else decode(heard[r], number) for r in range(len(self.ranks))]
                check_same(calls, self.ranks)
                self._order.check(calls, self.ranks)
        except MismatchError as error:
            self.tell_all(number, error)
            self._fail(number, error)
            return
        for rank in self.ranks[1:]:
            self.checker.post.send(rank, SAME, self.key, number, str(calls_made).encode())
        self._agree(number)

    def _agree(self, number: int) -> Call:
        """Calls are judged in order, and so they start in order."""
        ticket = self.queue.popleft()
        assert ticket.number == number
        ticket.start()
        self.checker.started(ticket)
        return ticket.call

    def _fail(self, number: int, error: BaseException) -> None:
        """Call `number` fails, and the group goes on; 0: the whole group cannot be used any more."""
        if number:
            self.queue.popleft().fail(error)
            return
        self.broken = self.broken or error
        for ticket in [*self.queue, *self._sent.values(), *(ticket for _, _, ticket, _ in self._receives)]:
            ticket.fail(error)
        self.queue.clear()
        self._sent.clear()
        self._receives.clear()

    def give_up(self, error: BaseException) -> None:
        """Nothing can be compared in this group any more: every call under way ends so, on every rank."""
        if self.broken is None:
            self.tell_all(0, error)
            self._fail(0, error)

    def tell_all(self, number: int, error: BaseException) -> None:
        """FAIL to all others."""
        data = json.dumps([type(error).__name__, str(error)]).encode()
        for rank in self.ranks:
            if rank != self.checker.rank:
                self.checker.post.send(rank, FAIL, self.key, number, data)

    def _deliver(self) -> None:
        """Give each receive, in the order of issue, the first message that is for it."""
        left: list[tuple[int, int, Ticket, Callable[[int], Any]]] = []
        for index, wanted in enumerate(self._receives):
            peer, tag, ticket, start = wanted
            found = self._find(peer, tag)
            if found is None:
                left.append(wanted)
                continue
            source, number, data = found
            sent = decode(data, 0)
            try:
                check_message(sent, ticket.call, self.ranks, source, self.rank)
            except MismatchError as error:
                self._receives = [*left, *self._receives[index + 1 :]]  # they end with the group
                ticket.fail(error)
                self.give_up(error)
                return
            self.checker.post.send(self.ranks[source], MAIL_SAME, self.key, number)
            ticket._start = _bound(start, source)
            ticket.start()
            self.checker.started(ticket)
        self._receives = left

    def _find(self, peer: int, tag: int) -> tuple[int, int, bytes] | None:
        """The first message from a rank (or any) with torch's tag, which it takes out. A rank may still wait for an
        earlier receive with another tag: messages with different tags are not ordered."""
        for source in [peer] if peer != ANY else list(self._mail):
            box = self._mail.setdefault(source, deque())
            for index, (number, mail_tag, data) in enumerate(box):
                if mail_tag == tag:
                    del box[index]
                    return source, number, data
        return None

    def waits_for_others(self) -> bool:
        """Whether this rank still has to start something here."""
        return bool(self.queue or self._receives)

    # -- who is missing -----------------------------------------------------------------------------------------------

    def missing(self, ticket: Ticket) -> list[int]:
        """The ranks (of the group) whose word a call waits for, as far as this rank knows."""
        if ticket.expected:
            return list(ticket.expected)
        if self.rank != 0:
            return [0]
        heard = self._heard.get(ticket.number, {})
        return [r for r in range(1, len(self.ranks)) if r not in heard]

    def came(self, number: int) -> dict[int, str]:
        """At the leader: the sites of those that have made call `number`, by rank of the world."""
        return {self.ranks[r]: decode(data, 0).site for r, data in self._heard.get(number, {}).items()}


def _bound(start: Callable[[int], Any], source: int) -> Callable[[], Any]:
    return lambda: start(source)
