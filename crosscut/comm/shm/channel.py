"""One group as one of its ranks sees it: the queue of its calls, how they end, and how the group ends.

Collectives run one at a time, in the order they were issued; messages run beside them. The steps of a collective are
those of `crosscut.comm.shm.slots`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from crosscut.comm.errors import CommError, PeerError
from crosscut.comm.shm import failing
from crosscut.comm.shm import station as stations
from crosscut.comm.shm.layout import ABORTED, CULPRIT, FAILED, LEFT, STATE
from crosscut.comm.shm.mail import Mail
from crosscut.comm.shm.operation import Label, Operation, Steps, named
from crosscut.comm.shm.slots import Slots

_FLUSH_S = 10.0


class Channel(Slots):
    """One rank's part of a group. timeout_s: how long a call may wait without anything moving."""

    def __init__(self, store: Any, rank: int, ranks: Iterable[int], name: str, timeout_s: float) -> None:
        super().__init__(store, rank, ranks, name, timeout_s)
        self.timeout_s = timeout_s
        self.broken: BaseException | None = None
        self.mail = Mail(self)
        self._queue: deque[Operation] = deque()
        self.station.join(self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def submit(self, steps: Steps, label: Label, timeout_s: float | None = None) -> Operation:
        """Queue a collective, and run it as far as it goes. Raises if the group is broken or destroyed."""
        with self.station.lock:
            if self.broken is not None:
                self.refuse()
            operation = Operation(self, steps, label, self.timeout_s if timeout_s is None else timeout_s)
            self.enqueue(operation)
            self.advance()
        return operation

    def enqueue(self, operation: Operation) -> None:
        """Put a collective behind those under way."""
        self._queue.append(operation)
        self.activate()

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

    def tell_need(self) -> bool:
        """Before this process sleeps: if it waits for one counter of this group alone, write which, and return true."""
        return not self.mail.pending and bool(self._queue) and self.write_need(self._queue[0].need)

    def activate(self) -> None:
        """There is something to do."""
        if self not in self.station.active:
            self.station.active.append(self)

    def refuse(self) -> NoReturn:
        """Raise what broke the group."""
        error = self.broken
        assert error is not None
        kind = type(error) if isinstance(error, CommError) else CommError
        raise kind(f"the group ({self.name}) cannot be used any more: {error}") from error

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
                self.fail(named(error, operation.label), failing.reason_of(error), self.rank)
                return
            except BaseException:
                self.fail(CommError(f"{operation.text()} was interrupted"), failing.OTHER, self.rank)
                raise
        if self.mail.pending:
            try:
                self.mail.advance()
            except Exception as error:
                self.fail(error, failing.reason_of(error), self.rank)
                return
            except BaseException:
                self.fail(CommError(f"a message over {self.name} was interrupted"), failing.OTHER, self.rank)
                raise
        if not queue and not self.mail.pending and self in self.station.active:
            self.station.active.remove(self)

    def finish(self, operation: Operation, error: BaseException | None = None) -> None:
        """The call is over."""
        operation.error = error
        operation.steps = None
        operation.finished = True
        self.moves += 1
        self.station.wake_threads()

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
        self.station.leave(self)
        self.release()
        self.mail = Mail(self)
        if self.broken is not None:
            self.broken.__traceback__ = None
        stations.close_if_idle(self.station)
