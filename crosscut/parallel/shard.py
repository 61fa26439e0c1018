"""Shards: parameters kept cut over ranks between uses, made whole for a use; their gradients summed back into shards.

The mechanics of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and FSDP (Zhao et al. 2023, arXiv:2304.11277) without
any policy: sharder.py says when, store.py for which parameters of a layout.

A `Unit` is a few parameters that are gathered in one call. N ranks divide dim 0 of each as torch.chunk does. On the
wire every rank's share of a parameter is padded to one width, and S is the sum of the widths:

    a rank's shards, flat (S)      w | b ...                  the shards are views of it
    all_gather gives (N, S)        row r holds rank r's shards
    the whole, flat                w w w | b b b ...          no padding; the module's Parameters are views of it

The whole is let go by shrinking its storage to no bytes and filled again in place: autograd keeps views of it and sees
the values again. (To drop the Parameters would free nothing.)

Where the whole is narrower than the shards (`compute`), these are the master weights: what an optimizer adds to a
number may be less than half a unit in the last place of the narrow dtype, and would be lost there (Micikevicius et al.
2018, arXiv:1710.03740, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from crosscut.comm.group import Group, Handle
from crosscut.layout.plan import own_rows
from crosscut.parallel.chunks import collect, spread
from crosscut.parallel.data import put_back

Owner = tuple[nn.Module, str]  # a module and the attribute of it that a Parameter is; a tied one has several


@dataclass(frozen=True)
class Member:
    """One parameter to shard.

    Either it stays whole between uses (ZeRO-1 and 2) and `whole` is its Parameter; or it is kept cut (ZeRO-3): `rows`
    are this rank's rows of it (see `rows_of`) and `shape` that of the whole. rest: where its gradient, once reduced
    over the unit's group, must be summed further.
    """

    name: str
    whole: nn.Parameter | None = None
    rows: Tensor | None = None
    shape: tuple[int, ...] = ()
    owners: tuple[Owner, ...] = ()
    rest: Group | None = None


def rows_of(whole: Tensor, group: Group) -> Tensor:
    """This rank's share of dim 0 of `whole`: ceil(dim 0 / N) rows, the last ranks fewer or none. A view."""
    first, last = own_rows(whole.size(0), group.rank, group.size)
    return whole.detach()[first:last]


@dataclass(frozen=True)
class Piece:
    """A parameter within its unit. Its part of the flat shard is `width` numbers from `first` on, padding included.

    whole: what the module computes with; shard: this rank's rows, what an optimizer works on.
    """

    name: str
    whole: nn.Parameter
    shard: nn.Parameter
    first: int
    width: int
    owners: tuple[Owner, ...]
    rest: Group | None

    def of(self, flat: Tensor) -> Tensor:
        """Its columns of an (N, S) or (S,) tensor (a view)."""
        return flat.narrow(-1, self.first, self.width)

    def own(self, flat: Tensor) -> Tensor:
        """Its rows in an (S,) tensor, without padding, in the shape of the shard (a view)."""
        return flat[self.first : self.first + self.shard.numel()].view(self.shard.shape)


