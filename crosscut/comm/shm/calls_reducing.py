"""all_reduce, reduce and reduce_scatter as torch.distributed calls them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.dtypes import flat
from crosscut.comm.shm import reducing, short
from crosscut.comm.shm.calls import Calls
from crosscut.comm.shm.operation import Operation
from crosscut.comm.shm.tensors import addresses, check_reduction, listed, lists, reduction, served, then, writable
from crosscut.comm.shm.work import ShmWork

Tensor = torch.Tensor


class Reductions(Calls):
    """The reductions. Raise ValueError, before anything moves, for tensors or an operation that do not fit."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        xs = listed(tensors)
        if not served(xs):
            return self._inner("allreduce", tensors, opts)
        op, factor = reduction(opts)
        if factor is None and len(xs) == 1 and self._waits(opts):
            check_reduction("all_reduce", op, xs[0])
            if short.all_reduce(self.channel, xs[0], op, self._label("all_reduce", xs[0])):
                return ShmWork((), xs)
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
        operation = self._reduce_scatter_single(output, input, opts)
        return ShmWork(() if operation is None else (operation,), [output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        if not served([*outputs, *inputs]):
            return self._inner("reduce_scatter_single_coalesced", outputs, inputs, opts)
        operations = [self._reduce_scatter_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)]
        return ShmWork([one for one in operations if one is not None], list(outputs))

    def _reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> Operation | None:
        if x.numel() != out.numel() * self._size or x.dtype != out.dtype:
            raise ValueError(
                f"reduce_scatter: {x.numel()} elements of {x.dtype} in, {out.numel()} of {out.dtype} out, over "
                f"{self._size} ranks; the input must be {self._size} times the output, of one dtype"
            )
        op, factor = reduction(opts)
        check_reduction("reduce_scatter", op, out)
        label = self._label("reduce_scatter", out)
        plain = factor is None and out.is_contiguous() and not out.requires_grad
        if plain and self._waits(opts) and short.reduce_scatter(self.channel, out, x, op, label):
            return None
        wire, after = writable(out, read=False)
        whole = flat(x) if factor is None else flat(x) * factor
        begin, width = self.channel.rank * wire.numel(), wire.numel()
        given = addresses(whole, self._size, wire.nbytes)
        steps = reducing.reduce_scatter(self.channel, wire, lambda: whole[begin : begin + width], given, op, whole)
        return self._submit("reduce_scatter", out, then(steps, after), opts)

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
