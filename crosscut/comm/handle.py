"""Handles of async calls, and the list of those not yet waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from crosscut.comm.backends.base import Work
from crosscut.comm.call import Call
from crosscut.comm.guards import Guard

T = TypeVar("T")


class Pending:
    """The async calls of one rank that nobody has waited for yet."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._next = 0

    def add(self, call: Call) -> int:
        """Remember a call; returns the key to forget it by."""
        self._next += 1
        self._calls[self._next] = call
        return self._next

    def discard(self, key: int) -> None:
        """Forget a call that was waited for."""
        self._calls.pop(key, None)

    def __len__(self) -> int:
        return len(self._calls)

    def text(self) -> str:
        """One line that names each call."""
        calls = list(self._calls.values())
        shown = "; ".join(call.where() for call in calls[:5])
        if len(calls) > 5:
            shown += f"; and {len(calls) - 5} more"
        return f"{len(calls)} async call(s) were never waited for: {shown}: call wait() on every handle"


class Handle(Generic[T]):
    """An async call under way. `wait()` gives its result; whatever must be done to the data after it arrives
    (dtype, layout, division) is done there, so nothing reads an unfinished buffer.
    """

    def __init__(
        self,
        work: Work | None,
        finish: Callable[[], T],
        *,
        guards: tuple[Guard, ...] = (),
        pending: Pending | None = None,
        call: Call | None = None,
    ) -> None:
        self._work = work
        self._finish: Callable[[], T] | None = finish
        self._guards = guards
        self._pending = pending
        self._key = pending.add(call) if pending is not None and call is not None else 0
        self._result: T | None = None

    def wait(self) -> T:
        """Block until the call is done; returns what the call without `async_op` returns. May be called again."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            if self._pending is not None:
                self._pending.discard(self._key)
            if self._work is not None:
                self._work.wait()
            for guard in self._guards:
                guard.check()
            self._result = finish()
            self._work, self._guards = None, ()
        return self._result  # type: ignore[return-value]  # set by finish(); T may itself be None

    def forget(self) -> None:
        """Say that nobody will wait: an error ended what the call was for. It goes on; its peers count on it."""
        if self._pending is not None:
            self._pending.discard(self._key)

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._finish is None or self._work is None or self._work.done()
