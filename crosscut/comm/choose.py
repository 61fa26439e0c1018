"""Which back end, which device, how many torch threads a rank: the choices and, in words, why."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass

import torch

from crosscut.comm.shm import platform as shm_platform

BACKENDS = ("threads", "shm", "gloo", "nccl")


@dataclass(frozen=True)
class Choice:
    """A back end, the kind of device it runs on, and the reason."""

    backend: str
    device: str  # "cpu" | "cuda"
    why: str


def choose_backend(
    backend: str | None, device: str | None, local_world_size: int, world_size: int | None = None
) -> Choice:
    """The back end that was asked for, checked, or the default: NCCL with GPUs, shared memory if all ranks are on this
    host and it can, else Gloo. `world_size`: of all hosts, if there may be others.

    Raises ValueError for an unknown one, for one that this machine cannot run, and for more ranks than GPUs: ranks are
    never moved to the CPU unless `device="cpu"` says so.
    """
    if backend is not None and backend not in BACKENDS:
        near = difflib.get_close_matches(backend, BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; use one of {', '.join(BACKENDS)}"
        raise ValueError(f"backend={backend!r} is unknown{hint}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r} is unknown; use 'cpu' or 'cuda'")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda', but torch sees no GPU here; use device='cpu'")
    elsewhere = world_size is not None and world_size != local_world_size
    if backend == "shm":
        shm_platform.require()
        if elsewhere:
            raise ValueError(
                f"backend='shm' with {local_world_size} of {world_size} ranks on this host, and shared memory does not "
                f"leave it; use backend='gloo'"
            )
    if backend in ("threads", "shm", "gloo"):
        if device == "cuda":
            raise ValueError(f"device='cuda' with backend={backend!r}, which runs on the CPU; use backend='nccl'")
        return Choice(backend, "cpu", f"backend={backend!r} was asked for")
    if backend is None and (device == "cpu" or not gpus):
        said = "device='cpu' was asked for" if device == "cpu" else "torch sees no GPU here"
        if elsewhere:
            return Choice("gloo", "cpu", f"{said}, and there are ranks on other hosts")
        reason = shm_platform.why_not()
        if reason is not None:
            return Choice("gloo", "cpu", f"{said}, and shm cannot run: {reason}")
        return Choice("shm", "cpu", f"{said}, and all ranks are on this host")
    if device == "cpu":
        raise ValueError("backend='nccl' with device='cpu': NCCL runs on GPUs only; use backend='gloo'")
    if not gpus:
        raise ValueError("backend='nccl', but torch sees no GPU here; use backend='gloo' or backend='threads'")
    if local_world_size > gpus:
        raise ValueError(
            f"{local_world_size} ranks on this host need {local_world_size} GPUs, it has {gpus}; use at most {gpus} "
            f"ranks here, or device='cpu'"
        )
    why = "backend='nccl' was asked for" if backend else f"torch sees {gpus} GPU(s) here"
    return Choice("nccl", "cuda", why)


def choose_threads(local_world_size: int) -> tuple[int, str]:
    """Torch's threads for one rank: the cores of this host shared out, unless OMP_NUM_THREADS says."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0:
        return int(said), f"OMP_NUM_THREADS={said}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size), f"{cores} core(s) for {local_world_size} rank(s)"
