"""`register_shm`: make "shm" a back end of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from crosscut.comm.errors import ranks_text
from crosscut.comm.shm import platform


def register_shm() -> None:
    """After this, `torch.distributed.init_process_group("shm")` works, in any program on one Linux x86-64 host.

    Collectives of CPU tensors go through shared memory; those of CUDA tensors through NCCL, where there is a GPU. May
    be called again. Raises ValueError, saying what to use instead, where the platform lacks what it takes.
    """
    platform.require()
    if "SHM" not in dist.Backend._plugins:
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    from crosscut.comm.shm.process_group import ShmProcessGroup

    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = f"the group of {ranks_text(ranks)}"
    return ShmProcessGroup(options.store, options.group_rank, ranks, name, options.timeout)
