"""What a back end must do for a group: raw operations on flat contiguous tensors.

`Group` has checked everything by then: shapes, splits, roots and dtypes are right on this rank, tensors are flat,
contiguous, on the right device and of a dtype in `crosscut.comm.dtypes.MOVABLE`, and a group has at least two ranks.
Tensors may be empty. Ranks are group-local.
"""

from __future__ import annotations

from typing import Protocol

import torch

from crosscut.comm.call import Call


class Work(Protocol):
    """A call under way."""

    def wait(self) -> None:
        """Return when this rank's part of the result is there."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Backend(Protocol):
    """The transport of one rank within one group."""

    name: str
    device: torch.device
    reduces_in_fp32: bool  # fp16 and bf16 are handed over as fp32 for reductions
    guards: bool  # async tensors are poisoned and compared, to find early reads and writes

    def next_seq(self) -> int:
        """The number of the next collective of this transport (all groups that share it count together)."""
        ...

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work: ...

    def broadcast(self, x: torch.Tensor, src: int, call: Call) -> Work: ...

    def reduce(self, x: torch.Tensor, dst: int, op: str, call: Call) -> Work:
        """In place at dst; `x` may be overwritten anywhere."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, call: Call) -> Work: ...

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, call: Call) -> Work: ...

    def gather(self, out: torch.Tensor | None, x: torch.Tensor, dst: int, call: Call) -> Work:
        """`out` (size * numel, all parts in rank order) at dst, None elsewhere."""
        ...

    def scatter(self, out: torch.Tensor, x: torch.Tensor | None, src: int, call: Call) -> Work:
        """`x` (size * numel, all parts in rank order) at src, None elsewhere."""
        ...

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_counts: list[int], in_counts: list[int], call: Call
    ) -> Work:
        """Counts are elements a rank."""
        ...

    def send(self, x: torch.Tensor, dst: int, call: Call) -> Work: ...

    def recv(self, out: torch.Tensor, src: int, call: Call) -> Work: ...

    def exchange(
        self, x: torch.Tensor, dst: int, out: torch.Tensor, src: int, send_call: Call, recv_call: Call
    ) -> Work:
        """A send and a receive issued as one, so that a ring of exchanges cannot block itself."""
        ...

    def barrier(self, call: Call) -> Work: ...

    def destroy(self) -> None:
        """Give back what the group holds."""
        ...


class ShortCalls(Protocol):
    """What a back end may have besides, as its attribute `short`: a quicker way for short calls that are waited for.

    Tensors have any shape and dtype. Each call returns False, with nothing done, if it cannot be used for them, or now.
    """

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> bool:
        """In place; `op` may be avg."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, call: Call) -> bool:
        """`out` takes all ranks' `x`, one after another."""
        ...

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, call: Call) -> bool:
        """The parts of `x` stand in rank order; `op` may be avg."""
        ...


class World(Protocol):
    """The transport of one rank among all: makes groups."""

    name: str
    rank: int
    size: int
    device: torch.device

    def group(self, partition: tuple[tuple[int, ...], ...], channel: int = 0) -> Backend | None:
        """Collective over the world: one group for each part; returns that of this rank, None if it is in no part.

        The same partition and channel give the same transport again.
        """
        ...

    def claim(self, module: torch.nn.Module) -> None:
        """Say that this rank owns the module; raises ValueError if another rank of this process does."""
        ...

    def close(self, failed: bool) -> None:
        """Destroy the groups, last made first. `failed`: this rank leaves by an exception."""
        ...
