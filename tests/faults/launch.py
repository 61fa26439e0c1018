"""Run one scenario: fork its ranks from this process (torch is imported once), watch them, and say what was found.

The ranks record by `crosscut.watch.install()` as under torchrun; the watchdog is the one of `python -m crosscut.watch`.
"""

import contextlib
import datetime
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # what the programs import, imported once: the ranks are forks of this process
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

import crosscut
import tests.parallel.models  # noqa: F401
from crosscut.watch import program
from crosscut.watch.folder import diagnose, path_of, write_json
from crosscut.watch.watchdog import Watchdog, end_ranks

from .inject import EVERY, Inject

HANG_S = 1.5
LIMIT_S = 25.0


@dataclass
class Scenario:
    """`kinds`: the verdicts that would be right; `bad`: the rank that is at fault, or EVERY; `backend`: what the
    program is handed, "" if it starts its own world.
    """

    name: str
    run: Callable
    ranks: int
    fault: str = ""
    bad: int = 1
    step: int = 5
    kinds: tuple = ("none",)
    backend: str = "gloo"

    @property
    def is_clean(self):
        return self.kinds == ("none",)

    @property
    def at_fault(self):
        return list(range(self.ranks)) if self.bad == EVERY else [self.bad]


@dataclass
class Outcome:
    """What came of it. seconds: from the fault (its own time stamp) to the verdict."""

    verdict: str = "none"
    culprits: tuple = ()
    text: str = ""
    seconds: float | None = None
    lost: int | None = None
    injected: bool = False

    @property
    def detected(self):
        return self.verdict != "none"

    def right_kind(self, scenario):
        return self.verdict in scenario.kinds

    def right_culprit(self, scenario):
        """The rank at fault is named, and named first."""
        if scenario.is_clean:
            return True
        return list(self.culprits[: len(scenario.at_fault)]) == scenario.at_fault


class Ranks:
    """The forked ranks of a scenario, until `close`. `body(scenario, folder, rank)` gives the exit code of one."""

    def __init__(self, scenario, folder, body, environ=()):
        self.folder, self.exits, self.running = folder, {}, {}
        (folder / "ledger").mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._held = socket.socket()
        if scenario.fault == "port":  # somebody else listens there already
            self._held.bind(("", port))
            self._held.listen()
        self.began = time.time()
        sys.stdout.flush()
        for rank in range(scenario.ranks):
            pid = os.fork()
            if pid == 0:
                _child(scenario, folder, rank, port, body, environ)
            self.running[pid] = rank

    def poll(self):
        """[(rank, pid)] of those that have ended since the last look."""
        ended = []
        for pid in list(self.running):
            got, status = os.waitpid(pid, os.WNOHANG)
            if got:
                rank = self.running.pop(pid)
                self.exits[rank] = os.waitstatus_to_exitcode(status)
                ended.append((rank, pid))
        return ended

    def close(self):
        """Nothing is left running."""
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._held.close()

    def injected(self):
        """When the fault happened, None if it did not."""
        stamp = self.folder / "injected"
        return float(stamp.read_text()) if stamp.exists() else None


def run(scenario, folder):
    """The outcome of one scenario under the watchdog."""
    folder = Path(folder)
    ranks = Ranks(scenario, folder, _watched)
    dog = Watchdog(folder, HANG_S, since=ranks.began - 1)
    found = None
    try:
        while ranks.running and time.time() - ranks.began < LIMIT_S:
            for rank, pid in ranks.poll():
                _note_end(folder, rank, pid, ranks.exits[rank])
            if (found := dog.look()) is not None:
                break
            time.sleep(0.05)
        ended = time.time()
        found = found or dog.look() or diagnose(folder)
    finally:
        end_ranks(folder, dog.rings())
        ranks.close()
    out = Outcome(found.verdict, tuple(found.culprits), found.text)
    if (when := ranks.injected()) is not None:
        saved = int((folder / "saved").read_text()) if (folder / "saved").exists() else 0
        out.injected, out.seconds, out.lost = True, ended - when, max(0, scenario.step - saved)
    return out


def _note_end(folder, rank, pid, code):
    """As the process around a rank does."""
    output = folder / f"rank-{rank}.out"
    lines = output.read_text(errors="replace").splitlines()[-20:] if output.exists() else []
    if code != 0:
        body = {"exit_code": code, "last_lines": lines, "ended_s": time.time(), "pid": pid}
        write_json(path_of(folder, rank, "end"), body)


class _Stamped(Inject):
    """Writes down when the fault happened. `each_step` is called before it may."""

    def __init__(self, folder, each_step, *args):
        super().__init__(*args)
        self.folder, self.each_step = folder, each_step

    def __call__(self, step):
        self.each_step()
        return super().__call__(step)

    def happens(self):
        partial = self.folder / f"injected.{self.rank}"
        partial.write_text(str(time.time()))
        partial.replace(self.folder / "injected")


def start(scenario, folder, rank, timeout_s, each_step=lambda: None):
    """Run the program of a scenario in this rank."""
    if scenario.backend == "shm":
        crosscut.register_shm()
    if scenario.backend:
        dist.init_process_group(scenario.backend, timeout=datetime.timedelta(seconds=timeout_s))
    inject = _Stamped(folder, each_step, scenario.fault, rank, scenario.bad, scenario.step)
    scenario.run(inject, folder)


def _watched(scenario, folder, rank):
    program.install(folder)
    try:
        start(scenario, folder, rank, 60)
        program.finish(0)
        return 0
    except SystemExit as stop:
        program.finish(stop.code)
        return stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def _child(scenario, folder, rank, port, body, environ):
    """One rank, in a fork. Never returns."""
    code = 1
    try:
        output = os.open(folder / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update(
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(scenario.ranks)},
            LOCAL_WORLD_SIZE=str(scenario.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **{program.MONITORED: "1"}, **dict(environ),
        )  # fmt: skip
        dist.set_debug_level_from_env()  # torch was imported before this environment was there
        torch.manual_seed(1)
        random.seed(0)
        code = body(scenario, folder, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
