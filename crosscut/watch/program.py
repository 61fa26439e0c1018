"""`install()`: record and diagnose this program, whatever it is, from its next `init_process_group` on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crosscut.comm.call import Call
from crosscut.comm.launched import launched
from crosscut.comm.site import call_site
from crosscut.watch.lanes import INIT
from crosscut.watch.recorder import RUN, Observer, Recorder, obey, record_context
from crosscut.watch.ring import process_start

MONITORED = "CROSSCUT_WATCH_MONITORED"  # somebody watches this run folder already
_state: dict[str, Any] = {}  # of this process: a process is one rank


def install(run: str | Path | None = None, *, hang_timeout: float | None = None) -> Path:
    """Record this program's calls, and end it with a verdict when it hangs. Call it before `init_process_group`.

    run: the run folder, by default runs/watch-<date>, the same for all ranks of a host. hang_timeout: seconds without
    progress (60 on CPUs, 300 on GPUs); `section` gives parts of the program their own. Returns the run folder. A
    monitor process is started by the first rank of the host, unless `python -m crosscut.watch` is there already.

    Raises ValueError if the folder cannot be written, or if torch.distributed is initialised already.
    """
    if "recorder" in _state or "run" in _state:
        return Path(_state["run"])
    import torch.distributed as dist

    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already; call crosscut.watch.install() before it")
    place = launched()
    folder = Path(run if run is not None else os.environ.get(RUN) or default_run())
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[RUN] = _state["run"] = str(folder)
    if place is not None:
        _recorder(folder, place.rank, place.world_size)
    _replace_init(dist)
    _replace_start()
    if MONITORED not in os.environ and (place is None or place.local_rank == 0):
        words = [sys.executable, "-m", "crosscut.watch.monitor", str(folder), str(hang_timeout or 0), str(os.getpid())]
        subprocess.Popen(words, start_new_session=True)
    os.environ[MONITORED] = "1"  # for the processes that this one starts
    return folder


@contextlib.contextmanager
def section(name: str, limit_s: float) -> Iterator[None]:
    """A part of the program that may take long without a call, up to `limit_s`: evaluation on one rank, a save."""
    recorder: Recorder | None = _state.get("recorder")
    with contextlib.nullcontext() if recorder is None else recorder.section(name, limit_s):
        yield


def default_run() -> Path:
    """runs/watch-<date>: under a launcher its start, so that all its ranks agree."""
    if "RANK" not in os.environ:
        return Path("runs") / time.strftime("watch-%Y-%m-%d-%H%M%S")
    ticks = process_start(os.getppid())
    return Path("runs") / f"watch-{os.environ['MASTER_PORT']}-{ticks}"


def recorder_of(rank: int, world_size: int) -> Recorder | None:
    """This process's recorder if it is watched, made at its first use."""
    if "recorder" not in _state and "run" in _state:
        _recorder(Path(_state["run"]), rank, world_size)
    return _state.get("recorder")


def _recorder(folder: Path, rank: int, world_size: int) -> Recorder:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = _state["recorder"] = Recorder(folder, rank, world_size, device)
    recorder.hook_process()
    obey(recorder)
    return recorder


def _replace_init(dist: Any) -> None:
    """Record `init_process_group`, and from its end on every call."""
    c10d = dist.distributed_c10d
    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        rank, size = kwargs.get("rank", -1), kwargs.get("world_size", -1)
        rank = rank if rank >= 0 else int(os.environ.get("RANK", 0))
        size = size if size > 0 else int(os.environ.get("WORLD_SIZE", 1))
        recorder = recorder_of(rank, size)
        assert recorder is not None
        _state["inits"] = number = _state.get("inits", 0) + 1
        lane = recorder.ring.lane(INIT, range(size), number)
        entry = recorder.enter(lane, Call("init_process_group", "", "", "control", call_site(), 1), 0)
        init(*args, **kwargs)
        recorder.ring.complete(entry)
        _observe(recorder, dist, ours=sys._getframe(1).f_globals.get("__name__", "").startswith("crosscut.comm"))

    c10d.init_process_group = dist.init_process_group = init_process_group


def _observe(recorder: Recorder, dist: Any, *, ours: bool) -> None:
    if int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) < dist.get_world_size():
        align(recorder, dist)
    if ours:  # a crosscut world: its contexts know tags and axes
        context = importlib.import_module("crosscut.comm.context").Context
        if "contexts" not in _state:
            _state["contexts"] = make = context.__init__

            def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
                make(self, *args, **kwargs)
                record_context(self, recorder)

            context.__init__ = recorded
    else:
        from crosscut.comm.intercept import intercept

        _state["interception"] = intercept(Observer(recorder))
    if "steps" not in _state:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _state["steps"] = register_optimizer_step_post_hook(recorder.step)


def align(recorder: Recorder, dist: Any) -> None:
    """Set this rank's clock by rank 0's: all read theirs as they leave a barrier."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.barrier()
    dist.all_gather_object(values, time.monotonic_ns())
    recorder.ring.align(values[0] - values[dist.get_rank()])


def _replace_start() -> None:
    """Let processes that torch.multiprocessing starts record too."""
    import torch.multiprocessing as mp

    module = sys.modules["torch.multiprocessing.spawn"]
    start = module.start_processes

    @functools.wraps(start)
    def start_processes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return start(functools.partial(_started, fn), *args, **kwargs)

    module.start_processes = mp.start_processes = start_processes  # type: ignore[attr-defined]


def _started(fn: Callable[..., Any], *args: Any) -> Any:
    """The function of a started process, recorded. Its parent catches its exceptions, so they are written down here."""
    _state.clear()  # a forked child is another rank than its parent
    install()
    try:
        value = fn(*args)
    except BaseException as error:
        if (recorder := _state.get("recorder")) is not None:
            recorder.failed(error)
        raise
    if (recorder := _state.get("recorder")) is not None:
        recorder.ring.end(0)
    return value


def finish(exit_code: int) -> None:
    """Say that this program has ended by itself."""
    recorder = _state.get("recorder")
    if recorder is not None:
        recorder.ring.end(exit_code)
