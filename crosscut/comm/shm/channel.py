"""One group as one of its ranks sees it: the queue of its calls, and the steps all its ranks count together.

Collectives run one at a time, in the order they were issued. Each is a number of *steps*, the same on every rank. In
step k a rank waits until slot k % DEPTH is free (all peers DONE with step k - DEPTH), fills it, says so
(POSTED = k + 1), waits for the peers it reads from, reads their slots, says so (DONE = k + 1):

    rank 0   fill 0 | post | fill 1 | post | read 0 | done | fill 2 | post | read 1 | ...
    rank 1   fill 0 | post | fill 1 | post | read 0 | done | ...
                                             ^ waits only if its peers are more than a step behind

Every call also leaves a signature. A rank that waits for its peers' slots compares theirs with its own, and with those
of earlier calls that it had no reason to wait for, so that ranks that call different things learn it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from crosscut.comm.errors import CommError, MismatchError, PeerError
from crosscut.comm.shm import failing, futex, signature
from crosscut.comm.shm import station as stations
from crosscut.comm.shm.layout import (
    ABORTED,
    ANYTHING,
    ASLEEP,
    BEHIND,
    CALLS,
    CULPRIT,
    DEPTH,
    DONE,
    FAILED,
    LEFT,
    NEED,
    NEED_SOURCE,
    NEED_TARGET,
    POSTED,
    SIGNATURES,
    SLOT,
    STATE,
    SegmentLayout,
)
from crosscut.comm.shm.mail import Mail
from crosscut.comm.shm.operation import Label, Need, Operation, Steps
from crosscut.comm.shm.rendezvous import meet

_MASK = 0xFFFFFFFF
_FLUSH_S = 10.0


class Channel:
    """One rank's part of a group. Made by all its ranks together; raises what `rendezvous.meet` raises.

    store: where the ranks find each other; ranks: their global ranks; name: of the group, for messages; timeout_s: how
    long a call may wait without anything moving.
    """

    def __init__(self, store: Any, rank: int, ranks: Iterable[int], name: str, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.name = name
        self.timeout_s = timeout_s
        self.station = stations.station()
        self.layout = SegmentLayout.of(self.size)
        meeting = meet(store, rank, self.size, timeout_s, self.station.page, self.station.peers)
        self.segments = meeting.segments
        self.peers = meeting.peers
        self.key = meeting.key
        self.words = self.segments[rank].words
        self.others = tuple(r for r in range(self.size) if r != rank)
        self.other_words = [self.segments[r].words for r in self.others]
        self.slot_address = [segment.address + self.layout.slots_bytes for segment in self.segments]
        self.step = 0  # the next step
        self.calls = 0  # collectives begun
        self.moves = 0  # grows whenever something moves
        self.broken: BaseException | None = None
        self.mail = Mail(self)
        self._bells = [(r, self.peers[r]) for r in self.others]
        self._queue: deque[Operation] = deque()
        self._unread: list[tuple[int, int]] = []  # calls whose signatures were not compared yet
        self._typed: dict[torch.dtype, list[torch.Tensor]] = {}
        self._views: dict[tuple[torch.dtype, int, int, int], list[torch.Tensor]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.station.join(self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def submit(self, steps: Steps, label: Label, timeout_s: float | None = None) -> Operation:
        """Queue a collective, and run it as far as it goes. Raises if the group is broken or destroyed."""
        with self.station.lock:
            if self.broken is not None:
                self.refuse()
            operation = Operation(self, steps, label, self.timeout_s if timeout_s is None else timeout_s)
            self._queue.append(operation)
            self.activate()
            self.advance()
        return operation

    def send(self, x: torch.Tensor, peer: int, tag: int, label: Label, timeout_s: float | None = None) -> Operation:
        """Send a flat contiguous tensor to rank `peer` of the group."""
        return self._mail(self.mail.send, x, peer, tag, label, timeout_s)

    def recv(self, x: torch.Tensor, source: int, tag: int, label: Label, timeout_s: float | None = None) -> Operation:
        """Receive into a flat contiguous tensor from rank `source` of the group, or from ANY."""
        return self._mail(self.mail.recv, x, source, tag, label, timeout_s)

    def _mail(
        self,
        issue: Callable[[torch.Tensor, int, int, Label, float], Operation],
        x: torch.Tensor,
        rank: int,
        tag: int,
        label: Label,
        timeout_s: float | None,
    ) -> Operation:
        with self.station.lock:
            if self.broken is not None:
                self.refuse()
            return issue(x, rank, tag, label, self.timeout_s if timeout_s is None else timeout_s)

    def activate(self) -> None:
        """There is something to do."""
        if self not in self.station.active:
            self.station.active.append(self)

    def refuse(self) -> NoReturn:
        """Raise what broke the group."""
        error = self.broken
        assert error is not None
        kind = type(error) if isinstance(error, CommError) else CommError
        raise kind(f"group {self.name} cannot be used any more: {error}") from error

    def advance(self) -> None:
        """Run the calls under way as far as they go. The station's lock is held."""
        queue = self._queue
        while queue:
            operation = queue[0]
            try:
                assert operation.steps is not None
                operation.need = next(operation.steps)
                break
            except StopIteration:
                queue.popleft()
                self.finish(operation)
            except Exception as error:
                self.fail(_named(error, operation), failing.reason_of(error), self.rank)
                return
            except BaseException:
                self.fail(CommError(f"{operation.text()} was interrupted"), failing.OTHER, self.rank)
                raise
        if self.mail.pending:
            try:
                self.mail.advance()
            except Exception as error:
                self.fail(error, failing.OTHER, self.rank)
                return
        if not queue and not self.mail.pending and self in self.station.active:
            self.station.active.remove(self)

    def finish(self, operation: Operation, error: BaseException | None = None) -> None:
        """The call is over."""
        operation.error = error
        operation.steps = None
        operation.finished = True
        self.moves += 1
        self.station.wake_threads()

    # -- steps, for the collectives -----------------------------------------------------------------------------------

    def room(self, step: int) -> Steps:
        """Wait until this step's slot may be filled."""
        target = step - DEPTH + 1
        for words in self.other_words:
            while (words[DONE] - target) & BEHIND:
                yield Need(DONE, target, self.others)

    def post(self, step: int) -> None:
        """This step's slot is filled."""
        self.words[POSTED] = (step + 1) & _MASK
        self.moves += 1
        self.ring()

    def posted(self, step: int, sources: tuple[int, ...]) -> Steps:
        """Wait until those ranks have filled this step's slot."""
        target = step + 1
        for source in sources:
            words = self.segments[source].words
            while (words[POSTED] - target) & BEHIND:
                yield Need(POSTED, target, sources)

    def done(self, step: int) -> None:
        """This rank reads no slot of this step, or an earlier one, any more."""
        self.words[DONE] = (step + 1) & _MASK
        self.moves += 1
        self.ring()

    def skip(self, word: int, count: int) -> None:
        """Step over slots that this rank leaves empty (POSTED) or does not read (DONE)."""
        self.words[word] = count & _MASK
        self.ring()

    def ring(self, everybody: bool = False) -> None:
        """Wake the peers that sleep, if what they wait for may just have been written."""
        futex.fence()
        for rank, peer in self._bells:
            asleep = peer.words[ASLEEP]
            if asleep and (asleep == ANYTHING or everybody or self._gets_what_it_needs(rank)):
                peer.ring()

    def _gets_what_it_needs(self, rank: int) -> bool:
        """Whether all counters that the sleeping rank waits for in this group are there."""
        words = self.segments[rank].words
        word, target, source = words[NEED], words[NEED_TARGET], words[NEED_SOURCE]
        if not word:
            return False
        if source:
            return not (self.segments[source - 1].words[word] - target) & BEHIND
        return not any((one.words[word] - target) & BEHIND for r, one in enumerate(self.segments) if r != rank)

    def tell_need(self) -> bool:
        """Before this process sleeps: if it waits for one counter of this group alone, write which, and return true."""
        if self.mail.pending or not self._queue:
            return False
        need = self._queue[0].need
        if need is None or len(need.sources) not in (1, len(self.others)):
            return False
        self.words[NEED_TARGET] = need.target & _MASK
        self.words[NEED_SOURCE] = need.sources[0] + 1 if len(need.sources) == 1 else 0
        self.words[NEED] = need.word
        return True

    def forget_need(self) -> None:
        """It is awake."""
        self.words[NEED] = 0

    def begin(self, sign: int) -> int:
        """Leave the signature of a call; returns the call's number. Raises PeerError if a peer has given up."""
        for rank, words in zip(self.others, self.other_words, strict=True):
            if words[STATE] > LEFT:
                raise PeerError(failing.why(self, rank)[0])
        call = self.calls
        self.calls = call + 1
        longs = self.segments[self.rank].longs
        longs[self.layout.signatures_bytes // 8 + call % SIGNATURES] = sign
        self.words[CALLS] = self.calls & _MASK
        self._unread.append((call, sign))
        return call

    def compare(self, sources: tuple[int, ...]) -> None:
        """Raise MismatchError if one of those ranks, whose slots of the present call are filled, called otherwise."""
        unread, base = self._unread, self.layout.signatures_bytes // 8
        everybody = len(sources) == len(self.others)
        for source in sources:
            longs = self.segments[source].longs
            for call, sign in unread if everybody else unread[-1:]:
                theirs = longs[base + call % SIGNATURES]
                if theirs != sign and call > self.calls - SIGNATURES + 2 * DEPTH:
                    raise MismatchError(
                        f"call #{call + 1} of group {self.name}: rank {self.ranks[source]} called "
                        f"{signature.text(theirs)}, rank {self.ranks[self.rank]} called {signature.text(sign)}; make "
                        f"the same calls in the same order on every rank"
                    )
        if everybody:
            unread.clear()
        elif len(unread) > SIGNATURES:
            del unread[: SIGNATURES // 2]

    # -- memory, for the collectives ----------------------------------------------------------------------------------

    def slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """All slots of every rank, one flat tensor of `dtype` a rank."""
        found = self._typed.get(dtype)
        if found is None:
            begin = self.layout.slots_bytes
            found = [segment.data[begin : begin + DEPTH * SLOT].view(dtype) for segment in self.segments]
            self._typed[dtype] = found
        return found

    def in_slots(self, dtype: torch.dtype, count: int, index: int, offset: int = 0) -> list[torch.Tensor]:
        """`count` elements of every rank's slot, from `offset` on. Kept, since equal calls come again and again."""
        key = dtype, count, index, offset
        found = self._views.get(key)
        if found is None:
            begin = index * (SLOT // dtype.itemsize) + offset
            found = [slots[begin : begin + count] for slots in self.slots(dtype)]
            if len(self._views) > 512:
                self._views.clear()
            self._views[key] = found
        return found

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Private memory for the duration of one reduction."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._scratch

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def check(self, operation: Operation, expired_s: float | None) -> None:
        """Called now and then by a rank that waits: break the group if those ranks cannot come or are late."""
        head = self._queue[0] if operation.steps is not None and self._queue else operation
        found = failing.look(self, head, expired_s)
        if found is not None:
            self.fail(*found)

    def fail(self, error: BaseException, reason: int, culprit: int, state: int = FAILED) -> None:
        """Break the group: every call under way, here and at the peers, ends with an error."""
        if self.broken is None:
            self.broken = error
            self.words[CULPRIT] = failing.encode(reason, culprit)
            self.words[STATE] = state
        while self._queue:
            self.finish(self._queue.popleft(), error)
        for operation in self.mail.clear():
            self.finish(operation, error)
        if self in self.station.active:
            self.station.active.remove(self)
        self.ring(everybody=True)

    # -- the end ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give up at once: calls under way, here and at the peers, end with PeerError."""
        with self.station.lock:
            if self.broken is None:
                self.fail(PeerError("this rank has aborted it"), failing.OTHER, self.rank, ABORTED)
            self._leave()

    def close(self) -> None:
        """Finish what is under way, as far as the peers do their part, and leave the group."""
        with contextlib.suppress(CommError):  # nobody waits for it any more
            for operation in [*self.mail.sends(), *list(self._queue)[-1:]]:
                operation.timeout_s = min(operation.timeout_s, _FLUSH_S)
                operation.wait()
        with self.station.lock:
            if self.broken is None:
                self.fail(CommError("this rank has destroyed it"), failing.OTHER, self.rank, LEFT)
            self._leave()

    def _leave(self) -> None:
        """Let go of all memory, though a user may still hold the group."""
        self.station.leave(self)
        self.segments, self.peers, self.other_words, self._bells = [], [], [], []
        self._typed, self._views, self.slot_address = {}, {}, []
        self.words = memoryview(bytearray(4096)).cast("I")
        self.mail = Mail(self)
        if self.broken is not None:
            self.broken.__traceback__ = None
        stations.close_if_idle(self.station)


def _named(error: Exception, operation: Operation) -> Exception:
    """The error with the user's call before it."""
    return type(error)(f"{operation.text()}: {error}") if isinstance(error, CommError) else error
