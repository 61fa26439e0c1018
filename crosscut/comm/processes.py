"""Start a world whose ranks are processes of this host, through torch.distributed.elastic, as torchrun does."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from crosscut.comm.choose import Choice
from crosscut.comm.errors import one_line
from crosscut.comm.outcome import End, settle
from crosscut.comm.worker import Job, worker_main

_PREFIX = "crosscut-world-"


def run_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    size: int,
    choice: Choice,
    timeout_s: float,
    check: str,
) -> list[Any]:
    """`fn(ctx, *args, **kwargs)` on `size` processes; their values in rank order, or the first real error."""
    call = _pickle_call(fn, args, kwargs)
    endpoint = _endpoint()
    with _folder() as folder, _signals() as caught, _quiet():
        (folder / "call.pickle").write_bytes(call)
        job = Job(str(folder), choice, timeout_s, os.getpid(), check)
        exits = _launch(job, size, endpoint, caught)
        if not caught:
            return _values(folder, size, exits, time.monotonic())
    # The world is gone and the handlers are back: now the signal does what it would have done.
    signal.raise_signal(caught[0])
    raise KeyboardInterrupt  # a handler that returns: the ranks were stopped all the same


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call as bytes. Raises ValueError if another process could not find the function or read the arguments."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "spawn was called while a rank imports the main script: put the call under if __name__ == '__main__':"
        )
    name = getattr(fn, "__qualname__", type(fn).__name__)
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    has_file = getattr(main, "__spec__", None) is not None or (path is not None and os.path.exists(path))
    if getattr(fn, "__module__", None) == "__main__" and not has_file:
        raise ValueError(
            f"spawn: {name} is defined in a notebook or prompt, where other processes cannot import it; move it to a "
            f"file, or use backend='threads'"
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise ValueError(
            f"spawn: {name} or its arguments cannot be sent to other processes ({one_line(error, 150)}); define the "
            f"function at the top level of a module, or use backend='threads'"
        ) from None


def _endpoint() -> str:
    """Where the ranks meet: a free port of the loopback, or MASTER_ADDR and MASTER_PORT if they are set."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "0")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"MASTER_PORT={port!r} in the environment is not a port; use 1 to 65535, or unset it")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"MASTER_PORT={port} is in use on {host}; unset it to take a free port") from None
        raise ValueError(
            f"MASTER_ADDR={host} is not this machine ({error.strerror or error}); unset it, or start the ranks of "
            f"several machines with torchrun"
        ) from None
    return f"{host}:{port}"


def _launch(job: Job, size: int, endpoint: str, caught: list[int]) -> dict[int, tuple[int, int]]:
    """Run the workers to their end. Returns (pid, exit code) of those that elastic reports as failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Seconds from a signal to SIGKILL (newer torch only). A rank ends at the signal, unless it still imports torch.
    options: dict[str, Any] = {"shutdown_timeout": 1}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=Path(job.folder).name,
        # "c10d" takes a free port itself (no gap between finding and binding it), "static" the one it is told.
        rdzv_backend="c10d" if endpoint.endswith(":0") else "static",
        rdzv_endpoint=endpoint,
        rdzv_configs={"is_host": True, "timeout": 120, "rank": 0},
        local_addr=endpoint.rsplit(":", 1)[0],
        max_restarts=0,
        monitor_interval=0.05,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=job.folder),
        **{name: value for name, value in options.items() if name in known},
    )
    try:
        with _interrupts_held_back():
            elastic_launch(config, worker_main)(job)
    except ChildFailedError as error:
        return {rank: (failure.pid, failure.exitcode) for rank, failure in error.failures.items()}
    except SignalException as error:
        caught.append(int(error.sigval))
    return {}


def _values(folder: Path, size: int, exits: dict[int, tuple[int, int]], ended: float) -> list[Any]:
    """The ranks' values, from their files; or raise for the first real error."""
    ends: list[End] = []
    for rank in range(size):
        end = End()
        pid = folder / f"rank-{rank}.pid"
        if pid.exists():
            end.pid = int(pid.read_text())
        if (folder / f"rank-{rank}.failure").exists():
            end.failure = pickle.loads((folder / f"rank-{rank}.failure").read_bytes())
        elif rank in exits:
            started, (end.pid, end.exit_code) = end.pid is not None, exits[rank]
            end.started = started
        elif (folder / f"rank-{rank}.value").exists():
            end.returned, end.value = True, pickle.loads((folder / f"rank-{rank}.value").read_bytes())
        ends.append(end)
    return settle(ends, ended)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for this world's files, locked while the launcher lives. Those of launchers that were killed go."""
    base = Path(tempfile.gettempdir())
    for lock in base.glob(f"{_PREFIX}*/lock"):
        with contextlib.suppress(OSError), _locked(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        with _locked(folder / "lock"):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, which the system takes back from a process that dies; OSError if another one holds it."""
    try:
        import fcntl
    except ImportError:  # Windows: nothing is swept
        if path.exists():
            raise OSError("no file locks here") from None
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Elastic puts its own signal handlers in place and leaves them; put the old ones back."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    before = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ranks begin with SIGINT blocked, as this thread has it: Ctrl-C while they import torch would print a traceback
    each. They let it through when they can end quietly. Here another thread lets it through, for Python's handler.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # starting later, with the first rank, it would let SIGINT through again
    over = threading.Event()
    threading.Thread(target=over.wait, name="crosscut-signals", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Elastic logs what `RankError` says better, and leaves a variable in the environment."""
    import torch.distributed.launcher.api  # noqa: F401  its loggers get levels of their own when they are made

    parents = [logging.getLogger("torch.distributed"), logging.getLogger("torch.multiprocessing")]
    children = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing."))
    ]
    levels = [(one, one.level) for one in [*parents, *children]]
    before = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    for one, _ in levels:
        one.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for one, level in levels:
            one.setLevel(level)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        if before is not None:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = before
