"""Run one scenario: fork its ranks from this process (torch is imported once), watch them, and say what was found.

The ranks record by `crosscut.watch.install()` as under torchrun; the watchdog is the one of `python -m crosscut.watch`.
"""

import contextlib
import datetime
import json
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # what the programs import, imported once: the ranks are forks of this process
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor

import tests.parallel.models  # noqa: F401
from crosscut.watch import program
from crosscut.watch.folder import diagnose, path_of, write_json
from crosscut.watch.watchdog import Watchdog, end_ranks

from .inject import Inject

LIMIT_S = 25.0


@dataclass
class Scenario:
    """`kinds`: the verdicts that would be right; `bad`: the rank that is at fault."""

    name: str
    run: object
    ranks: int
    fault: str = ""
    bad: int = 1
    step: int = 4
    kinds: tuple = ("none",)
    environ: dict = field(default_factory=dict)

    @property
    def is_clean(self):
        return self.kinds == ("none",)


@dataclass
class Outcome:
    """What came of it. seconds: from the fault (its own time stamp) to the verdict."""

    scenario: Scenario
    verdict: str = "none"
    culprits: list = field(default_factory=list)
    text: str = ""
    seconds: float | None = None
    lost: int | None = None
    exits: dict = field(default_factory=dict)
    injected: bool = False
    ended_s: float = 0.0

    @property
    def detected(self):
        return self.verdict != "none"

    @property
    def right_kind(self):
        return self.verdict in self.scenario.kinds

    @property
    def right_culprit(self):
        return self.scenario.is_clean or self.culprits[:1] == [self.scenario.bad]


def run(scenario, folder, *, hang_timeout=1.5, install=True, environ=None):
    """The outcome of one scenario. Nothing is left running."""
    folder = Path(folder)
    (folder / "ledger").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    held = socket.socket() if scenario.fault == "port" else None
    if held is not None:  # somebody else listens there already
        held.bind(("", port))
        held.listen()
    began = time.time()
    sys.stdout.flush()
    pids = {}
    for rank in range(scenario.ranks):
        pid = os.fork()
        if pid == 0:
            _rank(scenario, folder, rank, port, install, environ or {})
        pids[pid] = rank
    out = Outcome(scenario)
    dog = Watchdog(folder, hang_timeout, since=began - 1)
    found = None
    running = dict(pids)
    try:
        while running and time.time() - began < LIMIT_S:
            for pid in list(running):
                got, status = os.waitpid(pid, os.WNOHANG)
                if got:
                    rank = running.pop(pid)
                    out.exits[rank] = os.waitstatus_to_exitcode(status)
                    _note_end(folder, rank, pid, out.exits[rank])
            if install and (found := dog.look()) is not None:
                break
            time.sleep(0.05)
        out.ended_s = time.time()
        if install and found is None:
            found = dog.look() or diagnose(folder)
    finally:
        if install:
            end_ranks(folder, dog.rings())
        for pid in running:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if held is not None:
            held.close()
    if found is not None:
        out.verdict, out.culprits, out.text = found.verdict, found.culprits, found.text
    stamp = folder / "injected"
    out.injected = stamp.exists()
    if out.injected:
        out.seconds = out.ended_s - float(stamp.read_text())
    saved = int((folder / "saved").read_text()) if (folder / "saved").exists() else 0
    out.lost = max(0, scenario.step - saved) if out.injected else None
    return out


def _note_end(folder, rank, pid, code):
    """As the process around a rank does."""
    output = folder / f"rank-{rank}.out"
    lines = output.read_text(errors="replace").splitlines()[-20:] if output.exists() else []
    if code != 0:
        body = {"exit_code": code, "last_lines": lines, "ended_s": time.time(), "pid": pid}
        write_json(path_of(folder, rank, "end"), body)


class _Stamped(Inject):
    """Writes down when the fault happened."""

    def __init__(self, folder, *args):
        super().__init__(*args)
        self.folder = folder

    def __call__(self, step):
        if self.rank == self.bad_rank and step == self.step and self.fault:
            (self.folder / "injected").write_text(str(time.time()))
        return super().__call__(step)


def _rank(scenario, folder, rank, port, install, environ):
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
            GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **{program.MONITORED: "1"}, **scenario.environ, **environ,
        )  # fmt: skip
        dist.set_debug_level_from_env()  # torch was imported before this environment was there
        torch.manual_seed(1)
        random.seed(rank if scenario.fault == "seeds" else 0)
        if install:
            program.install(folder)
        try:
            if getattr(scenario.run, "__name__", "") != "run":
                dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60 if install else 4))
            inject = _Stamped(folder, scenario.fault, rank, scenario.bad, scenario.step)
            if scenario.fault == "seeds" and rank == 0:
                (folder / "injected").write_text(str(time.time()))
            scenario.run(inject, folder)
            code = 0
            program.finish(0)
        except SystemExit as stop:
            code = stop.code
            program.finish(code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            if not install:
                (folder / f"rank-{rank}.raised").write_text(json.dumps([time.time(), str(sys.exc_info()[1])]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
