"""`crosscut.checked()`: checked mode for any PyTorch program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.call import Call
from crosscut.comm.checked.checker import Checker
from crosscut.comm.checked.room import Room
from crosscut.comm.checked.ticket import Ticket
from crosscut.comm.intercept import Asked, InterceptedGroup, Interception, Started, intercept

# Where Gloo takes the memory of a strided tensor for a dense one, and writes to what lies between, or sends it.
_GLOO_IGNORES_STRIDES = ("all_reduce", "broadcast", "reduce", "scatter", "reduce_scatter", "all_to_all_single")


def checked(group: Any = None, *, timeout_s: float | None = None) -> Checked:
    """Check every later call of a torch process group (default: the world) and of all groups made afterwards: before
    data move, the ranks compare op, reduction, root, shapes, dtypes, splits and order, and raise MismatchError on every
    rank, naming ranks, calls and places in the code. For any program on Gloo, shm or NCCL, after
    `init_process_group` and before models and meshes are made:

        torch.distributed.init_process_group("gloo")
        crosscut.checked()

    Every rank calls it. timeout_s: how long a call waits for the ranks that have not made it (default: as long as the
    group's calls), until StuckError names them. Returns an object whose `close()` ends the checking; also a context
    manager. On Gloo, strided tensors whose neighbours it would overwrite are a ValueError.

    Raises ValueError without a process group, and for a group that is checked already.
    """
    return Checked(group, timeout_s)


class Checked:
    """The observer behind `checked`."""

    def __init__(self, group: Any, timeout_s: float | None) -> None:
        found = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
        if isinstance(found, InterceptedGroup) and isinstance(found.observer, Checked):
            raise ValueError("checked: this group is checked already; close() what the first call returned")
        self._timeout_s = timeout_s
        self._rooms: dict[InterceptedGroup, Room] = {}
        self._grouped: dict[InterceptedGroup, list[_Grouped]] = {}
        self._closed = False
        self._interception: Interception = intercept(self, found)
        first = self._interception.group
        seconds = first.timeout_s if timeout_s is None else timeout_s
        store = dist.distributed_c10d._get_default_store()
        self._checker = Checker(store, dist.get_rank(), dist.get_world_size(), seconds)

    @property
    def num_calls(self) -> int:
        """How many calls of this rank were compared."""
        return self._checker.post.calls

    # -- the observer -------------------------------------------------------------------------------------------------

    def on_call(self, group: InterceptedGroup, asked: Asked) -> _Compared:
        """Tell the others of a call; it starts when they have agreed."""
        call = asked.call
        first = asked.tensors[0] if asked.tensors else None
        if call.op in _GLOO_IGNORES_STRIDES and group.backend_of(first) == "gloo":
            _refuse_strided(asked)
        checker = self._checker
        with checker.lock:
            room = self._rooms.get(group)
            if room is None:
                seconds = group.timeout_s if self._timeout_s is None else self._timeout_s
                room = self._rooms[group] = checker.room(group.group_name, group.label, group.ranks, seconds)
            on_gpu = first is not None and first.device.type == "cuda"
            if call.peer is None:
                ticket = room.collective(call, lambda: Started(asked.start()))
            else:
                tag = int(call.tag or 0)
                make: Callable[..., Any] = asked.start
                begin = (lambda *source: self._group_up(group, first, make, source)) if on_gpu else _plainly(make)
                issue = room.send if call.op == "send" else room.receive
                ticket = issue(call, begin, call.peer, tag)
        if on_gpu and call.peer is None:  # kernels run in the order of issue, which must be the program's
            checker.wait(ticket, room.timeout_s, only_start=True)
        return _Compared(ticket)

    def on_done(self, group: InterceptedGroup, call: Call, error: BaseException | None) -> None:
        """Nothing to do."""

    def on_close(self, group: InterceptedGroup) -> None:
        """A group ends; the world's end is the end of all."""
        room = self._rooms.pop(group, None)
        if room is not None:
            self._checker.leave(room)
        if group.label == "world":
            self._end()

    def close(self) -> None:
        """End the checking: the groups are torch's own again. Calls under way must have been waited for."""
        self._interception.close()
        self._end()

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._checker.close(failed=False)

    def __enter__(self) -> Checked:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- messages on GPUs ---------------------------------------------------------------------------------------------

    def _group_up(self, group: InterceptedGroup, x: Any, make: Callable[..., Any], source: tuple[int, ...]) -> _Grouped:
        """NCCL must be told at once of messages that belong together: they are kept until one of them is waited for."""
        waiting = self._grouped.setdefault(group, [])
        grouped = _Grouped(waiting, group.inner, x.device, lambda: make(*source))
        waiting.append(grouped)
        return grouped


class _Compared:
    """A call as its ticket knows it: a `Running` of `crosscut.comm.intercept`."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    @property
    def work(self) -> Any:
        return self._ticket.work.work if self._ticket.work is not None else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Finish the call."""
        self._ticket.wait(timeout_s)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ticket.done()


class _Grouped:
    """A send or a receive on a GPU, agreed and not made yet."""

    def __init__(self, waiting: list[_Grouped], inner: Any, device: torch.device, make: Callable[[], Any]) -> None:
        self._waiting, self._inner, self._device, self._make = waiting, inner, device, make
        self.work: Any = None

    def wait(self) -> None:
        """Make it, with all that wait beside it, and wait for it (on the GPU's stream)."""
        if self.work is None:
            together = list(self._waiting)
            self._waiting.clear()
            self._inner._start_coalescing(self._device)
            for one in together:
                one._make()
            work = self._inner._end_coalescing(self._device)
            for one in together:
                one.work = work
        self.work.wait()

    def done(self) -> bool:
        return self.work is not None and bool(self.work.is_completed())


def _plainly(make: Callable[..., Any]) -> Callable[..., Started]:
    return lambda *source: Started(make(*source))


def _refuse_strided(asked: Asked) -> None:
    for x in asked.tensors:
        if x.layout == torch.strided and not x.is_contiguous():
            raise ValueError(
                f"{asked.call.where()}: a tensor of shape {tuple(x.shape)} has strides {tuple(x.stride())}: Gloo would "
                f"read and write what lies between its elements; use x.contiguous() and copy back, or the shm back end"
            )
