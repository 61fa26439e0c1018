"""One checked call under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crosscut.comm.call import Call

if TYPE_CHECKING:
    from crosscut.comm.checked.room import Room


class Ticket:
    """A call that has been told to the other ranks. Its data move (`start`) once they have made the same call.

    `work`: the call itself, once it has started; `error`: what the comparison found; `expected`: the ranks of the group
    without whom it cannot go on. A send starts at once, and `agreed` says that its receiver has compared it.
    """

    def __init__(
        self, room: Room, call: Call, start: Callable[[], Any], number: int, expected: tuple[int, ...] = ()
    ) -> None:
        self.room, self.call, self.number, self.expected = room, call, number, expected
        self._start: Callable[[], Any] | None = start
        self.work: Any = None
        self.error: BaseException | None = None
        self.agreed = False
        self.over = False  # waited for

    def start(self) -> None:
        """Let the data move."""
        start, self._start = self._start, None
        if start is not None:
            try:
                self.work = start()
            except Exception as error:
                self.error = error

    def fail(self, error: BaseException) -> None:
        """The comparison has found something: the call will not start."""
        self.error, self._start = self.error or error, None

    @property
    def is_send(self) -> bool:
        """Whether it was started before it was compared."""
        return self.call.op == "send"

    @property
    def compared(self) -> bool:
        """Whether nothing more is to be heard about it."""
        return self.error is not None or self.agreed or (self.work is not None and not self.is_send)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the call is done; raises what the comparison found, or the call itself."""
        self.room.checker.wait(self, self.room.timeout_s if timeout_s is None else timeout_s)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        self.room.checker.poke()
        return self.error is not None or (self.work is not None and bool(self.work.done()))


class NoData:
    """The work of a call that moves none."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """It is."""
        return True
