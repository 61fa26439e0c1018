"""`spawn`: run one function on every rank of a world."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from crosscut.comm.checked.switch import why_checked
from crosscut.comm.launched import Launched, launched

if TYPE_CHECKING:
    from crosscut.comm.choose import Choice

DEFAULT_TIMEOUT_S = 600.0


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    check: bool | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(ctx, *args, **kwargs)` on every rank of a world; returns one value a rank, in rank order.

    world_size: the number of ranks; by default WORLD_SIZE from the environment, else the number of GPUs.
    backend: "threads" (all ranks in this process, in lockstep: deterministic, for debuggers, notebooks and tests),
    "shm" (processes of one Linux x86-64 host, shared memory), "gloo" (processes, CPU) or "nccl" (processes, one GPU
    each); by default nccl with GPUs, else shm where it can run, else gloo.
    device: "cpu" keeps off the GPUs. timeout_s: how long a rank may keep the others waiting.
    check: compare the ranks' calls before data move (docs/checked.md); by default with CROSSCUT_CHECK=1 and on threads.

    Processes need a function that they can import, and arguments and values that can be pickled; each gets copies. A
    world of one rank runs in this process. Under torchrun nothing is started: this process is one of the ranks, runs
    `fn`, and all ranks get all values.

    Raises ValueError for what cannot be run; `RankError` when a rank fails: the first real error, its rank named (it
    is also a ValueError if that was one); `MismatchError` and `DeadlockError` where the ranks' calls do not fit
    together (threads). Whatever happens, no process or file is left behind. Ctrl-C and SIGTERM stop all ranks at once.
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s} must be positive")
    place, why = launched(), why_checked(check, backend)
    if backend == "threads":
        from crosscut.comm.choose import choose_backend
        from crosscut.comm.thread_launch import run_threads

        size = _check_size(world_size if world_size is not None else _said_by_environment())
        return run_threads(fn, args, kwargs, size, timeout_s, choose_backend(backend, device, size).why, why)

    import torch

    from crosscut.comm.choose import choose_backend

    if place is not None:
        if world_size is not None and world_size != place.world_size:
            raise ValueError(
                f"world_size={world_size}, but this process was started as one of WORLD_SIZE={place.world_size} "
                f"ranks; make them equal (torchrun --nproc-per-node {world_size}), or leave world_size out"
            )
        choice = choose_backend(backend, device, place.local_world_size, place.world_size)
        return _run_here(fn, args, kwargs, place, choice, timeout_s, why)
    if world_size is None:
        world_size = _said_by_environment()
    if world_size is None and device != "cpu" and backend not in ("gloo", "shm") and torch.cuda.is_available():
        world_size = torch.cuda.device_count()
    size = _check_size(world_size)
    choice = choose_backend(backend, device, size)
    if size == 1:
        return [_run_alone(fn, args, kwargs, choice)]
    from crosscut.comm.processes import run_processes

    return run_processes(fn, args, kwargs, size, choice, timeout_s, why)


def _said_by_environment() -> int | None:
    said = os.environ.get("WORLD_SIZE")
    if said is None:
        return None
    if not said.isdigit() or int(said) < 1:
        raise ValueError(f"WORLD_SIZE={said!r} in the environment is not a number of ranks; use 1 or more, or unset it")
    return int(said)


def _check_size(size: int | None) -> int:
    if size is None:
        raise ValueError("world_size is not known: there is no GPU to count and no WORLD_SIZE; say world_size=2")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"world_size={size!r} must be a whole number, 1 or more")
    return size


def _run_alone(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], choice: Choice) -> Any:
    """One rank: in this process."""
    import torch

    from crosscut.comm.backends.solo import SoloWorld
    from crosscut.comm.context import Context
    from crosscut.comm.errors import rank_error

    device = torch.device("cuda", torch.cuda.current_device()) if choice.device == "cuda" else torch.device("cpu")
    ctx = Context(
        SoloWorld(choice.backend, device),
        backend_why=f"{choice.why}; one rank needs no other process",
        threads=torch.get_num_threads(),
        threads_why="one rank keeps torch's setting",
    )
    began = time.monotonic()
    try:
        value = fn(ctx, *args, **kwargs)
        ctx.close()
    except Exception as error:
        ctx.close(failed=True)
        seconds = time.monotonic() - began
        raise rank_error(error, rank=0, world_size=1, stopped=[], seconds=seconds) from error
    return value


def _run_here(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: Launched,
    choice: Choice,
    timeout_s: float,
    check: str,
) -> list[Any]:
    """This process is a rank already (torchrun): run the function, and hand all values to all ranks."""
    from crosscut.comm.worker import join_world, pickle_value

    with _stop_at_once():
        ctx = join_world(place, choice, timeout_s, check)
        try:
            value = fn(ctx, *args, **kwargs)
            pickle_value(ctx.rank, value)
            values = ctx.all_gather_object(value, tag="values")
        except BaseException:
            ctx.close(failed=True)
            raise
        ctx.close()
    return values


@contextlib.contextmanager
def _stop_at_once() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end this rank also inside a collective, where Python's handlers do not run.

    Handlers that the program has set itself are kept.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
