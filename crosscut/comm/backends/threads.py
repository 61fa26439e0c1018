"""The `threads` back end: every rank a thread of this process, in lockstep by a baton.

Real values, deterministic, works under a debugger, in a notebook and on any system. The last rank to make a call
compares all ranks' calls and computes everyone's result (reductions fold in rank order, so all ranks get the same
bits); each rank then copies its own result in its own thread, under its own grad and inference mode.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from crosscut.comm.backends.base import Work
from crosscut.comm.backends.baton import Baton
from crosscut.comm.backends.matching import Order, check_message, check_same
from crosscut.comm.call import Call
from crosscut.comm.errors import CommError, MismatchError

Tensor = torch.Tensor
_FOLD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass
class _Slot:
    """One collective of a group: what the ranks that have come to it brought, then the results."""

    size: int
    calls: dict[int, Call] = field(default_factory=dict)
    inputs: dict[int, Any] = field(default_factory=dict)
    results: list[Any] | None = None
    error: CommError | None = None
    taken: int = 0

    def complete(self) -> bool:
        return self.results is not None or self.error is not None


class _Shared:
    """What the ranks of one group share."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.slots: dict[int, _Slot] = {}
        self.mail: dict[tuple[int, int], deque[tuple[int, Call, Tensor]]] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.order = Order()
        self.broken: CommError | None = None  # a message was not what its receiver expected: its sender learns it here


class ThreadWorld:
    """What the ranks of one world share. One object, made by the launcher."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.baton = Baton(size)
        self.groups: dict[tuple[tuple[int, ...], int], _Shared] = {}
        self.claims: dict[int, tuple[weakref.ref[Any], int, str]] = {}

    def leftover(self) -> str:
        """What was sent and never received, or ''."""
        lost = [call for group in self.groups.values() for mail in group.mail.values() for _, call, _ in mail]
        return f"{len(lost)} message(s) were never received, the first: {lost[0].where()}" if lost else ""


class ThreadRank:
    """One rank's side of a `ThreadWorld`: a `World` of `crosscut.comm.backends.base`."""

    name = "threads"
    device = torch.device("cpu")

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.size = world.size
        self._made: dict[tuple[tuple[tuple[int, ...], ...], int], ThreadGroup | None] = {}

    def group(self, partition: tuple[tuple[int, ...], ...], channel: int = 0) -> ThreadGroup | None:
        key = (partition, channel)
        if key not in self._made:
            self._made[key] = None
            for ranks in partition:
                if self.rank in ranks:
                    shared = self.world.groups.setdefault((ranks, channel), _Shared(ranks))
                    self._made[key] = ThreadGroup(self, shared)
        return self._made[key]

    def claim(self, module: torch.nn.Module) -> None:
        claims = self.world.claims
        things: list[tuple[str, Any, int]] = [("the module itself", module, id(module))]
        for name, parameter in module.named_parameters():
            things.append((f"parameter {name!r}", parameter, id(parameter)))
            if parameter.untyped_storage().nbytes():
                things.append((f"parameter {name!r}", parameter, parameter.untyped_storage().data_ptr()))
        for what, thing, key in things:
            known, owner, _ = claims.get(key, (None, self.rank, ""))
            alive = known() if known is not None else None
            stale = alive is None or (key != id(alive) and alive.untyped_storage().data_ptr() != key)
            if owner != self.rank and not stale:
                raise ValueError(
                    f"rank {self.rank} uses {type(module).__name__}, of which {what} is in use by rank {owner}: ranks "
                    f"that are threads would share its gradients; build the module inside the function, or "
                    f"copy.deepcopy it there"
                )
            claims[key] = (weakref.ref(thing), self.rank, what)

    def close(self, failed: bool) -> None:
        self._made.clear()


