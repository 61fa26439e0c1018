"""One call under way: a generator that yields whenever it must wait for a peer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from crosscut.comm.errors import CommError

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel


class Need(NamedTuple):
    """What a call waits for: a counter (a word of the peers' segments) to reach a value, at each of `sources`."""

    word: int
    target: int
    sources: tuple[int, ...]
    any_of: bool = False  # at one of them


Steps = Generator[Need, None, None]
Label = str | Callable[[], str]


class Operation:
    """A call under way. `wait()` returns when this rank's part of the result is there, or raises."""

    __slots__ = (
        "channel",
        "error",
        "finished",
        "label",
        "moves",
        "need",
        "number",
        "since",
        "source",
        "steps",
        "timeout_s",
    )

    def __init__(self, channel: Channel, steps: Steps | None, label: Label, timeout_s: float) -> None:
        self.channel = channel
        self.steps = steps
        self.label = label
        self.timeout_s = timeout_s
        self.finished = False
        self.error: BaseException | None = None
        self.need: Need | None = None
        self.number = 0
        self.source = -1  # of a message received: who sent it
        self.since = 0.0  # when it last moved, as far as a waiting thread has seen
        self.moves = -1

    def wait(self) -> None:
        """Block until it is finished; raises what went wrong."""
        if not self.finished:
            self.channel.station.wait(self)
        elif self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Whether `wait` would return at once. Does this rank's part as far as it goes."""
        if not self.finished:
            with self.channel.station.lock:
                self.channel.station.progress()
        return self.finished

    def text(self) -> str:
        """What the user called."""
        return text_of(self.label)


def text_of(label: Label) -> str:
    """A label in words."""
    return label if isinstance(label, str) else label()


def named(error: Exception, label: Label) -> Exception:
    """An error between ranks with the user's call before it; any other as it is."""
    return type(error)(f"{text_of(label)}: {error}") if isinstance(error, CommError) else error
