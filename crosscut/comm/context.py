"""`Context`: what a rank's function is handed. Who am I, whom can I talk to, over which groups of the mesh."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from crosscut.comm.backends.base import World
from crosscut.comm.errors import CommError, MismatchError, ranks_text
from crosscut.comm.group import Group
from crosscut.comm.handle import Pending
from crosscut.comm.ledger import Ledger
from crosscut.comm.objects import all_gather_object
from crosscut.comm.observe import Observer

if TYPE_CHECKING:
    from crosscut.layout.mesh import Mesh

Axes = str | Sequence[str]


class Context:
    """One rank of a running world.

    rank, world_size, local_rank; device; backend ("threads", "shm", "gloo", "nccl") and backend_why; threads (of torch,
    this rank) and threads_why; check_why: why the ranks' calls are compared, "" if they are not; world: the `Group` of
    all ranks; ledger: what this rank has communicated; mesh: None until `set_mesh`.
    """

    def __init__(
        self,
        transport: World,
        *,
        local_rank: int | None = None,
        backend_why: str = "",
        threads: int = 1,
        threads_why: str = "",
        check_why: str = "",
    ) -> None:
        self.rank = transport.rank
        self.world_size = transport.size
        self.local_rank = transport.rank if local_rank is None else local_rank
        self.device = transport.device
        self.backend = transport.name
        self.backend_why = backend_why
        self.threads = threads
        self.threads_why = threads_why
        self.check_why = check_why
        self.ledger = Ledger(self.rank, self.world_size)
        self.mesh: Mesh | None = None
        self._transport = transport
        self._pending = Pending()
        self._groups: dict[tuple[str, int], Group] = {}
        self._closed = False
        self._connected: list[Group] = []  # every group that was made and has others in it
        self._observer: Observer | None = None
        self.world = self._group((tuple(range(self.world_size)),), "world")

    def __repr__(self) -> str:
        return f"Context(rank={self.rank}, world_size={self.world_size}, backend={self.backend!r})"

    @property
    def transport(self) -> World:
        """The ranks' connection, on which another context can be made: one context has one mesh."""
        return self._transport

    # -- groups -------------------------------------------------------------------------------------------------------

    def set_mesh(self, mesh: Mesh, group_axes: Iterable[Sequence[str]] = ()) -> None:
        """Name the ranks by `mesh` and make its groups. Collective: the same call on every rank.

        Made are the group of every axis (size > 1), of every axis set in `group_axes`, of all axes together, and a
        second channel over pp. Raises ValueError if the mesh has another size than the world.
        """
        if mesh.world_size != self.world_size:
            sizes = ",".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1) or "1 rank"
            raise ValueError(
                f"mesh {sizes} has {mesh.world_size} ranks, the world has {self.world_size}; make them equal"
            )
        large = tuple(axis for axis in mesh.axes if mesh.size(axis) > 1)
        wanted: dict[tuple[str, ...], None] = {(axis,): None for axis in large}
        for axes in group_axes:
            wanted[tuple(axis for axis in mesh.axes if axis in axes and mesh.size(axis) > 1)] = None
        wanted[large] = None
        wanted.pop((), None)
        plans = [(axes, 0) for axes in wanted] + ([(("pp",), 1)] if "pp" in large else [])
        self._agree("set_mesh", [(mesh.label(axes), mesh.partition(axes), channel) for axes, channel in plans])
        self.mesh = mesh
        self._groups = {}
        for axes, channel in plans:
            label = mesh.label(axes)
            self._groups[label, channel] = self._group(mesh.partition(axes), label, channel)

    def group(self, axes: Axes, *, channel: int = 0) -> Group:
        """This rank's group over `axes`: "tp", "dp+tp" or ("dp", "tp"). Axes of size 1 are dropped; none left: a group
        of this rank alone. `channel=1`: a second communicator over pp, so that both directions go independently.

        Raises ValueError for an unknown axis, and for a set of axes that `set_mesh` was not told of.
        """
        if self.mesh is None:
            raise ValueError(f"group({axes!r}): this context has no mesh; call ctx.set_mesh(mesh) first")
        names = tuple(name for name in axes.split("+") if name) if isinstance(axes, str) else tuple(axes)
        for name in names:
            if name not in self.mesh.axes:
                raise ValueError(f"group({axes!r}): axis {name!r} is unknown; use one of {', '.join(self.mesh.axes)}")
        label = self.mesh.label(tuple(name for name in names if self.mesh.size(name) > 1))
        if not label:
            return self._alone()
        if (label, channel) not in self._groups:
            known = ", ".join(f"{name}" + (f" (channel {c})" if c else "") for name, c in self._groups)
            raise ValueError(
                f"group({axes!r}): no group over {label}{f' on channel {channel}' if channel else ''} was made, only "
                f"{known}; name it in set_mesh(mesh, group_axes=...)"
            )
        return self._groups[label, channel]

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on every axis of the mesh."""
        if self.mesh is None:
            raise ValueError("coords: this context has no mesh; call ctx.set_mesh(mesh) first")
        return dict(self.mesh.coords(self.rank))

    def new_group(self, ranks: Sequence[int], label: str) -> Group:
        """A group of any ranks (global, ascending), apart from the mesh. Collective over the world: also ranks outside
        it call this; what they get raises ValueError when used.
        """
        ranks = tuple(ranks)
        if not ranks or list(ranks) != sorted(set(ranks)):
            raise ValueError(f"new_group {label!r}: ranks={list(ranks)} must be ascending, each once, at least one")
        if ranks[0] < 0 or ranks[-1] >= self.world_size:
            raise ValueError(f"new_group {label!r}: ranks={list(ranks)} must lie within 0 to {self.world_size - 1}")
        self._agree("new_group", (ranks, label))
        return self._group((ranks,), label)

    def _group(self, partition: tuple[tuple[int, ...], ...], label: str, channel: int = 0) -> Group:
        """Collective, unless all parts are single ranks."""
        backend = None if max(map(len, partition)) == 1 else self._transport.group(partition, channel)
        ranks = next((part for part in partition if self.rank in part), partition[0])
        group = self._make(backend, label, ranks)
        if backend is not None:
            self._connected.append(group)
            if self._observer is not None:
                self._tell(self._observer, group)
        return group

    def _alone(self) -> Group:
        return self._make(None, "", (self.rank,))

    def _make(self, backend: Any, label: str, ranks: Sequence[int]) -> Group:
        return Group(
            backend,
            label=label,
            ranks=ranks,
            global_rank=self.rank,
            device=self.device,
            ledger=self.ledger,
            pending=self._pending,
        )

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every later call, in the groups that were made and in those that will be."""
        self._observer = observer
        for group in self._connected:
            self._tell(observer, group)

    def _tell(self, observer: Observer, group: Group) -> None:
        same = dict.fromkeys(g.transport for g in self._connected if g.ranks == group.ranks)
        group.observe(observer, observer.lane(group.label, group.ranks, list(same).index(group.transport)))

    def _agree(self, name: str, value: Any) -> None:
        """Raise MismatchError unless every rank calls with the same value: else torch would wait for ever."""
        values = self.all_gather_object(value, tag=name)
        odd = [rank for rank, other in enumerate(values) if other != values[0]]
        if odd:
            raise MismatchError(
                f"{name}: {ranks_text(odd)} asked for other groups than rank 0: {values[odd[0]]} instead of "
                f"{values[0]}; call it with the same arguments on every rank"
            )

    # -- small talk between ranks (kind "control") --------------------------------------------------------------------

    def barrier(self, *, tag: str = "barrier") -> None:
        """Return when every rank has called it."""
        self.world.barrier(tag=tag, kind="control")

    def decide(self, flag: bool, *, tag: str = "decide") -> bool:
        """True on every rank if `flag` is true on any. For every conditional decision (skip, stop, save): a rank that
        decided alone would leave the others waiting.
        """
        value = torch.tensor(int(bool(flag)), dtype=torch.int32, device=self.device)
        return bool(self.world.all_reduce(value, op="max", tag=tag, kind="control").item())

    def all_gather_object(self, value: Any, *, tag: str = "objects") -> list[Any]:
        """Every rank's `value`, in rank order. Pickled: for small plain things among one's own ranks."""
        return all_gather_object(self.world, value, tag=tag)

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """Print every rank's line, in rank order. Collective: every rank calls it (`values` may be empty: no line)."""
        text = io.StringIO()
        if values:
            print(*values, sep=sep, end=end, file=text)
        lines = self.all_gather_object(text.getvalue(), tag="print")
        if self.rank == 0:
            sys.stdout.write("".join(lines))
            sys.stdout.flush()

    # -- life ---------------------------------------------------------------------------------------------------------

    def claim_module(self, module: torch.nn.Module) -> None:
        """Say that this rank owns `module`: another rank of the same process that uses it gets a ValueError, since both
        would add into the same `.grad`. Without effect where ranks are processes.
        """
        self._transport.claim(module)

    def close(self, *, failed: bool = False) -> None:
        """Destroy the groups. Raises CommError if an async call was never waited for. Collective; called by `spawn`.

        `failed`: this rank leaves by an exception, and nothing more is said.
        """
        if self._closed:
            return
        self._closed = True
        left = self._pending.text() if len(self._pending) and not failed else ""
        self._transport.close(failed or bool(left))
        if left:
            raise CommError(left)
