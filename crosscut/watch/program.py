"""`install()`: record and diagnose this program, whatever it is, from its next `init_process_group` on."""

from __future__ import annotations

import atexit
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
from crosscut.comm.site import short_path
from crosscut.watch.folder import look_at, path_of
from crosscut.watch.lanes import INIT
from crosscut.watch.reading import RingFile
from crosscut.watch.recorder import RUN, Observer, Recorder, obey
from crosscut.watch.ring import SET_UP, process_start

MONITORED = "CROSSCUT_WATCH_MONITORED"  # somebody watches this run folder already
SET_UP_LIMIT = "CROSSCUT_WATCH_SET_UP_S"  # seconds that a rank has until its first call is done
_state: dict[str, Any] = {}  # of this process: a process is one rank


def install(
    run: str | Path | None = None, *, hang_timeout: float | None = None, set_up_timeout: float | None = None
) -> Path:
    """Record this program's calls, and end it with a verdict when it hangs. Call it before `init_process_group`.

    run: the run folder, by default runs/watch-<date>, the same for all ranks of a host. hang_timeout: seconds without
    progress (60 on CPUs, 300 on GPUs); `section` gives parts of the program their own. set_up_timeout: the same until a
    rank's first call is done (600). Returns the run folder. A monitor process is started by the first rank of the host,
    unless `python -m crosscut.watch` is there already.

    Raises ValueError if the folder cannot be written, or if torch.distributed is initialised already.
    """
    if "run" in _state:
        return Path(_state["run"])
    loaded = sys.modules.get("torch.distributed")
    if loaded is not None and loaded.is_initialized():
        raise ValueError("torch.distributed is initialised already; call crosscut.watch.install() before it")
    for name, seconds in {"hang_timeout": hang_timeout, "set_up_timeout": set_up_timeout}.items():
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name}={seconds} must be positive")
    place = launched()
    folder = Path(run if run is not None else os.environ.get(RUN) or default_run())
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[RUN] = _state["run"] = str(folder)
    if set_up_timeout is not None:
        os.environ[SET_UP_LIMIT] = str(set_up_timeout)
    if place is not None:
        _recorder(folder, place.rank, place.world_size)  # before torch: importing it can take long
    if not watched() and (place is None or place.local_rank == 0):
        start_monitor(folder, hang_timeout)
    os.environ[MONITORED] = "1"  # for the processes that this one starts
    atexit.register(_at_exit, os.getpid())
    import torch.distributed as dist

    _replace_init(dist)
    _replace_start()
    return folder


def watched() -> bool:
    """Whether this process is a part of a job that somebody watches already."""
    return MONITORED in os.environ


def start_monitor(run: Path, hang_timeout: float | None) -> None:
    """Start the process that watches `run`; it ends with this one and the ranks."""
    words = [sys.executable, "-m", "crosscut.watch.monitor", str(run), str(hang_timeout or 0), str(os.getpid())]
    subprocess.Popen(words, start_new_session=True)


def record_started(run: Path, set_up_timeout: float | None) -> Callable[[], None]:
    """Let the processes that torch starts from here on record in `run`, which this process watches, until the returned
    function is called.
    """
    before = {name: os.environ.get(name) for name in (RUN, MONITORED, SET_UP_LIMIT)}
    os.environ[RUN], os.environ[MONITORED] = str(run), "1"
    if set_up_timeout is not None:
        os.environ[SET_UP_LIMIT] = str(set_up_timeout)
    put_back = _replace_start()

    def undo() -> None:
        put_back()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return undo


