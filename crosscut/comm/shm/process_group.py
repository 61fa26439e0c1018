"""`ShmProcessGroup`: the `shm` back end as torch.distributed sees it.

torch calls a process group from Python (torch.distributed) and from C++ (functional collectives, DDP's reducer), under
names that torch 2.13 renamed. Every one is overridden here, under all its names: the base class would run with the GIL
held while it waits for Gloo's threads, and hang. What shared memory does not serve (tensors of other devices, sparse
ones, `monitored_barrier`) goes to `self.inner`, a plain process group over Gloo, and NCCL where there is a GPU.

Methods take torch's arguments: lists of tensors and an options object, or a tensor and plain arguments.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.shm import moving, reducing, staged
from crosscut.comm.shm.channel import Channel
from crosscut.comm.shm.mail import ANY
from crosscut.comm.shm.operation import Operation, Steps
from crosscut.comm.shm.tensors import (
    addresses,
    all_writable,
    check_reduction,
    flat,
    listed,
    lists,
    reduction,
    rows,
    served,
    then,
    writable,
)
from crosscut.comm.shm.work import InnerWork, ShmWork

Tensor = torch.Tensor
_Base: Any = dist.ProcessGroup  # its stub knows neither the constructor of subclasses nor all the names


class ShmProcessGroup(_Base):
    """A process group over shared memory. `channel`: the group's own machinery; `inner`: who serves the rest."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], name: str, timeout: datetime.timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._timeout = timeout
        self._size = len(ranks)
        self.channel = Channel(store, rank, ranks, name, timeout.total_seconds())
        # What an earlier world has left in the store must not be found by the other back ends.
        store = dist.PrefixStore(f"{self.channel.key:x}", store)
        self.inner: Any = dist.ProcessGroup(store, rank, len(ranks))
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, len(ranks), timeout=timeout)
        gloo._set_sequence_number_for_group()
        backends: list[tuple[str, Any, Any]] = [("cpu", dist.ProcessGroup.BackendType.GLOO, gloo)]
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, len(ranks), options)
            nccl._set_sequence_number_for_group()
            backends.append(("cuda", dist.ProcessGroup.BackendType.NCCL, nccl))
        for group in (self, self.inner):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            for device, kind, backend in backends:
                group._register_backend(torch.device(device), kind, backend)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # called from C++
        """ "shm" """
        return "shm"

    def name(self) -> str:
        """ "shm" """
        return "shm"

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long calls wait from now on."""
        self._timeout = timeout
        self.channel.timeout_s = timeout.total_seconds()
        if hasattr(self.inner, "set_timeout"):
            self.inner.set_timeout(timeout)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        xs = listed(tensors)
        if not served(xs):
            return self._inner("allreduce", tensors, opts)
        op, factor = reduction(opts)
        operations = []
        for x in xs:
            wire, after = writable(x, read=True)
            check_reduction("all_reduce", op, wire)
            if factor is not None:
                wire.mul_(factor)
            steps = reducing.all_reduce(self.channel, wire, op)
            operations.append(self._submit("all_reduce", x, then(steps, after), opts))
        return ShmWork(operations, xs)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        if not served(tensors):
            return self._inner("allreduce_coalesced", tensors, opts)
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> dist.Work:
        xs = listed(tensors)
        if not served(xs):
            return self._inner("reduce", tensors, opts)
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        kind, factor = reduction(opts if op is None else op)
        operations = []
        for x in xs:
            at_root = root == self.channel.rank
            wire, after = writable(x, read=True) if at_root else (flat(x), None)
            check_reduction("reduce", kind, wire)
            if factor is not None:
                wire = wire.mul_(factor) if at_root else wire * factor
            steps = reducing.reduce_to(self.channel, wire, root, kind)
            operations.append(self._submit("reduce", x, then(steps, after), opts))
        return ShmWork(operations, xs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        outs = listed(outputs)
        many = lists(inputs)
        if not served([*outs, *(x for one in many for x in one)]):
            return self._inner("reduce_scatter", outputs, inputs, opts)
        operations = [self._reduce_scatter(out, list(one), opts) for out, one in zip(outs, many, strict=True)]
        return ShmWork(operations, outs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if not served([output, input]):
            return self._inner("reduce_scatter_single", output, input, opts)
        return ShmWork([self._reduce_scatter_single(output, input, opts)], [output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        if not served([*outputs, *inputs]):
            return self._inner("reduce_scatter_single_coalesced", outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return ShmWork([self._reduce_scatter_single(out, x, opts) for out, x in pairs], list(outputs))

    def _reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> Operation:
        if x.numel() != out.numel() * self._size or x.dtype != out.dtype:
            raise ValueError(
                f"reduce_scatter: {x.numel()} elements of {x.dtype} in, {out.numel()} of {out.dtype} out, over "
                f"{self._size} ranks; the input must be {self._size} times the output, of one dtype"
            )
        return self._reduce_scatter(out, rows(flat(x), self._size), opts)

    def _reduce_scatter(self, out: Tensor, pieces: list[Tensor], opts: Any) -> Operation:
        self._one_each("reduce_scatter", pieces, out)
        op, factor = reduction(opts)
        wire, after = writable(out, read=False)
        check_reduction("reduce_scatter", op, wire)
        flats = [flat(piece) for piece in pieces]
        if factor is not None:
            flats = [piece * factor for piece in flats]
        given = [piece.data_ptr() for piece in flats]
        steps = reducing.reduce_scatter(self.channel, wire, lambda: flats[self.channel.rank], given, op, flats)
        return self._submit("reduce_scatter", out, then(steps, after), opts)

    # -- moves --------------------------------------------------------------------------------------------------------

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

    # -- all other names ----------------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.monitored_barrier(*args, **kwargs)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.split_group(*args, **kwargs)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.merge_remote_group(*args, **kwargs)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.inner._end_coalescing(device)

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is under way and leave. Called by `destroy_process_group`."""
        self.channel.close()
        self.inner.shutdown()

    def abort(self) -> None:
        """Give up at once; calls under way, here and at the peers, end with an error."""
        self.channel.abort()
        self.inner.abort()

    # -- the parts every call is made of ------------------------------------------------------------------------------

    def _inner(self, method: str, *args: Any) -> dist.Work:
        """Let the other back end serve a call."""
        call = getattr(self.inner, method, None) or getattr(self.inner, _OLD_NAMES[method])
        return InnerWork(call(*(arg for arg in args if arg is not None)), self.channel.station)

    def _submit(self, name: str, x: Tensor | None, steps: Steps, opts: Any) -> Operation:
        timeout = getattr(opts, "timeout", None)
        timeout_s = timeout.total_seconds() if timeout is not None else 0.0
        return self.channel.submit(steps, self._label(name, x), timeout_s if timeout_s > 0 else None)

    def _label(self, name: str, x: Tensor | None, whom: str = "") -> Callable[[], str]:
        shape = None if x is None else (tuple(x.shape), x.dtype)

        def text() -> str:
            what = "" if shape is None else f" of {str(shape[1]).removeprefix('torch.')} {shape[0]}"
            return f"{name}{what}{whom} in group {self.channel.name}"

        return text

    def _one_each(self, name: str, parts: Sequence[Tensor], like: Tensor) -> None:
        """One part a rank, each with as many elements of the same dtype as `like`."""
        if len(parts) != self._size:
            raise ValueError(f"{name}: {len(parts)} tensors for {self._size} ranks; pass one a rank")
        for index, part in enumerate(parts):
            if part.numel() != like.numel() or part.dtype != like.dtype:
                raise ValueError(
                    f"{name}: tensor {index} is {part.dtype} {tuple(part.shape)}, the other side is {like.dtype} "
                    f"{tuple(like.shape)}; make them equal"
                )


_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


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
