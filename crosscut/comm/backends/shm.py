"""The `shm` back end of `Group`: straight to the shared-memory channel of the torch process group, without torch's way
from Python through C++ back to Python. Calls made here and calls made through torch.distributed on the same group share
one queue, so their order is kept.
"""

from __future__ import annotations

import torch

from crosscut.comm.backends.base import Work
from crosscut.comm.call import Call
from crosscut.comm.shm import moving, reducing, short, staged
from crosscut.comm.shm.channel import Channel
from crosscut.comm.shm.operation import Operation
from crosscut.comm.shm.tensors import addresses

Tensor = torch.Tensor


class ShmGroup:
    """One rank's transport within one group, over its `Channel`."""

    name = "shm"
    device = torch.device("cpu")
    reduces_in_fp32 = True
    guards = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._seq = 0
        self.short = ShmShort(channel)

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def all_reduce(self, x: Tensor, op: str, call: Call) -> Operation:
        return self._channel.submit(reducing.all_reduce(self._channel, x, op), call.where)

    def broadcast(self, x: Tensor, src: int, call: Call) -> Operation:
        return self._channel.submit(moving.broadcast(self._channel, x, src), call.where)

    def reduce(self, x: Tensor, dst: int, op: str, call: Call) -> Operation:
        return self._channel.submit(reducing.reduce_to(self._channel, x, dst, op), call.where)

    def all_gather(self, out: Tensor, x: Tensor, call: Call) -> Operation:
        return self._channel.submit(moving.all_gather(self._channel, self._rows(out, x.nbytes), x, out), call.where)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, call: Call) -> Operation:
        rank, width, pieces = self._channel.rank, out.numel(), self._rows(x, out.nbytes)

        def own() -> Tensor:
            return x[rank * width : (rank + 1) * width]

        steps = reducing.reduce_scatter(self._channel, out, own, pieces, op, x)
        return self._channel.submit(steps, call.where)

    def gather(self, out: Tensor | None, x: Tensor, dst: int, call: Call) -> Operation:
        rows = [] if out is None else self._rows(out, x.nbytes)
        return self._channel.submit(moving.gather(self._channel, rows, x, dst, out), call.where)

    def scatter(self, out: Tensor, x: Tensor | None, src: int, call: Call) -> Operation:
        rows = [] if x is None else self._rows(x, out.nbytes)
        return self._channel.submit(moving.scatter(self._channel, out, rows, src, x), call.where)

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: list[int], in_counts: list[int], call: Call) -> Operation:
        steps = moving.all_to_all(self._channel, out.split(out_counts), x.split(in_counts))
        return self._channel.submit(steps, call.where)

    def send(self, x: Tensor, dst: int, call: Call) -> Operation:
        return self._channel.send(x, dst, 0, call.where)

    def recv(self, out: Tensor, src: int, call: Call) -> Operation:
        return self._channel.recv(out, src, 0, call.where)

    def exchange(self, x: Tensor, dst: int, out: Tensor, src: int, send_call: Call, recv_call: Call) -> Work:
        received = self._channel.recv(out, src, 0, recv_call.where)
        return _Both(self._channel.send(x, dst, 0, send_call.where), received)

    def barrier(self, call: Call) -> Operation:
        return self._channel.submit(staged.barrier(self._channel), call.where)

    def destroy(self) -> None:
        """The channel goes with its torch process group."""

    def _rows(self, x: Tensor, num_bytes: int) -> range:
        """The addresses of the equal parts of a tensor, one a rank."""
        return addresses(x, self._channel.size, num_bytes)


class ShmShort:
    """Its short calls."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def all_reduce(self, x: Tensor, op: str, call: Call) -> bool:
        return short.all_reduce(self._channel, x, op, call.where)

    def all_gather(self, out: Tensor, x: Tensor, call: Call) -> bool:
        return short.all_gather(self._channel, out, x, call.where)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, call: Call) -> bool:
        return short.reduce_scatter(self._channel, out, x, op, call.where)


class _Both:
    """A send and a receive as one."""

    def __init__(self, sent: Operation, received: Operation) -> None:
        self._sent, self._received = sent, received

    def wait(self) -> None:
        self._sent.wait()
        self._received.wait()

    def done(self) -> bool:
        return self._sent.done() and self._received.done()