def adopt(rank: int, world_size: int) -> Recorder | None:
    """The recorder of this process, if it is watched, for a caller that counts the optimizer steps itself."""
    recorder = recorder_of(rank, world_size)
    if recorder is not None and (steps := _state.pop("steps", None)) is not None:
        steps.remove()
    return recorder


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
    """This process's recorder if it is watched, made at its first use, or anew if it was made for another rank."""
    known: Recorder | None = _state.get("recorder")
    guessed = _state.pop("guessed", False)
    if "run" in _state and (known is None or (guessed and (known.rank, known.ring.world_size) != (rank, world_size))):
        if known is not None:
            _forget(known)
        _recorder(Path(_state["run"]), rank, world_size)
    return _state.get("recorder")


def _recorder(folder: Path, rank: int, world_size: int) -> Recorder:
    recorder = _state["recorder"] = Recorder(folder, rank, world_size)
    if SET_UP_LIMIT in os.environ:
        recorder.ring.section(SET_UP, float(os.environ[SET_UP_LIMIT]))
    recorder.hook_process()
    obey(recorder)
    return recorder


def _forget(recorder: Recorder) -> None:
    """The rank was another one than had been guessed: its files go, unless that rank's own lie there by now."""
    recorder.failed = lambda error: None  # type: ignore[method-assign]
    path = recorder.ring.path
    taken = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(ValueError, OSError):
        path.rename(taken)  # from here on nobody else can put another there unseen
        if RingFile(taken).head().pid != os.getpid():
            os.link(taken, path)
        taken.unlink()


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
        if importlib.import_module("torch").cuda.is_available():
            recorder.ring.device("cuda")
        _state["inits"] = number = _state.get("inits", 0) + 1
        lane = recorder.ring.lane(INIT, range(size), number)
        caller = sys._getframe(1)
        site = f"{short_path(caller.f_code.co_filename)}:{caller.f_lineno}"
        entry = recorder.enter(lane, Call("init_process_group", "", "", "control", site, 1), 0)
        init(*args, **kwargs)
        recorder.ring.complete(entry)
        _observe(recorder, dist, ours=caller.f_globals.get("__name__", "").startswith("crosscut.comm"))

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
                self.observe(recorder)

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


def _replace_start() -> Callable[[], None]:
    """Let processes that torch.multiprocessing starts record too, until the returned function is called."""
    import torch.multiprocessing as mp

    module = sys.modules["torch.multiprocessing.spawn"]
    start = module.start_processes

    @functools.wraps(start)
    def start_processes(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
        return start(functools.partial(_started, fn, nprocs), args, nprocs, *rest, **kwargs)

    def replace(by: Any) -> None:
        module.start_processes = mp.start_processes = by  # type: ignore[attr-defined]

    replace(start_processes)
    return functools.partial(replace, start)


def _started(fn: Callable[..., Any], number: int, index: int, *args: Any) -> Any:
    """The function of a started process, recorded. Its parent catches its exceptions, so they are written down here."""
    _state.clear()  # a forked child is another rank than its parent
    folder = install()
    # Most likely its index is its rank: if not, `recorder_of` makes it right.
    if "recorder" not in _state and not _recorded(path_of(folder, index, "ring")):
        _state["guessed"] = True
        _recorder(folder, index, number)
    try:
        value = fn(index, *args)
    except BaseException as error:
        if (recorder := _state.get("recorder")) is not None:
            recorder.failed(error)
        raise
    if (recorder := _state.get("recorder")) is not None:
        recorder.ring.end(0)
    return value


def _recorded(path: Path) -> bool:
    """Whether a process that lives has its ring there."""
    with contextlib.suppress(ValueError):
        return look_at(RingFile(path).head())[0]
    return False


def finish(exit_code: int) -> None:
    """Say that this program has ended by itself."""
    recorder = _state.get("recorder")
    if recorder is not None:
        recorder.ring.end(exit_code)


def _at_exit(pid: int) -> None:
    """Say so where nobody stands around the program. `sys.exit(5)` comes here too: the code is not known."""
    recorder = _state.get("recorder")
    if recorder is not None and not recorder.ring.ended and os.getpid() == pid:  # a fork is no rank
        recorder.ring.end(0)
