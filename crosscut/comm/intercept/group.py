"""A process group that shows an observer each call before the inner group makes it, and what both are made of."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from crosscut.comm.call import Call
from crosscut.comm.dtypes import dtype_name
from crosscut.comm.intercept.calls import ANY, METHODS, Args, Described
from crosscut.comm.site import call_site

_Base: Any = dist.ProcessGroup  # its stub knows neither the constructor of subclasses nor all the names
_NONE = datetime.timedelta(0)


class Asked(NamedTuple):
    """A call that the program wants. `start`: make it, and get torch's work of it (a receive from any rank may be given
    the rank); `tensors`: what it reads and writes.
    """

    call: Call
    tensors: Sequence[torch.Tensor]
    start: Callable[..., Any]


class Running(Protocol):
    """A call that an observer has taken: perhaps not made yet."""

    @property
    def work(self) -> Any:
        """torch's work of it; None until it is made."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done; raises what went wrong. timeout_s: of this wait, if the caller gave one."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Observer(Protocol):
    """Who is told of the calls of intercepted groups, perhaps by several threads at once."""

    def on_call(self, group: InterceptedGroup, asked: Asked) -> Running:
        """The program makes a call: `asked.start()` it, at once, or later inside another call or a wait."""
        ...

    def on_done(self, group: InterceptedGroup, call: Call, error: BaseException | None) -> None:
        """The program has waited for the call, or has asked and been told that it is done. Once a call."""
        ...

    def on_close(self, group: InterceptedGroup) -> None:
        """The group ends."""
        ...


class Started:
    """The plainest `Running`: a call that was made at once."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, timeout_s: float | None = None) -> None:
        """Finish the call."""
        if self.work is not None:
            self.work.wait() if timeout_s is None else self.work.wait(datetime.timedelta(seconds=timeout_s))

    def done(self) -> bool:
        """Whether it is over. Gloo's sends and receives never say so before they are waited for."""
        return self.work is None or bool(self.work.is_completed())


