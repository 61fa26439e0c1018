"""`CheckedGroup`: the transport of a `Group`, with every call compared between the ranks before its data move."""

from __future__ import annotations

from typing import Any

import torch

from crosscut.comm.backends.base import Backend, Work
from crosscut.comm.call import Call
from crosscut.comm.checked.room import Room
from crosscut.comm.checked.ticket import NoData

Tensor = torch.Tensor


class CheckedGroup:
    """A `Backend` of `crosscut.comm.backends.base` around another one. It has no short calls: each is told first."""

    guards = False

    def __init__(self, inner: Backend, room: Room) -> None:
        self.name, self.device, self.reduces_in_fp32 = inner.name, inner.device, inner.reduces_in_fp32
        self._inner, self._room = inner, room

    def next_seq(self) -> int:
        return self._inner.next_seq()

    def all_reduce(self, x: Tensor, op: str, call: Call) -> Work:
        return self._collective("all_reduce", call, x, op)

    def broadcast(self, x: Tensor, src: int, call: Call) -> Work:
        return self._collective("broadcast", call, x, src)

    def reduce(self, x: Tensor, dst: int, op: str, call: Call) -> Work:
        return self._collective("reduce", call, x, dst, op)

    def all_gather(self, out: Tensor, x: Tensor, call: Call) -> Work:
        return self._collective("all_gather", call, out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, call: Call) -> Work:
        return self._collective("reduce_scatter", call, out, x, op)

    def gather(self, out: Tensor | None, x: Tensor, dst: int, call: Call) -> Work:
        return self._collective("gather", call, out, x, dst)

    def scatter(self, out: Tensor, x: Tensor | None, src: int, call: Call) -> Work:
        return self._collective("scatter", call, out, x, src)

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: list[int], in_counts: list[int], call: Call) -> Work:
        return self._collective("all_to_all", call, out, x, out_counts, in_counts)

    def barrier(self, call: Call) -> Work:
        return self._collective("barrier", call)

    def _collective(self, name: str, call: Call, *args: Any) -> Work:
        method = getattr(self._inner, name)
        with self._room.checker.lock:
            ticket = self._room.collective(call, lambda: method(*args, call))
        if self.device.type == "cuda":  # kernels run in the order of issue, which must be the program's
            self._room.checker.wait(ticket, self._room.timeout_s, only_start=True)
        return ticket

    def send(self, x: Tensor, dst: int, call: Call) -> Work:
        with self._room.checker.lock:
            return self._room.send(call, lambda: self._inner.send(x, dst, call), dst)

    def recv(self, out: Tensor, src: int, call: Call) -> Work:
        with self._room.checker.lock:
            return self._room.receive(call, lambda _: self._inner.recv(out, src, call), src)

    def exchange(self, x: Tensor, dst: int, out: Tensor, src: int, send_call: Call, recv_call: Call) -> Work:
        if self.device.type != "cuda":
            return _Both(self.send(x, dst, send_call), self.recv(out, src, recv_call))
        with self._room.checker.lock:  # NCCL must be told of both at once
            sent = self._room.send(send_call, NoData, dst)
            received = self._room.receive(
                recv_call, lambda _: self._inner.exchange(x, dst, out, src, send_call, recv_call), src
            )
        return _Both(sent, received)

    def destroy(self) -> None:
        """Leave the group."""
        self._room.checker.leave(self._room)
        self._inner.destroy()


class _Both:
    """A send and a receive. The receive first: its data come whatever the own message does."""

    def __init__(self, sent: Work, received: Work) -> None:
        self._sent, self._received = sent, received

    def wait(self) -> None:
        self._received.wait()
        self._sent.wait()

    def done(self) -> bool:
        return self._received.done() and self._sent.done()
