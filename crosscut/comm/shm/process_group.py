"""`ShmProcessGroup`: the `shm` back end as torch.distributed sees it.

torch calls a process group from Python (torch.distributed) and from C++ (functional collectives, DDP's reducer), under
names that torch 2.13 renamed. Every one is overridden here, under all its names: the base class would run with the GIL
held while it waits for Gloo's threads, and hang. What shared memory does not serve (tensors of other devices, sparse
ones, `monitored_barrier`) goes to `self.inner`, a plain process group over Gloo, and NCCL where there is a GPU.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.shm.calls_moving import Moves
from crosscut.comm.shm.calls_reducing import Reductions
from crosscut.comm.shm.channel import Channel

_Base: Any = dist.ProcessGroup  # its stub knows neither the constructor of subclasses nor all the names


class ShmProcessGroup(Reductions, Moves, _Base):
    """A process group over shared memory. `channel`: the group's own machinery; `inner`: who serves the rest."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], name: str, timeout: datetime.timedelta) -> None:
        _Base.__init__(self, rank, len(ranks))
        self._timeout = timeout
        self._size = len(ranks)
        self.channel = Channel(store, rank, ranks, name, timeout.total_seconds())
        # What an earlier world has left in the store must not be found by the other back ends.
        store = dist.PrefixStore(f"{self.channel.key:x}", store)
        self.inner: Any = dist.ProcessGroup(store, rank, len(ranks))
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, len(ranks), timeout=timeout)
        gloo._set_sequence_number_for_group()
        backends: list[tuple[str, Any, Any]] = [("cpu", dist.ProcessGroup.BackendType.GLOO, gloo)]
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, len(ranks), options)
            nccl._set_sequence_number_for_group()
            backends.append(("cuda", dist.ProcessGroup.BackendType.NCCL, nccl))
        for group in (self, self.inner):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            for device, kind, backend in backends:
                group._register_backend(torch.device(device), kind, backend)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # called from C++
        """ "shm" """
        return "shm"

    def name(self) -> str:
        """ "shm" """
        return "shm"

    def _set_group_desc(self, said: str) -> None:  # called by torch when the group is made
        _Base._set_group_desc(self, said)
        if said not in ("", "undefined"):
            self.channel.name = "world" if said == "default_pg" else said

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long calls wait from now on."""
        self._timeout = timeout
        self.channel.timeout_s = timeout.total_seconds()
        if hasattr(self.inner, "set_timeout"):
            self.inner.set_timeout(timeout)

    # -- all other names ----------------------------------------------------------------------------------------------

    _allgather_base = Moves.all_gather_single
    allgather_into_tensor_coalesced = Moves.all_gather_single_coalesced
    _reduce_scatter_base = Reductions.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Reductions.reduce_scatter_single_coalesced
    alltoall_base = Moves.all_to_all_single

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.monitored_barrier(*args, **kwargs)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.split_group(*args, **kwargs)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.merge_remote_group(*args, **kwargs)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.inner._end_coalescing(device)

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is under way and leave. Called by `destroy_process_group`."""
        self.channel.close()
        self.inner.shutdown()

    def abort(self) -> None:
        """Give up at once; calls under way, here and at the peers, end with an error."""
        self.channel.abort()
        self.inner.abort()