class InterceptedGroup(_Base):
    """A process group that asks an observer before each call.

    `inner`: the group that does the work; `label`: its name for people; `ranks`: its members, of the world, in the
    group's order; `timeout_s`: of its calls.
    """

    def __init__(self, inner: Any, observer: Observer, label: str, ranks: Sequence[int]) -> None:
        _Base.__init__(self, inner.rank(), inner.size())
        self.inner, self.observer, self.label, self.ranks = inner, observer, label, tuple(ranks)
        self._num_calls = 0
        timeout = getattr(inner, "_timeout", None)  # of shm's groups
        kinds = dist.Backend.backend_type_map
        for device in inner._device_types:  # what torch asks a group for directly
            backend = inner._get_backend(device)
            kind = kinds.get(backend.name().lower(), dist.ProcessGroup.BackendType.CUSTOM)
            self._register_backend(device, kind, backend)
            self._set_default_backend(kind)
            timeout = timeout or getattr(getattr(backend, "options", None), "_timeout", None)
        self._set_group_name(inner.group_name)
        self._set_group_desc(inner.group_desc)
        if inner.bound_device_id is not None:
            self.bound_device_id = inner.bound_device_id
        self.timeout_s = (timeout or datetime.timedelta(minutes=30)).total_seconds()

    def backend_of(self, x: torch.Tensor | None) -> str:
        """Who serves a tensor (None: a barrier): "gloo", "nccl", "shm"."""
        inner = self.inner
        while isinstance(inner, InterceptedGroup):
            inner = inner.inner
        if type(inner) is not dist.ProcessGroup:
            return str(inner.name())
        return str(inner._get_backend(inner._device_types[0] if x is None else x.device).name()).lower()

    def _observe(self, op: str, told: Described, start: Callable[..., Any]) -> SeenWork:
        shapes: Any
        if len(told.shown) == 1:
            shapes, dtypes = tuple(told.shown[0].shape), dtype_name(told.shown[0].dtype)
        else:  # of a coalesced call, or none
            shapes = tuple(tuple(x.shape) for x in told.shown)
            dtypes = ",".join(dict.fromkeys(dtype_name(x.dtype) for x in told.shown))
        self._num_calls += told.peer is None
        call = Call(
            op,
            self.label,
            str(told.tag or ""),
            "step",
            call_site(),
            self._num_calls if told.peer is None else 0,
            shapes,
            dtypes,
            told.reduce_op,
            told.root,
            None,
            told.input_splits,
            told.output_splits,
            told.peer,
        )
        return SeenWork(self, call, self.observer.on_call(self, Asked(call, told.tensors, start)))

    # -- the rest of a group ------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # called from C++
        """The inner group's."""
        return str(self.inner.name())

    def name(self) -> str:
        """The inner group's."""
        return str(self.inner.name())

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long calls wait from now on."""
        self.timeout_s = timeout.total_seconds()
        self.inner.set_timeout(timeout)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.monitored_barrier(*args, **kwargs)

    def split_group(self, new_ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        made = self.inner.split_group(new_ranks, *args, **kwargs)
        ranks = [self.ranks[r] for r in new_ranks]
        return None if made is None else InterceptedGroup(made, self.observer, label_of(made), ranks)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.merge_remote_group(*args, **kwargs)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.inner._end_coalescing(device)

    def shutdown(self) -> None:
        """Called by `destroy_process_group`."""
        self.observer.on_close(self)
        self.inner.shutdown()

    def abort(self) -> None:
        """Give up at once."""
        self.observer.on_close(self)
        self.inner.abort()


def _method(name: str, op: str, read: Callable[[Args], Described]) -> Callable[..., SeenWork]:
    def method(self: InterceptedGroup, *args: Any, **kwargs: Any) -> SeenWork:
        told = read([*args, *kwargs.values()])

        def start(source: int = ANY) -> Any:
            if source != ANY and told.peer == ANY:
                return self.inner.recv(args[0], source, told.tag)
            return getattr(self.inner, name)(*args, **kwargs)

        return self._observe(op, told, start)

    method.__name__ = name
    return method


for _name, (_op, _read) in METHODS.items():
    setattr(InterceptedGroup, _name, _method(_name, _op, _read))


class SeenWork(dist.Work):
    """What the program gets back."""

    def __init__(self, group: InterceptedGroup, call: Call, running: Running) -> None:
        super().__init__()
        self._group, self._call, self._running = group, call, running
        self._told = self._over = False

    def wait(self, timeout: datetime.timedelta = _NONE) -> bool:
        """Finish the call; raises what went wrong. Again: returns at once (torch's receives would wait once more)."""
        if self._over:
            return True
        try:
            self._running.wait(timeout.total_seconds() if timeout > _NONE else None)
        except BaseException as error:
            self._tell(error)
            raise
        self._over = True
        self._tell(None)
        return True

    def _tell(self, error: BaseException | None) -> None:
        if not self._told:
            self._told = True
            self._group.observer.on_done(self._group, self._call, error)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is over."""
        done = self._running.done()
        if done and self._running.work is not None:
            self._tell(None)
        return done

    def is_success(self) -> bool:
        """Whether it is over and nothing went wrong."""
        return self.is_completed() and self._running.work is not None and bool(self._running.work.is_success())

    def exception(self) -> Any:
        """What went wrong, as far as torch says."""
        return self._running.work.exception() if self._running.work is not None else None

    def result(self) -> Any:
        """The tensors of the call."""
        self.wait()
        return self._running.work.result()

    def get_future(self) -> torch.futures.Future:
        """The future of the call, which is finished first: those who use futures (DDP) wait for them in C++, where an
        observer that has not started the call yet would never do so.
        """
        self.wait()
        future: torch.futures.Future = self._running.work.get_future()
        return future

    def _source_rank(self) -> int:
        self.wait()
        return int(self._running.work._source_rank())

    def source_rank(self) -> int:
        """Of a receive: the group rank that sent."""
        return self._source_rank()


def label_of(group: Any) -> str:
    """A group's name for people: its description, if the program gave one."""
    described = group.group_desc
    return described if described not in ("", "undefined", "default_pg") else f"group {group.group_name}"
