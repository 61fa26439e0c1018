"""Gloo, shm and NCCL side by side in one world of processes, so that a trial meets all of them in the same minute."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.context import Context
from crosscut.comm.group import Group
from crosscut.comm.handle import Pending

TIMEOUT_S = 300.0


@dataclass
class Side:
    """One back end: crosscut's group over it, and torch's (None for threads, which torch does not know)."""

    backend: str
    group: Group
    torch_group: Any
    device: torch.device


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
        group = Group(
            transport,
            label="world",
            ranks=ranks,
            global_rank=ctx.rank,
            device=device,
            ledger=ctx.ledger,
            pending=Pending(),
        )
        return Side(backend, group, made, device)

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
        for made in reversed(self._made):
            dist.destroy_process_group(made)
