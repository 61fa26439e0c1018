"""`Group`: the collectives, and send and receive, among the ranks of one group.

A group checks a call before any data moves, copies where a back end needs plain contiguous memory, and counts the call
in the ledger. The handle carries the rank: two ranks of one process (threads) hold two groups. Groups move values, not
gradients: results are detached; the pairs of `crosscut.comm.pairs` are the differentiable forms.

All calls take, by keyword: `async_op` (return a `Handle`; `wait()` gives the result), `tag` (the name in the ledger
and in messages) and `kind` ("step": part of the training step; "control": everything else). Ranks (`src`, `dst`) count
within the group. Any strided tensor is right: non-contiguous, 0-d, empty; dtypes as in `crosscut.comm.dtypes`. Every
rank gets bitwise the same from `all_reduce`. `all_gather`, `reduce_scatter` and `all_to_all` give a new tensor, or put
their result (of dim 0) in `out`, contiguous and apart from `x`: for large results that come again and again, since new
memory of more than 32 MiB costs the kernel more time than the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from crosscut.comm import checks
from crosscut.comm.dtypes import as_bytes, flat, from_wire, to_wire
from crosscut.comm.group_base import GroupBase, Result, Tensor, copy_back, new_copy
from crosscut.comm.guards import Guard
from crosscut.comm.handle import Handle
from crosscut.comm.observe import ObservedWork

__all__ = ["Group", "Handle"]
SHORT_BYTES = 1 << 18  # where a back end may have a quicker way


class Group(GroupBase):
    """The ranks that communicate with each other over some axes of the mesh, as one of them sees them.

    label: the axes, `tp` or `dp+tp`; ranks: the members' global ranks, ascending; rank: this rank's index among them;
    ledger: where calls are counted. Raises ValueError, before data moves, for anything a user can get wrong; errors
    between ranks are those of `crosscut.comm.errors`.
    """

    # -- reductions ---------------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Tensor, op: str = "sum", *, async_op: bool = False, tag: str = "", kind: str = "step"
    ) -> Result:
        """`x` becomes, on every rank, the reduction of all ranks' `x`. In place; returns `x`. Equal shapes."""
        self._check("all_reduce", x, op=op)
        backend = self._backend
        if backend is None:
            return self._now(x, async_op)
        call = self._call("all_reduce", x, tag, kind, x.nbytes, async_op, reduce_op=op)
        if self._short is not None and not async_op and self._short.all_reduce(x, op, call):
            return self._short_done(x)
        guarded = async_op and backend.guards
        wire = to_wire(x, widen=backend.reduces_in_fp32, copy=guarded)
        guards = (Guard(x, call, writes=True),) if guarded else ()
        work = backend.all_reduce(wire, "sum" if op == "avg" else op, call)
        return self._finish(work, lambda: self._store(x, wire, op), call, guards, async_op)

    def reduce(
        self, x: Tensor, dst: int = 0, op: str = "sum", *, async_op: bool = False, tag: str = "", kind: str = "step"
    ) -> Result:
        """`x` becomes, on rank `dst` only, the reduction of all ranks' `x`; other ranks keep theirs. Returns `x`."""
        self._check("reduce", x, op=op, root=dst, root_name="dst")
        backend = self._backend
        if backend is None:
            return self._now(x, async_op)
        call = self._call("reduce", x, tag, kind, x.nbytes, async_op, reduce_op=op, root=dst)
        at_dst = self.rank == dst
        guarded = async_op and backend.guards
        # Back ends may use the other ranks' buffers as scratch space: those ranks hand over a copy.
        wire = to_wire(x, widen=backend.reduces_in_fp32, copy=guarded or not at_dst)
        guards = (Guard(x, call, writes=at_dst),) if guarded else ()
        work = backend.reduce(wire, dst, "sum" if op == "avg" else op, call)
        return self._finish(work, lambda: self._store(x, wire, op) if at_dst else x, call, guards, async_op)

    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        tag: str = "",
        kind: str = "step",
    ) -> Result:
        """The reduction of all ranks' `x`, of which rank r gets the r-th of `size` equal pieces along `dim`."""
        self._check("reduce_scatter", x, op=op)
        size, whole = len(self.ranks), x.shape  # looked up once: a short call is made of little else
        if dim or not whole or whole[0] % size:
            dim = checks.dim(f"reduce_scatter over {self.label}", x, dim)
            checks.divides(f"reduce_scatter over {self.label}", x, dim, size)
        shape = (whole[0] // size, *whole[1:])
        if out is not None:
            checks.out(f"reduce_scatter over {self.label}", out, x, shape, dim)
        backend = self._backend
        if backend is None:
            return self._now(new_copy(x) if out is None else copy_back(out, flat(x)), async_op)
        num_bytes = x.nbytes
        call = self._call("reduce_scatter", x, tag, kind, num_bytes, async_op, reduce_op=op, dim=dim)
        if self._short is not None and not async_op and not dim and num_bytes <= SHORT_BYTES:
            piece = x.new_empty(shape) if out is None else out
            if self._short.reduce_scatter(piece, x, op, call):
                return self._short_done(piece)
        # The pieces must be contiguous one after another: bring the cut dim to the front of each piece.
        pieces = x
        if dim:
            pieces = x.detach().unflatten(dim, (size, whole[dim] // size)).movedim(dim, 0)
            shape = tuple(pieces.shape[1:])
        guarded = async_op and backend.guards
        wire = to_wire(pieces, widen=backend.reduces_in_fp32, copy=guarded)
        guards = self._guards(x, out, call) if guarded else ()
        result = self._memory(out, wire, wire.numel() // self.size, guarded)
        work = backend.reduce_scatter(result, wire, "sum" if op == "avg" else op, call)

        def finish() -> Tensor:
            piece = from_wire(result, x.dtype, shape, op, self.size)
            return piece if out is None else copy_back(out, piece)

        return self._finish(work, finish, call, guards, async_op)

    # -- one to all, all to one ---------------------------------------------------------------------------------------

    def broadcast(
        self, x: Tensor, src: int = 0, *, async_op: bool = False, tag: str = "", kind: str = "step"
    ) -> Result:
        """`x` becomes rank `src`'s `x`. In place; returns `x`. Equal shapes."""
        self._check("broadcast", x, root=src, root_name="src")
        backend = self._backend
        if backend is None:
            return self._now(x, async_op)
        call = self._call("broadcast", x, tag, kind, x.nbytes, async_op, root=src)
        at_src = self.rank == src
        guarded = async_op and backend.guards
        wire = flat(x, copy=guarded)
        guards = (Guard(x, call, writes=not at_src),) if guarded else ()
        work = backend.broadcast(as_bytes(wire), src, call)
        return self._finish(work, lambda: x if at_src else copy_back(x, wire), call, guards, async_op)

    def gather(self, x: Tensor, dst: int = 0, *, async_op: bool = False, tag: str = "", kind: str = "step") -> Result:
        """Rank `dst` gets the list of all ranks' `x` (new tensors, in rank order), the others None. Equal shapes."""
        self._check("gather", x, root=dst, root_name="dst")
        backend = self._backend
        if backend is None:
            return self._now([new_copy(x)], async_op)
        call = self._call("gather", x, tag, kind, x.nbytes, async_op, root=dst)
        guarded = async_op and backend.guards
        wire = flat(x, copy=guarded)
        guards = (Guard(x, call, writes=False),) if guarded else ()
        out = wire.new_empty(wire.numel() * self.size) if self.rank == dst else None
        work = backend.gather(None if out is None else as_bytes(out), as_bytes(wire), dst, call)

        def finish() -> list[Tensor] | None:
            return None if out is None else list(out.view(self.size, *x.shape).unbind(0))

        return self._finish(work, finish, call, guards, async_op)

    def scatter(
        self,
        parts: Sequence[Tensor] | None = None,
        src: int = 0,
        *,
        out: Tensor,
        async_op: bool = False,
        tag: str = "",
        kind: str = "step",
    ) -> Result:
        """`out` becomes, on rank r, `parts[r]` of rank `src`; the others pass None for `parts`. Returns `out`.

        Every part has `out`'s shape and dtype.
        """
        self._check("scatter", out, root=src, root_name="src")
        at_src = self.rank == src
        checks.parts(f"scatter over {self.label}", parts, out, self.size, at_src)
        backend = self._backend
        if backend is None:
            return self._now(copy_back(out, flat(parts[0])) if parts is not None else out, async_op)
        call = self._call("scatter", out, tag, kind, out.nbytes * self.size if at_src else 0, async_op, root=src)
        guarded = async_op and backend.guards
        whole = torch.cat([flat(part) for part in parts]) if parts is not None and at_src else None
        wire = flat(out, copy=guarded)
        guards: tuple[Guard, ...] = ()
        if guarded:
            guards = (*(Guard(part, call, writes=False) for part in parts or ()), Guard(out, call, writes=True))
        work = backend.scatter(as_bytes(wire), None if whole is None else as_bytes(whole), src, call)
        return self._finish(work, lambda: copy_back(out, wire), call, guards, async_op)

    # -- all to all ---------------------------------------------------------------------------------------------------

    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        tag: str = "",
        kind: str = "step",
    ) -> Result:
        """All ranks' `x` in rank order, concatenated along `dim`. Equal shapes; 0-d gives (size,)."""
        self._check("all_gather", x)
        if dim:
            dim = checks.dim(f"all_gather over {self.label}", x.view(1) if x.dim() == 0 else x, dim)
        shape = tuple(x.shape) or (1,)
        whole_shape = (len(self.ranks) * shape[0], *shape[1:])
        if out is not None:
            checks.out(f"all_gather over {self.label}", out, x, whole_shape, dim)
        backend = self._backend
        if backend is None:
            return self._now(new_copy(x).view(shape) if out is None else copy_back(out, flat(x)), async_op)
        call = self._call("all_gather", x, tag, kind, x.nbytes * self.size, async_op, dim=dim)
        if self._short is not None and not async_op and not dim and x.nbytes <= SHORT_BYTES:
            whole = x.new_empty(whole_shape) if out is None else out
            if self._short.all_gather(whole, x, call):
                return self._short_done(whole)
        guarded = async_op and backend.guards
        wire = flat(x, copy=guarded)
        guards = self._guards(x, out, call) if guarded else ()
        result = self._memory(out, wire, wire.numel() * self.size, guarded)
        work = backend.all_gather(as_bytes(result), as_bytes(wire), call)

        def finish() -> Tensor:
            if out is not None:
                return copy_back(out, result)
            if dim == 0:
                return result.view(whole_shape)
            return torch.cat(result.view(self.size, *shape).unbind(0), dim)

        return self._finish(work, finish, call, guards, async_op)

    def all_to_all(
        self,
        x: Tensor,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        tag: str = "",
        kind: str = "step",
    ) -> Result:
        """Rank r's j-th piece of `x` along dim 0 goes to rank j; the pieces received, in rank order.

        `input_splits[j]` rows go to rank j, `output_splits[i]` rows come from rank i; zeros are legal. Without both,
        pieces are equal.
        """
        self._check("all_to_all", x)
        where = f"all_to_all over {self.label}"
        ins, outs = checks.splits(where, x, input_splits, output_splits, self.size, self.rank)
        shape = (sum(outs), *x.shape[1:])
        if out is not None:
            checks.out(where, out, x, shape)
        backend = self._backend
        if backend is None:
            return self._now(new_copy(x) if out is None else copy_back(out, flat(x)), async_op)
        call = self._call(
            "all_to_all", x, tag, kind, x.nbytes, async_op, input_splits=tuple(ins), output_splits=tuple(outs)
        )
        guarded = async_op and backend.guards
        wire = flat(x, copy=guarded)
        guards = self._guards(x, out, call) if guarded else ()
        row = math.prod(x.shape[1:])
        result = self._memory(out, wire, shape[0] * row, guarded)
        out_wire, in_wire = as_bytes(result), as_bytes(wire)
        unit = row if in_wire.dtype == wire.dtype else row * wire.element_size()
        work = backend.all_to_all(out_wire, in_wire, [n * unit for n in outs], [n * unit for n in ins], call)

        def finish() -> Tensor:
            return result.view(shape) if out is None else copy_back(out, result)

        return self._finish(work, finish, call, guards, async_op)

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, *, async_op: bool = False, tag: str = "", kind: str = "step") -> Result:
        """Send `x` to rank `dst`. Sends to one rank arrive in order. May block until the peer receives."""
        self._check("send", x, root=dst, root_name="dst", peer=True)
        backend = self._transport()
        call = self._call("send", x, tag, kind, x.nbytes, async_op, peer=dst)
        guarded = async_op and backend.guards
        wire = flat(x, copy=guarded)
        guards = (Guard(x, call, writes=False),) if guarded else ()
        return self._finish(backend.send(as_bytes(wire), dst, call), lambda: None, call, guards, async_op)

    def recv(self, out: Tensor, src: int, *, async_op: bool = False, tag: str = "", kind: str = "step") -> Result:
        """Receive into `out` the next tensor that rank `src` sends here, of its shape and dtype. Returns `out`."""
        self._check("recv", out, root=src, root_name="src", peer=True)
        backend = self._transport()
        call = self._call("recv", out, tag, kind, 0, async_op, peer=src)
        guarded = async_op and backend.guards
        wire = flat(out, copy=guarded)
        guards = (Guard(out, call, writes=True),) if guarded else ()
        return self._finish(
            backend.recv(as_bytes(wire), src, call), lambda: copy_back(out, wire), call, guards, async_op
        )

    def exchange(
        self, x: Tensor, dst: int, out: Tensor, src: int, *, async_op: bool = False, tag: str = "", kind: str = "step"
    ) -> Result:
        """Send `x` to `dst` and receive `out` from `src` as one call, which cannot block itself in a ring or a pair.

        Counted as a send and a recv. Returns `out`.
        """
        self._check("exchange", x, root=dst, root_name="dst", peer=True)
        self._check("exchange", out, root=src, root_name="src", peer=True)
        backend = self._transport()
        send_call = self._call("send", x, tag, kind, x.nbytes, True, peer=dst)  # nobody waits for it alone
        sent = self._number
        recv_call = self._call("recv", out, tag, kind, 0, async_op, peer=src)
        guarded = async_op and backend.guards
        x_wire, out_wire = flat(x, copy=guarded), flat(out, copy=guarded)
        guards = (Guard(x, send_call, writes=False), Guard(out, recv_call, writes=True)) if guarded else ()
        work = backend.exchange(as_bytes(x_wire), dst, as_bytes(out_wire), src, send_call, recv_call)
        if self._observer is not None:
            work = ObservedWork(work, self._observer, sent)  # it is over when both are
        return self._finish(work, lambda: copy_back(out, out_wire), recv_call, guards, async_op)

    def barrier(self, *, async_op: bool = False, tag: str = "", kind: str = "step") -> Result:
        """Return when every rank of the group has called it."""
        self._member("barrier")
        backend = self._backend
        if backend is None:
            return self._now(None, async_op)
        call = self._call("barrier", None, tag, kind, 0, async_op)
        return self._finish(backend.barrier(call), lambda: None, call, (), async_op)
