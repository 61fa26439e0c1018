"""The collectives that only move data, barrier, and send and receive, as torch.distributed calls them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.dtypes import flat
from crosscut.comm.shm import moving, short, staged
from crosscut.comm.shm.calls import Calls
from crosscut.comm.shm.mail import ANY
from crosscut.comm.shm.operation import Operation
from crosscut.comm.shm.tensors import addresses, all_writable, listed, lists, served, then, writable
from crosscut.comm.shm.work import ShmWork

Tensor = torch.Tensor


class Moves(Calls):
    """The calls that move data. Raise ValueError, before anything moves, for tensors that do not fit together."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        xs = listed(tensors)
        if not served(xs):
            return self._inner("broadcast", tensors, opts)
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        operations = []
        for x in xs:
            wire, after = (flat(x), None) if root == self.channel.rank else writable(x, read=False)
            steps = moving.broadcast(self.channel, wire, root)
            operations.append(self._submit("broadcast", x, then(steps, after), opts))
        return ShmWork(operations, xs)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        many, xs = lists(outputs), listed(inputs)
        if not served([*xs, *(x for one in many for x in one)]):
            return self._inner("allgather", outputs, inputs, opts)
        operations = [self._all_gather(list(outs), x, opts) for outs, x in zip(many, xs, strict=True)]
        return ShmWork(operations, [list(outs) for outs in many])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if not served([output, input]):
            return self._inner("all_gather_single", output, input, opts)
        fits = input.dtype == output.dtype and output.nbytes == input.nbytes * self._size and output.is_contiguous()
        if (
            fits
            and self._waits(opts)
            and short.all_gather(self.channel, output, input, self._label("all_gather", input))
        ):
            return ShmWork((), [output])
        return ShmWork([self._all_gather_single(output, input, opts)], [output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        if not served([*outputs, *inputs]):
            return self._inner("all_gather_single_coalesced", outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return ShmWork([self._all_gather_single(out, x, opts) for out, x in pairs], list(outputs))

    def _all_gather_single(self, out: Tensor, x: Tensor, opts: Any) -> Operation:
        if out.numel() != x.numel() * self._size or x.dtype != out.dtype:
            raise ValueError(
                f"all_gather: {x.numel()} elements of {x.dtype} in, {out.numel()} of {out.dtype} out, over "
                f"{self._size} ranks; the output must be {self._size} times the input, of one dtype"
            )
        wire, after = writable(out, read=False)
        steps = moving.all_gather(self.channel, addresses(wire, self._size, x.nbytes), flat(x), wire)
        return self._submit("all_gather", x, then(steps, after), opts)

    def _all_gather(self, outs: list[Tensor], x: Tensor, opts: Any) -> Operation:
        self._one_each("all_gather", outs, x)
        wires, after = all_writable(outs)
        steps = moving.all_gather(self.channel, [wire.data_ptr() for wire in wires], flat(x), wires)
        return self._submit("all_gather", x, then(steps, after), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        x = listed(inputs)[0]
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        outs = list(lists(outputs)[0]) if outputs and root == self.channel.rank else []
        if not served([x, *outs]):
            return self._inner("gather", outputs, inputs, opts)
        if root != self.channel.rank:
            steps = moving.gather(self.channel, [], flat(x), root, None)
        else:
            self._one_each("gather", outs, x)
            wires, after = all_writable(outs)
            to = [wire.data_ptr() for wire in wires]
            steps = then(moving.gather(self.channel, to, flat(x), root, wires), after)
        return ShmWork([self._submit("gather", x, steps, opts)], [outs])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        out = listed(outputs)[0]
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        parts = list(lists(inputs)[0]) if inputs and root == self.channel.rank else None
        if not served([out, *(parts or ())]):
            return self._inner("scatter", outputs, inputs, opts)
        if root == self.channel.rank:
            self._one_each("scatter", parts or [], out)
        wire, after = writable(out, read=False)
        flats = [flat(part) for part in parts or ()]
        given = [part.data_ptr() for part in flats]
        steps = then(moving.scatter(self.channel, wire, given, root, flats), after)
        return ShmWork([self._submit("scatter", out, steps, opts)], [out])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any = (), input_splits: Any = (), opts: Any = None
    ) -> dist.Work:
        if not served([output, input]):
            return self._inner("all_to_all_single", output, input, output_splits, input_splits, opts)
        wire, after = writable(output, read=False)
        outs = self._split(wire, output, output_splits, "output")
        ins = self._split(flat(input), input, input_splits, "input")
        steps = then(moving.all_to_all(self.channel, outs, ins), after)
        return ShmWork([self._submit("all_to_all", input, steps, opts)], [output])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        if not served([*outputs, *inputs]):
            return self._inner("alltoall", outputs, inputs, opts)
        for name, given in (("outputs", outputs), ("inputs", inputs)):
            if len(given) != self._size:
                raise ValueError(f"all_to_all: {len(given)} {name} for {self._size} ranks; pass one a rank")
        wires, after = all_writable(list(outputs))
        steps = moving.all_to_all(self.channel, wires, [flat(x) for x in inputs])
        return ShmWork([self._submit("all_to_all", inputs[0], then(steps, after), opts)], list(outputs))

    def _split(self, flat: Tensor, x: Tensor, splits: Any, name: str) -> list[Tensor]:
        """The pieces of a flat tensor: rows of `x` by the splits, or equal parts."""
        size = self._size
        rows = x.shape[0] if x.dim() else 1
        if len(splits) == 0:
            if rows % size:
                raise ValueError(
                    f"all_to_all: {rows} rows of the {name}, which {size} ranks do not divide; pass splits"
                )
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(f"all_to_all: {name} splits {list(splits)} for {rows} rows and {size} ranks")
        row = flat.numel() // rows if rows else 0
        return list(flat.split([int(n) * row for n in splits]))

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        x = listed(tensors)[0]
        if not served([x]):
            return self._inner("send", tensors, dst, tag)
        label = self._label("send", x, f" to rank {self.channel.ranks[dst]}")
        return ShmWork([self.channel.send(flat(x), dst, tag, label)], [x])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        x = listed(tensors)[0]
        if not served([x]):
            return self._inner("recv", tensors, src, tag)
        return self._recv(x, src, tag, f" from rank {self.channel.ranks[src]}")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        x = listed(tensors)[0]
        if not served([x]):
            return self._inner("recv_anysource", tensors, tag)
        return self._recv(x, ANY, tag, " from any rank")

    def _recv(self, x: Tensor, src: int, tag: int, whom: str) -> dist.Work:
        wire, after = writable(x, read=False)
        operation = self.channel.recv(wire, src, tag, self._label("recv", x, whom))
        return ShmWork([operation], [x]) if after is None else _Unpacked(operation, x, after)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self._inner("barrier", opts)
        return ShmWork([self._submit("barrier", None, staged.barrier(self.channel), opts)], [])


class _Unpacked(ShmWork):
    """A receive into a strided tensor: its values are put in place when it is waited for."""

    def __init__(self, operation: Operation, x: Tensor, after: Callable[[], None]) -> None:
        super().__init__([operation], [x])
        self._after: Callable[[], None] | None = after

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        super().wait(timeout)
        if self._after is not None:
            self._after()
            self._after = None
        return True