class Unit:
    """Parameters of one group, dtype and requires_grad, gathered together and their gradients reduced together.

    members: all kept whole, or all kept cut. 0-d parameters cannot be cut and are no members.
    compute: the dtype of the whole (default: the rows'); shards are cast before they are sent.
    reduce: the dtype in which gradients travel (default: the rows'). They add up in it, or in the rows' if that is
    wider.
    average: divide the summed gradients by the number of ranks.

    Every method but `release`, `keep`, `publish` is collective over `group`, in the same order on all of its ranks.
    """

    marks = 0  # numbers that a rank's row of gradients carries beside them

    def __init__(
        self,
        members: Sequence[Member],
        group: Group,
        *,
        compute: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        average: bool = False,
        requires_grad: bool = True,
    ) -> None:
        self.group, self.requires_grad = group, requires_grad
        self.keeps_whole = members[0].whole is not None
        self._average = average
        self.pieces = (self._wholes if self.keeps_whole else self._shards)(members, compute)
        self.width = sum(p.width for p in self.pieces)
        master = self.pieces[0].shard.dtype
        self._reduce_dtype = reduce if reduce is not None else master
        self._sum_dtype = torch.promote_types(self._reduce_dtype, master)
        self.is_whole = self.keeps_whole  # the Parameters hold all rows
        self._versions = self.versions()  # when they last did on all ranks alike
        self.grad: Tensor | None = None  # reduced gradients not yet published, flat (S)
        self._kept: Tensor | None = None  # gradients that wait for the reduction, (N, S and marks)
        self._gathering: Handle[Tensor] | None = None
        self._reducing: Handle[Tensor] | None = None
        self._summing: list[tuple[Tensor, Handle[Tensor]]] = []  # parts of `grad`, and what they become
        self._rests = [(rest, list(run)) for rest, run in groupby(self.pieces, lambda p: p.rest) if rest is not None]

    def _wholes(self, members: Sequence[Member], compute: torch.dtype | None) -> list[Piece]:
        """Shards are views of their rows of the Parameters: they cost nothing. Where the whole is to have another
        dtype, it is another Parameter, and the shards are what is left of the one that was given."""
        pieces, first = [], 0
        for m in members:
            assert m.whole is not None
            whole, rows = m.whole, rows_of(m.whole, self.group)
            if compute is not None and compute != whole.dtype:
                whole, rows = nn.Parameter(whole.detach().to(compute), self.requires_grad), rows.clone()
            width = self._width(tuple(whole.shape))
            pieces.append(Piece(m.name, whole, nn.Parameter(rows, self.requires_grad), first, width, m.owners, m.rest))
            first += width
        return pieces

    def _shards(self, members: Sequence[Member], compute: torch.dtype | None) -> list[Piece]:
        """One flat tensor that the shards view, and one that the Parameters view while they are whole.

        `.data` gives a view a version counter of its own: filling the storage again is no change that autograd should
        refuse to go back through.
        """
        rows = [m.rows for m in members if m.rows is not None]
        widths = [self._width(m.shape) for m in members]
        numbers = [torch.Size(m.shape).numel() for m in members]
        self._flat = rows[0].new_zeros(sum(widths))
        self._whole = rows[0].new_empty(sum(numbers), dtype=compute if compute is not None else rows[0].dtype)
        pieces, first = [], 0
        for m, own, width, whole in zip(members, rows, widths, self._whole.split(numbers), strict=True):
            part = self._flat[first : first + own.numel()].view(own.shape)
            part.copy_(own)
            parameter = nn.Parameter(whole.view(m.shape).data, self.requires_grad)
            shard = nn.Parameter(part.data, self.requires_grad)
            pieces.append(Piece(m.name, parameter, shard, first, width, m.owners, m.rest))
            first += width
        self._whole.untyped_storage().resize_(0)
        return pieces

    def _width(self, shape: tuple[int, ...]) -> int:
        return own_rows(shape[0], 0, self.group.size)[1] * torch.Size(shape[1:]).numel()

    # ---- parameters -----------------------------------------------------------------------------------------------

    def start_gather(self, tag: str = "") -> None:
        """Begin the all_gather of the shards, unless the whole is there or on its way."""
        if not self.is_whole and self._gathering is None:
            out = self._filled() if self._is_one_block(self.pieces[0].whole) and not self.keeps_whole else None
            self._gathering = self.group.all_gather(self._to_send(), out=out, async_op=True, tag=tag)

    def gather(self, tag: str = "") -> None:
        """Make the parameters whole: they hold all rows and stand in the modules."""
        if self.is_whole:
            return
        self.start_gather(tag)
        assert self._gathering is not None
        arrived, self._gathering = self._gathering.wait(), None
        if self.keeps_whole or arrived.data_ptr() != self._whole.data_ptr():
            chunks = arrived.view(self.group.size, -1)
            if not self.keeps_whole:
                self._filled()
            with torch.no_grad():
                for p in self.pieces:
                    collect(p.of(chunks), p.whole if self.keeps_whole else p.whole.data)
        if not self.keeps_whole:
            self.put(whole=True)
        self.is_whole = True
        self._versions = self.versions()

    def release(self) -> None:
        """Let the whole of what is kept cut go; its shards stand in the modules."""
        if self.keeps_whole:
            return
        if self._gathering is not None:  # prefetched and never used
            self._gathering.wait()
            self._gathering = None
        self._whole.untyped_storage().resize_(0)
        self.is_whole = False
        self.put(whole=False)

    def _filled(self) -> Tensor:
        """The flat whole, with memory."""
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.element_size())
        return self._whole

    def _is_one_block(self, whole: Tensor) -> bool:
        """Whether `whole` is all there is and needs no padding: then it is on the wire as it lies in memory."""
        return len(self.pieces) == 1 and whole.is_contiguous() and whole.numel() == self.group.size * self.width

    def shards_changed(self) -> None:
        """The shards of what is kept whole were updated: the whole is stale until the next `gather`."""
        if self.keeps_whole:
            self.is_whole = False

    def changed(self) -> str | None:
        """The name of a parameter, kept whole, that this rank changed and did not gather; None if there is none."""
        if not self.keeps_whole:
            return None
        found = zip(self.pieces, self._versions, self.versions(), strict=True)
        return next((p.name for p, before, now in found if before != now), None)

    def versions(self) -> list[int]:
        """How often each parameter, or its shard, was written to."""
        return [p.whole._version + p.shard._version for p in self.pieces]

    def _to_send(self) -> Tensor:
        """This rank's row of the gathered (N, S), in the dtype of the whole."""
        if not self.keeps_whole:
            return self._flat.to(self._whole.dtype)
        row = torch.zeros(self.width, dtype=self.pieces[0].whole.dtype, device=self.group.device)
        for p in self.pieces:
            p.own(row).copy_(p.shard.detach())
        return row

    def put(self, *, whole: bool) -> None:
        """Let the whole Parameters, or their shards, stand in the modules."""
        for p in self.pieces:
            for module, leaf in p.owners:
                module._parameters[leaf] = p.whole if whole else p.shard

    # ---- gradients ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def keep(self) -> list[bool]:
        """Move the whole gradients to where they wait for the reduction and add up, in its dtype or the shards'.
        Returns which of them there were."""
        fresh, given = self._kept is None, []
        if self._kept is None:
            shape = self.group.size, self.width + self.marks
            self._kept = torch.empty(shape, dtype=self._sum_dtype, device=self.group.device)
        for p in self.pieces:
            grad, p.whole.grad = p.whole.grad, None
            column = p.of(self._kept)
            if fresh:
                spread(grad, column)
            elif grad is not None:
                part = torch.empty_like(column, memory_format=torch.contiguous_format)
                spread(grad, part)
                column += part
            given.append(grad is not None)
        return given

    def keep_narrow(self) -> None:
        """A backward is over and its gradients are not to be reduced yet: those narrower than their sum should be are
        kept, or they would add up in the narrow dtype."""
        if self.requires_grad and self.pieces[0].whole.dtype != self._sum_dtype:
            self.keep()

    def start_reduce(self, tag: str = "") -> None:
        """Begin the reduce_scatter of the whole gradients, which are let go. One that did not come counts as zeros."""
        grad = self.pieces[0].whole.grad
        if self._kept is None and grad is not None and grad.dtype == self._reduce_dtype and self._is_one_block(grad):
            chunks, self.pieces[0].whole.grad = grad, None
        else:
            chunks = self._take_kept()
        op = "avg" if self._average else "sum"
        self._reducing = self.group.reduce_scatter(chunks.view(-1), op=op, async_op=True, tag=tag)

    def _take_kept(self) -> Tensor:
        """All gradients so far, as they travel."""
        self.keep()
        chunks, self._kept = self._kept, None
        assert chunks is not None
        return chunks.to(self._reduce_dtype)

    def finish_reduce(self) -> None:
        """Wait for the reduce_scatter under way, if any, and add its result to `grad`."""
        if self._reducing is not None:
            part, self._reducing = self._reducing.wait(), None
            self.grad = part.to(self._sum_dtype) if self.grad is None else self.grad.add_(part)

    def start_sums(self, tag: str = "") -> None:
        """Begin the further sums of `grad`, over each piece's `rest`."""
        assert self.grad is not None
        for rest, run in self._rests:
            part = self.grad[run[0].first : run[-1].first + run[-1].width]
            self._summing.append((part, rest.all_reduce(part.to(self._reduce_dtype), async_op=True, tag=tag)))

    def finish_sums(self) -> None:
        """Wait for them."""
        for part, handle in self._summing:
            put_back(handle.wait(), part)
        self._summing.clear()

    def forget_gradients(self) -> None:
        """Let go what is not published."""
        self.finish_sums()
        self.grad = self._kept = None
        for p in self.pieces:
            p.whole.grad = None

    def publish(self) -> None:
        """Add what was reduced to the shards' `.grad`."""
        if self.grad is not None:
            for p in self.pieces:
                grad = p.own(self.grad).to(p.shard.dtype)
                p.shard.grad = grad if p.shard.grad is None else p.shard.grad.add_(grad)
            self.grad = None
