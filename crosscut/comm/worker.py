"""One rank that is a process: join torch.distributed, run the function, say how it ended."""

from __future__ import annotations

import ctypes
import datetime
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.backends.torchdist import TorchWorld
from crosscut.comm.choose import Choice, choose_threads
from crosscut.comm.context import Context
from crosscut.comm.errors import PeerError, one_line
from crosscut.comm.launched import Launched, launched
from crosscut.comm.outcome import describe_failure
from crosscut.comm.shm.register import register_shm

_PEER_GRACE_S = 3.0  # a rank stopped by another's end lets that end be seen first


@dataclass(frozen=True)
class Job:
    """What a worker process is told."""

    folder: str  # of the files that `crosscut.comm.processes` reads
    choice: Choice
    timeout_s: float
    parent: int  # its pid
    check: str  # why calls are compared, "" if they are not


def join_world(place: Launched, choice: Choice, timeout_s: float, check: str) -> Context:
    """Join torch.distributed at this process's place and make its `Context`. check: why calls are compared, or ""."""
    device = torch.device("cpu")
    if choice.device == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    threads, threads_why = choose_threads(place.local_world_size)
    torch.set_num_threads(threads)
    owns = not dist.is_initialized()
    if choice.backend == "shm":
        register_shm()
    if owns:
        dist.init_process_group(
            choice.backend,
            store=_fresh_store(place),
            rank=place.rank,
            world_size=place.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    return Context(
        TorchWorld(choice.backend, device, timeout_s, owns, bool(check)),
        local_rank=place.local_rank,
        backend_why=choice.why,
        threads=threads,
        threads_why=threads_why,
        check_why=check,
    )


def _fresh_store(place: Launched) -> dist.Store:
    """Where the ranks meet, empty: a second world in the same processes must not find the addresses of the first."""
    store, _, _ = next(iter(dist.rendezvous("env://", place.rank, place.world_size)))
    number = store.add(f"crosscut/worlds/{place.rank}", 1)
    return dist.PrefixStore(f"crosscut/world-{number}", store)


def worker_main(job: Job) -> None:
    """The entry point of a rank that `spawn` starts as a process."""
    die_with_parent(job.parent)
    # At once, also inside a collective, where Python's own handlers would not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher had it held back until here
    if sys.platform == "linux":
        # All ranks are on this host: the loopback works whatever the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = launched()
    assert place is not None  # the launcher has just said so
    folder = Path(job.folder)
    write_whole(folder / f"rank-{place.rank}.pid", str(os.getpid()).encode())
    try:
        fn, args, kwargs = pickle.loads((folder / "call.pickle").read_bytes())
        value = run_rank(join_world(place, job.choice, job.timeout_s, job.check), fn, args, kwargs)
        write_whole(folder / f"rank-{place.rank}.value", pickle_value(place.rank, value))
    except BaseException as error:
        write_whole(folder / f"rank-{place.rank}.failure", pickle.dumps(describe_failure(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(error, PeerError):
            time.sleep(_PEER_GRACE_S)
        os._exit(1)  # teardown could wait for peers


def run_rank(ctx: Context, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function and leave the world, also after an error."""
    try:
        value = fn(ctx, *args, **kwargs)
    except BaseException:
        ctx.close(failed=True)
        raise
    ctx.close()
    return value


def pickle_value(rank: int, value: Any) -> bytes:
    """A rank's value as bytes; raises ValueError if it cannot be sent."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ValueError(
            f"the value of rank {rank} ({type(value).__name__}) cannot be sent to the launcher: {one_line(error)}; "
            f"return plain values or tensors"
        ) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def die_with_parent(parent: int) -> None:
    """End this process when the launcher dies, however it dies. Linux: the kernel sees to it."""
    if sys.platform == "darwin":
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def _watch_parent(parent: int) -> None:
    """macOS: nobody tells a process that its parent died, so it looks."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
