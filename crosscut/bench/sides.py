"""Gloo, shm and NCCL side by side in one world of processes, so that a trial meets all of them in the same minute."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.checked.backend import CheckedGroup
from crosscut.comm.checked.checker import Checker
from crosscut.comm.context import Context
from crosscut.comm.group import Group
from crosscut.comm.handle import Pending

TIMEOUT_S = 300.0


@dataclass
class Side:
    """One back end: crosscut's group over it, torch's (None for threads, which torch does not know), and crosscut's in
    checked mode (None for threads, which always compare)."""

    backend: str
    group: Group
    torch_group: Any
    device: torch.device
    checked: Group | None = None


class Sides:
    """The back ends of this rank, and the barrier that starts a trial. Collective to make and to close."""

    def __init__(self, ctx: Context, backends: Sequence[str], with_shm: bool) -> None:
        self._made: list[Any] = []
        self.all: list[Side] = []
        start = ctx.world
        for backend in dict.fromkeys([*backends, *(["shm"] if with_shm else [])]):
            side = self._open(ctx, backend)
            if backend in backends:
                self.all.append(side)
            if backend == "shm":
                start = side.group  # the ranks leave its barrier microseconds apart, Gloo's a millisecond
        self._start = start
        self._checker = self._check(ctx) if ctx.backend != "threads" else None
        self._cuda = any(side.device.type == "cuda" for side in self.all)

    def _open(self, ctx: Context, backend: str) -> Side:
        if backend == ctx.backend:
            return Side(backend, ctx.world, None if backend == "threads" else dist.group.WORLD, ctx.device)
        ranks = tuple(range(ctx.world_size))
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        device = torch.device("cpu")
        transport: Any
        if backend == "shm":
            from crosscut.comm.backends.shm import ShmGroup
            from crosscut.comm.shm.register import register_shm

            register_shm()
            made: Any = dist.new_group(list(ranks), backend="shm", timeout=timeout)
            transport = ShmGroup(made.channel)
        else:
            from crosscut.comm.backends.torchdist import TorchGroup, TorchWorld

            device = torch.device("cuda", ctx.local_rank)
            torch.cuda.set_device(device)
            made = dist.new_group(list(ranks), backend="nccl", timeout=timeout, device_id=device)
            transport = TorchGroup(TorchWorld("nccl", device, TIMEOUT_S, owns=False), made, ranks)
        self._made.append(made)
        return Side(backend, self._group(ctx, transport, device), made, device)

    def _check(self, ctx: Context) -> Checker:
        """A second group over each transport, which compares the ranks' calls."""
        store = dist.distributed_c10d._get_default_store()
        checker = Checker(store, ctx.rank, ctx.world_size, TIMEOUT_S)
        for side in self.all:
            room = checker.room(side.backend, "world", side.group.ranks)
            transport: Any = CheckedGroup(side.group._transport(), room)
            side.checked = self._group(ctx, transport, side.device)
        return checker

    @staticmethod
    def _group(ctx: Context, transport: Any, device: torch.device) -> Group:
        return Group(
            transport,
            label="world",
            ranks=tuple(range(ctx.world_size)),
            global_rank=ctx.rank,
            device=device,
            ledger=ctx.ledger,
            pending=Pending(),
        )

    def start(self) -> None:
        """All ranks leave this together."""
        self.synchronize()
        self._start.barrier(kind="control")

    def synchronize(self) -> None:
        """Wait for this rank's GPU."""
        if self._cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Destroy what was made here."""
        if self._checker is not None:
            self._checker.close(failed=False)
        for made in reversed(self._made):
            dist.destroy_process_group(made)
