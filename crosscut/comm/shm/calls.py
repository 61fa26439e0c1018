"""What the calls of torch.distributed are made of: who serves them, their label and time-out, their checks.

The methods of a torch process group take lists of tensors and an options object, or a tensor and plain arguments.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.shm.channel import Channel
from crosscut.comm.shm.operation import Operation, Steps
from crosscut.comm.shm.work import InnerWork
from crosscut.comm.site import call_site

Tensor = torch.Tensor
_NONE = datetime.timedelta(0)
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


class Calls:
    """The parts of every call. `channel`: the group's machinery; `inner`: the process group that serves the rest."""

    channel: Channel
    inner: Any
    _size: int

    def _inner(self, method: str, *args: Any) -> dist.Work:
        """Let the other back end serve a call."""
        call = getattr(self.inner, method, None) or getattr(self.inner, _OLD_NAMES[method])
        return InnerWork(call(*(arg for arg in args if arg is not None)), self.channel.station)

    def _waits(self, opts: Any) -> bool:
        """Whether the caller waits at once, with the group's own time-out."""
        return opts is not None and not getattr(opts, "asyncOp", True) and opts.timeout < _NONE

    def _submit(self, name: str, x: Tensor | None, steps: Steps, opts: Any) -> Operation:
        timeout = getattr(opts, "timeout", None)
        timeout_s = timeout.total_seconds() if timeout is not None else 0.0
        return self.channel.submit(steps, self._label(name, x), timeout_s if timeout_s > 0 else None)

    def _label(self, name: str, x: Tensor | None, whom: str = "") -> Callable[[], str]:
        shape = None if x is None else (tuple(x.shape), x.dtype)

        def text() -> str:
            what = "" if shape is None else f" of {str(shape[1]).removeprefix('torch.')} {shape[0]}"
            return f"{name}{what}{whom} over {self.channel.name}, at {call_site()}"  # where the rank waits for it

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
