"""What torch.distributed gets back from a call: a `Work` whose operations run when somebody waits."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.shm.operation import Operation
from crosscut.comm.shm.station import Station

_NONE = datetime.timedelta(0)


class ShmWork(dist.Work):
    """One call of torch.distributed, made of one or more operations; `tensors` is what `result()` gives."""

    def __init__(self, operations: Sequence[Operation], tensors: list[Any]) -> None:
        super().__init__()
        self._operations = operations
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta = _NONE) -> bool:
        """Finish the call; raises what went wrong. `timeout`: this long without anything moving, if positive."""
        for operation in self._operations:
            if timeout > _NONE and not operation.finished:
                operation.timeout_s = timeout.total_seconds()
            operation.wait()
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is over, after doing this rank's part as far as it goes."""
        return all(operation.done() for operation in self._operations)

    def is_success(self) -> bool:
        """Whether it is over and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, if anything."""
        return next((one.error for one in self._operations if one.error is not None), None)

    def result(self) -> list[Any]:
        """The tensors of the call."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """A future that is complete. The call is finished first, and raises here what went wrong: those who use futures
        (DDP) wait for them in C++, where nothing would move, and where an exception set by Python cannot be read.
        """
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        return self._operations[0].source

    def source_rank(self) -> int:
        """Of a receive: the group rank that sent."""
        return self._source_rank()


class InnerWork(dist.Work):
    """A call that another back end serves. Waiting for it goes on with shm's calls."""

    def __init__(self, work: Any, station: Station) -> None:
        super().__init__()
        self._work = work
        self._station = station

    def wait(self, timeout: datetime.timedelta = _NONE) -> bool:
        """Finish the call."""
        self._station.wait_for(self._work.is_completed)
        return bool(self._work.wait(timeout) if timeout > _NONE else self._work.wait())

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is over."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is over and nothing went wrong."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """What went wrong, if anything."""
        return self._work.exception()

    def result(self) -> Any:
        """The tensors of the call."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future:
        """The inner call's future: its own threads complete it."""
        future: torch.futures.Future = self._work.get_future()
        return future

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    def source_rank(self) -> int:
        """Of a receive: the group rank that sent."""
        return self._source_rank()
