"""What all algorithms are written with: messages among the ranks of a group, pieces of a tensor, the combining of two.

An algorithm works on flat contiguous tensors through a `Wire`. A plain send waits for its receiver and a receive for
its sender, so the algorithms rely on no buffering: whatever goes both ways in one step is one `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from crosscut.comm.algorithms.recorder import Recorder
from crosscut.comm.group import Group

Tensor = torch.Tensor
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Wire:
    """Messages among `ranks` of a group (default: all). `rank` is this rank's place among them, -1 outside.

    Empty messages are not sent: sender and receiver both know their length. `what` names a message for who watches.
    """

    def __init__(
        self, group: Group, tag: str, kind: str, ranks: Sequence[int] | None = None, naming: str = "{}"
    ) -> None:
        self._group, self._tag, self._kind, self._naming = group, tag, kind, naming
        self.ranks = tuple(range(group.size)) if ranks is None else tuple(ranks)
        self.rank = self.ranks.index(group.rank) if group.rank in self.ranks else -1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def part(self, ranks: Sequence[int], naming: str = "{}") -> Wire:
        """A wire among some of the ranks. `naming`: of its messages, {} being what their sender says."""
        naming = self._naming.replace("{}", naming)
        return Wire(self._group, self._tag, self._kind, [self.ranks[r] for r in ranks], naming)

    def send(self, x: Tensor, dst: int, what: str) -> None:
        """Send `x`; returns when it may be changed."""
        if x.numel():
            self._note(what)
            self._group.send(x, self.ranks[dst], tag=self._tag, kind=self._kind)

    def recv(self, out: Tensor, src: int) -> Tensor:
        """Receive into `out`."""
        if out.numel():
            self._group.recv(out, self.ranks[src], tag=self._tag, kind=self._kind)
        return out

    def exchange(self, x: Tensor, dst: int, out: Tensor, src: int, what: str) -> Tensor:
        """Send `x` and receive into `out` at the same time."""
        if not x.numel():
            return self.recv(out, src)
        if not out.numel():
            self.send(x, dst, what)
            return out
        self._note(what)
        self._group.exchange(x, self.ranks[dst], out, self.ranks[src], tag=self._tag, kind=self._kind)
        return out

    def _note(self, what: str) -> None:
        if isinstance(self._group, Recorder):
            self._group.note(self._naming.replace("{}", what))


def combine(op: str, lower: Tensor, higher: Tensor, out: Tensor) -> None:
    """`out` = `lower` op `higher` (out is one of the two). `lower` is what comes from the lower ranks: where several
    ranks combine the same two they do it in the same order, since min and max of -0.0 and 0.0, and the sum of two
    NaNs, depend on it.
    """
    _COMBINE[op](lower, higher, out=out)


def bounds(numel: int, num_pieces: int) -> list[int]:
    """Where `num_pieces` pieces of `numel` elements begin, and the end. Lengths differ by at most one; may be 0."""
    return [numel * i // num_pieces for i in range(num_pieces + 1)]


def named(start: int, stop: int) -> str:
    """`piece 2`, `pieces 2:4`."""
    return f"piece {start}" if stop == start + 1 else f"pieces {start}:{stop}"