class ThreadGroup:
    """One rank's transport within one group of threads."""

    name = "threads"
    device = torch.device("cpu")
    reduces_in_fp32 = True
    guards = True

    def __init__(self, owner: ThreadRank, shared: _Shared) -> None:
        self._owner = owner
        self._baton = owner.world.baton
        self._shared = shared
        self._rank = shared.ranks.index(owner.rank)
        self._size = len(shared.ranks)
        self._seq = 0
        self._tickets: dict[int, int] = {}

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def all_reduce(self, x: Tensor, op: str, call: Call) -> Work:
        return self._join(call, x, lambda xs: [_fold(op, xs)] * self._size, x)

    def broadcast(self, x: Tensor, src: int, call: Call) -> Work:
        return self._join(call, x, lambda xs: [xs[src].clone()] * self._size, x)

    def reduce(self, x: Tensor, dst: int, op: str, call: Call) -> Work:
        return self._join(call, x, lambda xs: [_fold(op, xs)] * self._size, x if self._rank == dst else None)

    def all_gather(self, out: Tensor, x: Tensor, call: Call) -> Work:
        return self._join(call, x, lambda xs: [torch.cat(xs)] * self._size, out)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, call: Call) -> Work:
        return self._join(call, x, lambda xs: list(_fold(op, xs).view(self._size, -1).unbind(0)), out)

    def gather(self, out: Tensor | None, x: Tensor, dst: int, call: Call) -> Work:
        return self._join(call, x, lambda xs: [torch.cat(xs)] * self._size, out)

    def scatter(self, out: Tensor, x: Tensor | None, src: int, call: Call) -> Work:
        return self._join(call, x, lambda xs: list(xs[src].clone().view(self._size, -1).unbind(0)), out)

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: list[int], in_counts: list[int], call: Call) -> Work:
        def exchange(pieces: list[tuple[Tensor, ...]]) -> list[Tensor]:
            return [torch.cat([pieces[i][j] for i in range(self._size)]) for j in range(self._size)]

        return self._join(call, torch.split(x, in_counts), exchange, out)

    def barrier(self, call: Call) -> Work:
        return self._join(call, None, lambda xs: [None] * self._size, None)

    def send(self, x: Tensor, dst: int, call: Call) -> Work:
        """Buffered: the message is copied, and the sender goes on."""
        self._check_usable(call)
        shared, pair = self._shared, (self._rank, dst)
        number = shared.sent[pair] = shared.sent.get(pair, 0) + 1
        shared.mail.setdefault(pair, deque()).append((number, call, x.clone()))
        return self._work(call, lambda: True, lambda: None)

    def recv(self, out: Tensor, src: int, call: Call) -> Work:
        """The k-th receive from a rank takes its k-th message, in whatever order receives are waited for."""
        self._check_usable(call)
        mail = self._shared.mail.setdefault((src, self._rank), deque())
        number = self._tickets[src] = self._tickets.get(src, 0) + 1

        def here() -> bool:
            return any(message[0] == number for message in mail)

        def take() -> None:
            if not here():
                self._check_usable(call)
            index = next(i for i, message in enumerate(mail) if message[0] == number)
            _, sent, payload = mail[index]
            del mail[index]
            try:
                check_message(sent, call, self._shared.ranks, src, self._rank)
            except MismatchError as error:
                self._shared.broken = error
                raise
            out.copy_(payload)

        return self._work(call, here, take)

    def exchange(self, x: Tensor, dst: int, out: Tensor, src: int, send_call: Call, recv_call: Call) -> Work:
        self.send(x, dst, send_call)
        return self.recv(out, src, recv_call)

    def destroy(self) -> None:
        """Nothing is held: the group dies with the world."""

    def _work(self, call: Call, ready: Callable[[], bool], take: Callable[[], None]) -> Work:
        """A call under way; a broken group ends it."""
        shared = self._shared
        return _Work(self._baton, self._owner.rank, call, lambda: ready() or shared.broken is not None, take)

    def _check_usable(self, call: Call) -> None:
        if self._shared.broken is not None:
            raise MismatchError(f"{call.where()}: this group cannot be used any more: {self._shared.broken}")

    def _join(self, call: Call, x: Any, compute: Callable[[list[Any]], list[Any]], out: Tensor | None) -> Work:
        """Come to the collective `call.seq`; the last to come checks and computes it."""
        self._check_usable(call)
        slots = self._shared.slots
        slot = slots.setdefault(call.seq, _Slot(self._size))
        slot.calls[self._rank], slot.inputs[self._rank] = call, x
        if len(slot.calls) == self._size:
            calls = [slot.calls[rank] for rank in range(self._size)]
            try:
                check_same(calls, self._shared.ranks)
                self._shared.order.check(calls, self._shared.ranks)
                with torch.inference_mode(False), torch.no_grad():
                    slot.results = compute([slot.inputs[rank] for rank in range(self._size)])
            except CommError as error:
                slot.error = error
            slot.inputs.clear()

        def take() -> None:
            if not slot.complete():
                self._check_usable(call)
            slot.taken += 1
            if slot.taken == self._size:
                del slots[call.seq]
            if slot.error is not None:
                raise type(slot.error)(str(slot.error))
            if out is not None:
                assert slot.results is not None
                with torch.no_grad():
                    out.copy_(slot.results[self._rank])

        return self._work(call, slot.complete, take)


class _Work:
    """A call under way: ready when `ready()`, finished by `take()` in the rank's own thread."""

    def __init__(
        self, baton: Baton, rank: int, call: Call, ready: Callable[[], bool], take: Callable[[], None]
    ) -> None:
        self._baton, self._rank, self._call, self._ready, self._take = baton, rank, call, ready, take

    def wait(self) -> None:
        self._baton.wait_until(self._rank, self._ready, self._call.where)
        self._take()

    def done(self) -> bool:
        if not self._ready():
            self._baton.let_others_run(self._rank)
        return self._ready()


def _fold(op: str, tensors: list[Tensor]) -> Tensor:
    """Reduce in rank order."""
    out = tensors[0].clone()
    for x in tensors[1:]:
        out = _FOLD[op](out, x)
    return out
