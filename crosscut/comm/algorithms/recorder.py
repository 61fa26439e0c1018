"""A group that writes down what goes over it: which rank sent what to whom, in the order in which the rank did it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from crosscut.comm.group import Group


class Sent(NamedTuple):
    """A message as its sender saw it. `values`: its numbers, of the first `Recorder.MOST`."""

    dst: int
    what: str
    bytes: int
    values: tuple[Any, ...]


class Event(NamedTuple):
    """One call of one rank: a send, a receive (`src`), or both at once."""

    sent: Sent | None
    src: int | None


class Recorder(Group):
    """A `Group` like the one it is made from, on the same transport and ledger, with `events`."""

    MOST = 64  # numbers kept of a message

    def __init__(self, group: Group) -> None:
        self.__dict__.update(group.__dict__)  # the same members, transport and counts: only the calls are watched
        self.events: list[Event] = []
        self._what = ""

    def note(self, what: str) -> None:
        """Name the next message."""
        self._what = what

    def send(self, x: torch.Tensor, dst: int, **options: Any) -> Any:
        """As `Group.send`."""
        self.events.append(Event(self._sent(x, dst), None))
        return super().send(x, dst, **options)

    def recv(self, out: torch.Tensor, src: int, **options: Any) -> Any:
        """As `Group.recv`."""
        self.events.append(Event(None, src))
        return super().recv(out, src, **options)

    def exchange(self, x: torch.Tensor, dst: int, out: torch.Tensor, src: int, **options: Any) -> Any:
        """As `Group.exchange`."""
        self.events.append(Event(self._sent(x, dst), src))
        return super().exchange(x, dst, out, src, **options)

    def _sent(self, x: torch.Tensor, dst: int) -> Sent:
        return Sent(dst, self._what, x.nbytes, tuple(x.detach().flatten()[: self.MOST].tolist()))
