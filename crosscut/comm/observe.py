"""Who is told of the calls of a `Context`'s groups as they are made: `ctx.observe(observer)`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from crosscut.comm.backends.base import Work
    from crosscut.comm.call import Call

MAX_FORMS = 4096  # so many kinds of call are remembered: shapes may change for ever


class Observer(Protocol):
    """Told of each call of one rank, at the price of two Python calls. What it raises, the call raises."""

    def lane(self, label: str, ranks: Sequence[int], channel: int) -> int:
        """The context has a group. channel: its number among the context's connections of the same ranks. Returns what
        `mark` is given for its calls.
        """
        ...

    def mark(self, lane: int, call: Call, num_bytes: int, is_async: bool) -> Any:
        """Calls like this one, but for `seq`, are made. num_bytes: as in the ledger. Returns what `begin` is given."""
        ...

    def begin(self, mark: Any, seq: int) -> int:
        """The rank makes a call, which has passed its checks. Returns its number."""
        ...

    def waits(self, number: int) -> None:
        """The rank begins to wait for an async call."""
        ...

    def complete(self, number: int) -> None:
        """The call is done, as far as the rank has waited. Not told of a call that raises."""
        ...


class ObservedWork:
    """A back end's `Work`, of which the observer is told when the rank begins to wait and when it is done."""

    __slots__ = ("_number", "_observer", "_work")

    def __init__(self, work: Work, observer: Observer, number: int) -> None:
        self._work, self._observer, self._number = work, observer, number

    def wait(self) -> None:
        self._observer.waits(self._number)
        self._work.wait()
        self._observer.complete(self._number)

    def done(self) -> bool:
        return self._work.done()
