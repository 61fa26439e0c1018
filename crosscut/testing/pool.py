"""A warm pool of worker processes for tests: a process costs seconds to start, a job on a warm one milliseconds.

    pool = WorkerPool()
    values = pool.run(fn, 3, world_size=2)        # fn(ctx, 3) on two processes: like crosscut.spawn

Each job joins its workers in a fresh process group, so a job that fails leaves nothing to the next one; a worker that
died, or that does not come back, costs a restart of the pool. `fn` must be importable by the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.backends.torchdist import TorchWorld
from crosscut.comm.checked.switch import why_checked
from crosscut.comm.context import Context
from crosscut.comm.errors import StuckError, ranks_text
from crosscut.comm.outcome import End, Failure, describe_failure, settle
from crosscut.comm.shm.register import register_shm
from crosscut.comm.site import short_path
from crosscut.comm.worker import die_with_parent, pickle_value, run_rank

_START_S = 120.0  # how long a worker gets to start
_AFTER_FAILURE_S = 10.0  # how long the other ranks of a failed job get to end
_AFTER_TIMEOUT_S = 1.0  # ranks that wait in a call are stopped by its time-out, and their words are the better ones
_STACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # a worker writes its stack into a file
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FOREIGN = ("<string>", *(f"{os.sep}{part}{os.sep}" for part in ("torch", "multiprocessing")))


class WorkerPool:
    """Worker processes that run one job after another. Not thread-safe.

    max_workers: the largest world. `launches` counts the process launches so far.
    """

    def __init__(self, max_workers: int = 4) -> None:
        self.max_workers = max_workers
        self.launches = 0
        self._workers: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._job = 0
        self._folder = tempfile.TemporaryDirectory(prefix="crosscut-pool-")
        atexit.register(self.close)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        backend: str = "gloo",
        timeout_s: float = 60.0,
        check: bool | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """`fn(ctx, *args, **kwargs)` on `world_size` warm processes; their values, or the first real error. backend:
        "gloo" or "shm"; check: as in `crosscut.spawn`.

        Raises ValueError for a world larger than the pool; what `crosscut.spawn` raises when a rank fails.
        """
        if not 1 <= world_size <= self.max_workers:
            raise ValueError(f"world_size={world_size} is outside the pool; use 1 to {self.max_workers}")
        why = why_checked(check, backend)
        call = pickle.dumps((fn, args, kwargs))
        self._start(world_size)
        self._job += 1
        for rank, (_, connection) in enumerate(self._workers[:world_size]):
            place = sys.path, dict(os.environ), os.getcwd()
            connection.send((self._job, rank, world_size, backend, timeout_s, why, place, call))
        ends = self._collect(world_size, timeout_s)
        if not all(end.returned or end.failure is not None for end in ends):
            self.close()  # somebody died or is stuck: start afresh next time
        return settle(ends, time.monotonic())

    def _collect(self, size: int, timeout_s: float) -> list[End]:
        ends = [End(pid=process.pid) for process, _ in self._workers[:size]]
        open_ranks = set(range(size))
        deadline = time.monotonic() + timeout_s + _AFTER_TIMEOUT_S
        while open_ranks and time.monotonic() < deadline:
            ready = wait([self._workers[rank][1] for rank in open_ranks], max(0.0, deadline - time.monotonic()))
            for rank in [rank for rank in open_ranks if self._workers[rank][1] in ready]:
                open_ranks.discard(rank)
                process, connection = self._workers[rank]
                try:
                    outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    process.join(1)
                    ends[rank].exit_code = process.exitcode
                else:
                    ends[rank].failure = outcome if isinstance(outcome, Failure) else None
                    ends[rank].returned, ends[rank].value = not isinstance(outcome, Failure), outcome
                if not ends[rank].returned:
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
        if open_ranks and not any(end.exit_code is not None for end in ends):
            failed = {rank: end.failure.line for rank, end in enumerate(ends) if end.failure is not None}
            if all(line.startswith(("StuckError", "PeerError")) for line in failed.values()):  # they only waited
                at = [f"rank {rank} is at {self._where(rank)}" for rank in sorted(open_ranks)]
                told = [*at, *(f"rank {rank}: {line}" for rank, line in failed.items())]
                self.close()
                raise StuckError(
                    f"{ranks_text(sorted(open_ranks))} of {size} did not end within {timeout_s:g} s: {'; '.join(told)}"
                )
        return ends

    def _where(self, rank: int) -> str:
        """The innermost lines of a running worker outside torch and crosscut, the last first."""
        process, _ = self._workers[rank]
        if _STACK_SIGNAL is None or process.pid is None or not process.is_alive():
            return "an unknown place"
        os.kill(process.pid, _STACK_SIGNAL)
        time.sleep(0.2)
        text = _stack_file(self._folder.name, process.pid).read_text().rpartition("most recent call first")[2]
        lines = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
        own = [
            f"{short_path(path)}:{line} in {name}"
            for path, line, name in lines
            if not path.startswith(_OURS) and not any(part in path for part in _FOREIGN)
        ]
        return ", called from ".join(own[:2]) or "an unknown place"

    def _start(self, size: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self.close()
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context, new = multiprocessing.get_context("spawn"), []
        while len(self._workers) < size:
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, self._store.port, os.getpid(), self._folder.name), daemon=True
            )
            process.start()
            there.close()
            self.launches += 1
            self._workers.append((process, here))
            new.append(here)
        for connection in new:  # importing torch takes seconds, and is not the job's time
            if not connection.poll(_START_S) or connection.recv() != "ready":
                raise StuckError(f"a pool worker did not start within {_START_S:g} s")

    def close(self) -> None:
        """End the workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(5)
        self._workers.clear()
        self._store = None


def _stack_file(folder: str, pid: int | None) -> Path:
    return Path(folder) / f"stack-{pid}"


def _serve(connection: Connection, port: int, parent: int, folder: str) -> None:
    """A worker's life: job after job, until the pool closes its end."""
    die_with_parent(parent)
    stack = _stack_file(folder, os.getpid()).open("w")
    if _STACK_SIGNAL is not None:
        faulthandler.register(_STACK_SIGNAL, file=stack, all_threads=False)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    own = {key: os.environ[key] for key in ("GLOO_SOCKET_IFNAME",) if key in os.environ}
    torch.set_num_threads(1)
    seed = torch.initial_seed()
    connection.send("ready")
    while True:
        try:
            job, rank, size, backend, timeout_s, check, (path, environment, folder), call = connection.recv()
        except (EOFError, OSError):
            return
        sys.path[:] = path
        os.environ.clear()  # what the last job set is gone, and what a fixture set is here
        os.environ.update(environment | own)
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            os.chdir(folder)
            store = dist.PrefixStore(f"job-{job}", dist.TCPStore("127.0.0.1", port, is_master=False))
            timeout = datetime.timedelta(seconds=timeout_s)
            fn, args, kwargs = pickle.loads(call)
            if backend == "shm":
                register_shm()
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            world = TorchWorld(backend, torch.device("cpu"), timeout_s, check=bool(check))
            ctx = Context(world, backend_why="the test pool", threads=1, threads_why="the test pool", check_why=check)
            outcome = pickle_value(rank, run_rank(ctx, fn, args, kwargs))
        except BaseException as error:
            outcome = pickle.dumps(describe_failure(error))
            with contextlib.suppress(Exception):
                if dist.is_initialized():
                    dist.destroy_process_group()
        with contextlib.suppress(OSError):
            connection.send_bytes(outcome)
