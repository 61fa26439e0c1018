"""What every call of a `Group` is made of: its members, the checks, numbering and counting, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from crosscut.comm import checks
from crosscut.comm.backends.base import Backend, ShortCalls, Work
from crosscut.comm.call import Call
from crosscut.comm.dtypes import check_reduction, dtype_name, flat, from_wire
from crosscut.comm.guards import Guard
from crosscut.comm.handle import Handle, Pending
from crosscut.comm.ledger import Entry, Ledger
from crosscut.comm.observe import MAX_FORMS, ObservedWork, Observer
from crosscut.comm.site import call_site

T = TypeVar("T")
Tensor = torch.Tensor
Result = Any  # what the docstring says; with async_op=True a `Handle` of it


class Form(NamedTuple):
    """What calls that differ in nothing but their number have in common: made once, since a short call costs what its
    Python costs.
    """

    entry: Entry
    before_seq: tuple[Any, ...]  # of a `Call`
    after_seq: tuple[Any, ...]
    mark: Any  # the observer's


class GroupBase:
    """The members of a group and the parts of a call; `crosscut.comm.group.Group` adds the calls."""

    def __init__(
        self,
        backend: Backend | None,
        *,
        label: str,
        ranks: Sequence[int],
        global_rank: int,
        device: torch.device,
        ledger: Ledger,
        pending: Pending,
    ) -> None:
        self.label = label
        self.ranks = tuple(ranks)
        self.global_rank = global_rank
        self.device = device
        self.ledger = ledger
        self._backend = backend
        self._short: ShortCalls | None = getattr(backend, "short", None)
        self._pending = pending
        self._forms: dict[tuple[Any, ...], Form] = {}
        self._observer: Observer | None = None
        self._lane = self._number = 0  # the group's and the last call's, as the observer knows them
        self._on_cpu = device.type == "cpu"
        self._reducible: set[tuple[str, torch.dtype]] = set()  # what has passed the check
        self.rank = self.ranks.index(global_rank) if global_rank in self.ranks else -1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group({self.label or 'self'!r}, ranks={self.ranks}, rank={self.rank})"

    @property
    def transport(self) -> Backend | None:
        """What its calls go over, shared with groups of the same ranks; None in a group of one rank."""
        return self._backend

    def observe(self, observer: Observer, lane: int) -> None:
        """Tell `observer` of every later call, as one of `lane`."""
        self._observer, self._lane = observer, lane
        self._forms.clear()

    def _member(self, name: str) -> None:
        if self.rank < 0:
            raise ValueError(
                f"{name} over {self.label}: rank {self.global_rank} is not a member of this group (ranks "
                f"{','.join(map(str, self.ranks))}); call it on the members only"
            )

    def _check(
        self,
        name: str,
        x: Tensor,
        *,
        op: str | None = None,
        root: int | None = None,
        root_name: str = "src",
        peer: bool = False,
    ) -> None:
        """Everything that can be wrong with a call on this rank alone."""
        plain = type(x) is Tensor and x.is_cpu and self._on_cpu and x.layout is torch.strided
        if plain and self.rank >= 0 and root is None and (op is None or (op, x.dtype) in self._reducible):
            return  # nearly every call: no text is made
        self._member(name)
        where = f"{name} over {self.label or 'self'}"
        checks.tensor(where, x, self.device)
        if op is not None:
            check_reduction(op, x.dtype, where)
            self._reducible.add((op, x.dtype))
        if root is not None:
            checks.member(where, root_name, root, self.ranks, self.rank if peer else None)

    def _transport(self) -> Backend:
        assert self._backend is not None  # a peer other than itself exists, so the group has one
        return self._backend

    def _call(
        self,
        op: str,
        x: Tensor | None,
        tag: str,
        kind: str,
        num_bytes: int,
        is_async: bool,
        *,
        reduce_op: str | None = None,
        root: int | None = None,
        dim: int | None = None,
        peer: int | None = None,
        input_splits: tuple[int, ...] | None = None,
        output_splits: tuple[int, ...] | None = None,
    ) -> Call:
        """Number the call, count it and tell the observer. From here on it is made: every check is behind it."""
        if kind != "step" and kind != "control":
            checks.kind(f"{op} over {self.label}", kind)
        if self.ledger.all_control:
            kind = "control"
        shape, dtype = ((), None) if x is None else (x.shape, x.dtype)
        key = (
            op,
            shape,
            dtype,
            tag,
            kind,
            call_site(),
            is_async,
            reduce_op,
            root,
            dim,
            input_splits,
            output_splits,
            peer,
        )
        form = self._forms.get(key) or self._new_form(key, num_bytes)
        seq = self._transport().next_seq() if peer is None else 0
        self.ledger.record(form.entry, seq)
        if self._observer is not None:
            self._number = self._observer.begin(form.mark, seq)
        return Call._make((*form.before_seq, seq, *form.after_seq))

    def _new_form(self, key: tuple[Any, ...], num_bytes: int) -> Form:
        op, size, dtype, tag, kind, site, is_async, reduce_op, *rest = key
        shape, name = tuple(size), "" if dtype is None else dtype_name(dtype)
        entry = Entry(kind, tag, self.label, op, num_bytes, shape, name, reduce_op, 0, site)
        before, after = (op, self.label, tag, kind, site), (shape, name, reduce_op, *rest)
        mark = None
        if self._observer is not None:
            mark = self._observer.mark(self._lane, Call(*before, 0, *after), num_bytes, is_async)
        if len(self._forms) >= MAX_FORMS:  # shapes that change for ever
            self._forms.clear()
        form = self._forms[key] = Form(entry, before, after, mark)
        return form

    def _memory(self, out: Tensor | None, wire: Tensor, numel: int, private: bool) -> Tensor:
        """Flat memory for a result that travels like `wire`: that of `out` where it fits."""
        return wire.new_empty(numel) if out is None or private or out.dtype != wire.dtype else flat(out)

    def _guards(self, x: Tensor, out: Tensor | None, call: Call) -> tuple[Guard, ...]:
        """For a call that reads `x` and writes `out`."""
        return (Guard(x, call, writes=False), *(() if out is None else (Guard(out, call, writes=True),)))

    def _store(self, x: Tensor, wire: Tensor, op: str) -> Tensor:
        """Put a reduced wire tensor back into `x`."""
        if op != "avg" and wire.dtype == x.dtype and wire.data_ptr() == x.data_ptr() and x.is_contiguous():
            return x
        with torch.no_grad():
            x.detach().copy_(from_wire(wire, x.dtype, tuple(x.shape), op, self.size))
        return x

    def _now(self, result: T, async_op: bool) -> Result:
        """The result of a call in a group of one rank."""
        return Handle(None, lambda: result) if async_op else result

    def _finish(
        self, work: Work, finish: Callable[[], T], call: Call, guards: tuple[Guard, ...], async_op: bool
    ) -> Result:
        observer = self._observer
        if async_op:
            if observer is not None:
                work = ObservedWork(work, observer, self._number)
            return Handle(work, finish, guards=guards, pending=self._pending, call=call)
        work.wait()
        if observer is not None:
            observer.complete(self._number)
        return finish()

    def _short_done(self, result: T) -> T:
        """The result of a short call, which is over."""
        if self._observer is not None:
            self._observer.complete(self._number)
        return result


def new_copy(x: Tensor) -> Tensor:
    """A detached contiguous copy."""
    return flat(x, copy=True).view(x.shape)


def copy_back(x: Tensor, wire: Tensor) -> Tensor:
    """Put a flat tensor of x's dtype back into `x`, unless it is x's own memory."""
    if not (x.is_contiguous() and wire.data_ptr() == x.data_ptr()):
        with torch.no_grad():
            x.detach().copy_(wire.view(x.shape))
    return x
