"""What torch's own tools say of a scenario: TORCH_DISTRIBUTED_DEBUG=DETAIL, Gloo's time-out, and the Flight Recorder's
analyser (`torchfrtrace`), the last two from one run.

Each gets what it needs to say its best. Every rank dumps its Flight Recorder when an exception ends it and when its
program ends; one that is stuck is asked over torch's worker server, which answers in C++. Gloo writes the groups into
its dumps without their names, on which the analyser stops with a KeyError: the names are put in here.
"""

import contextlib
import datetime
import http.client
import json
import os
import pickle
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _WorkerServer

from .inject import STEPLESS
from .launch import HANG_S, LIMIT_S, Ranks, start

NAMES = ("DETAIL", "Gloo time-out", "Flight Recorder")
GRACE_S = 1.0  # for the other ranks, from the first one that says something
SECONDARY = re.compile(  # errors that a rank has because of another one
    r"Timed out|Connection (closed|reset)|Broken pipe|(Read|Write) error|fail at \S*transport|monitoredBarrier|"
    r"mismatch between collectives"
)
NAMED = (
    r"[Rr]anks? (\d[\d, ]*) failed to pass monitoredBarrier",
    r"did not receive grad for rank (\d+)",
    r"Culprit rank (\d+)",
    r"missing ranks: \{([\d, ]+)\}",
    r"missed FR dumps from ranks \(\{([\d, ]+)\}\)",
)
SENT_TO = re.compile(r"Please check rank (\d+) logs")
REPORT = re.compile(
    r"(?=^Not all ranks joining|^Collective sequence number|^Input/output mismatch|^We cannot decide)", re.MULTILINE
)
PAIR = re.compile(r"Rank (\d+) is running collective.*?but Rank (\d+) is running", re.DOTALL)


@dataclass
class Said:
    """What a tool said. seconds: from the fault until the first word; named: the ranks at fault in its text; right: the
    one that is at fault is among them, and not every rank is; alarm: it spoke though nothing had happened yet.
    """

    detected: bool = False
    named: tuple = ()
    right: bool = False
    seconds: float | None = None
    hangs: bool = False
    alarm: bool = False
    all_named: bool = False
    text: str = ""

    def __str__(self):
        if not self.detected:
            return "false alarm" if self.alarm else "hangs" if self.hangs else "silent"
        who = f"rank {'/'.join(map(str, self.named))}" if self.named else "no rank"
        who = "any rank" if self.all_named else who if self.right or not self.named else who.replace("rank", "wrong:")
        return f"{who}, {self.seconds:.1f}\N{NO-BREAK SPACE}s"


def fits(scenario):
    """Whether these tools are for such a program: torch's own back end, and a world that the program does not start."""
    return scenario.backend == "gloo" and scenario.fault != "section"  # they know no sections


def ask(scenario, folder):
    """[Said] of each tool."""
    folder = Path(folder)
    detail = _Run(scenario, folder / "detail", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    plain = _Run(scenario, folder / "plain", {"TORCH_FR_BUFFER_SIZE": "2000"})
    return [detail.said(), plain.said(), plain.analysed()]


class _Run:
    """A run of a scenario with nothing of crosscut's in it."""

    def __init__(self, scenario, folder, environ):
        self.scenario, self.folder = scenario, folder
        ranks = Ranks(scenario, folder, _plain, environ)
        try:
            limit = ranks.began + LIMIT_S
            while ranks.running and time.time() < limit:
                ranks.poll()
                if _raised(folder) or self._crashed(ranks):
                    limit = min(limit, time.time() + GRACE_S)
                if (when := ranks.injected()) is not None:
                    limit = min(limit, when + 4 * HANG_S)
                time.sleep(0.02)
            self.ended, self.raised, self.crashed = time.time(), _raised(folder), self._crashed(ranks)
            self.hangs = bool(ranks.running) and not self.raised
            if "TORCH_FR_BUFFER_SIZE" in environ:
                for rank in ranks.running.values():
                    _fetch(folder, rank)
        finally:
            ranks.close()
        self.stamp = ranks.injected()
        self.first = min((when for when, _, _ in self.raised.values()), default=self.ended) - (
            self.stamp or ranks.began
        )

    def _crashed(self, ranks):
        """Ranks that the fault did not end and that ended without an exception."""
        return sorted(rank for rank, code in ranks.exits.items() if code < 0 and rank not in self.scenario.at_fault)

    def said(self):
        """What the ranks themselves were told."""
        if not self.raised and not self.crashed:
            return Said(hangs=self.hangs)
        texts = {rank: text for rank, (_, text, _) in self.raised.items()}
        named = {rank for rank, text in texts.items() if not SECONDARY.search(text)}
        pairs = []
        for _, text, members in self.raised.values():
            named |= {members[k] for k in _named(text) if k < len(members)}
            pairs += [{members[int(k)] for k in pair if int(k) < len(members)} for pair in PAIR.findall(text)]
        if pairs:
            shared = set.intersection(*pairs)
            named |= shared if len(shared) == 1 else set.union(*pairs)
        if not named:  # sent to the log of a rank that has said nothing
            sent = [members[int(k)] for _, text, members in self.raised.values() for k in SENT_TO.findall(text)]
            named = {rank for rank in sent if rank not in texts}
        return self._judged(named, "\n".join(f"{rank}: {text}" for rank, text in texts.items()))

    def analysed(self):
        """What the analyser makes of the dumps."""
        dumps = self.folder / "dumps"
        if not list(dumps.glob("rank_*")):
            return Said(hangs=self.hangs)
        _name_groups(dumps, self.scenario.ranks)
        text = _analyse(dumps, self.folder / "analysis.txt")
        if not REPORT.search(text):
            return Said(hangs=self.hangs, text=text)
        first = {}  # of each group, since what follows a difference is no news
        for report in REPORT.split(text):
            if names := _named(report):
                first.setdefault("".join(re.findall(r"^group info: .*$", report, re.MULTILINE)), names)
        return self._judged(set().union(*first.values()), text)

    def _judged(self, named, text):
        early = self.scenario.fault not in STEPLESS and self.stamp is None
        if early or self.scenario.is_clean or self.scenario.fault == "slow":  # nothing is broken, or not yet
            return Said(alarm=True, text=text)
        named = tuple(sorted(named))
        fault, every = set(self.scenario.at_fault), len(named) == self.scenario.ranks
        right = fault <= set(named) and (not every or len(fault) == len(named))
        return Said(True, named, right, self.first, all_named=every and not right, text=text)


def _raised(folder):
    files = {int(path.stem.partition("-")[2]): path for path in folder.glob("*.raised")}
    return {rank: json.loads(path.read_text()) for rank, path in sorted(files.items())}


def _named(text):
    """The ranks that a text says to be at fault."""
    return {int(k) for pattern in NAMED for part in re.findall(pattern, text) for k in re.findall(r"\d+", part)}


def _plain(scenario, folder, rank):
    """One rank without crosscut's recorder."""
    server = _WorkerServer(str(folder / f"{rank}.socket"))
    dist.distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=HANG_S)  # that of groups made later
    dist.Logger.set_construction_data_and_log = lambda *_: None  # on Gloo under DETAIL it crashes DDP's constructor
    known = []

    def tell_groups():
        groups = _groups()
        if len(groups) != len(known):
            known[:] = groups
            (folder / f"groups-{rank}.json").write_text(json.dumps(groups))

    code = 0
    try:
        start(scenario, folder, rank, HANG_S, tell_groups)
    except SystemExit as stop:
        return stop.code
    except BaseException as error:
        partial = folder / f"rank-{rank}.partial"
        partial.write_text(
            json.dumps([time.time(), f"{type(error).__name__}: {error}", _members(error, scenario.ranks)])
        )
        partial.rename(folder / f"rank-{rank}.raised")
        code = 1
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        _keep(folder, rank, pickle.loads(_dump_fr_trace()))
    server.shutdown()
    return code


def _groups():
    """{name: ranks} of this rank's groups."""
    world = dist.distributed_c10d._world
    return {name: sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


def _members(error, size):
    """The ranks of the group whose call raised: torch's messages count within it, and the traceback shows it."""
    group, trace = None, error.__traceback__
    while trace is not None:
        group, trace = trace.tb_frame.f_locals.get("group", group), trace.tb_next
    return sorted(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else list(range(size))


def _keep(folder, rank, dump):
    (folder / "dumps").mkdir(exist_ok=True)
    (folder / "dumps" / f"rank_{rank}").write_bytes(pickle.dumps(dump))


def _fetch(folder, rank):
    """The dump of a rank that cannot give it by itself, if its process still answers."""
    if (folder / "dumps" / f"rank_{rank}").exists():
        return
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(1.0)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError), connection.sock:
        connection.sock.connect(str(folder / f"{rank}.socket"))
        connection.request("POST", "/handler/fr_trace_json")
        dump = json.loads(connection.getresponse().read())
        if dump.get("entries"):
            _keep(folder, rank, dump)


def _name_groups(dumps, size):
    groups = {}
    for path in dumps.parent.glob("groups-*"):
        groups.update(json.loads(path.read_text()))
    for path in dumps.glob("rank_*"):
        dump = pickle.loads(path.read_bytes())
        names = {tuple(entry["process_group"]) for entry in dump["entries"]}
        ranks = {name: groups.get(name, list(range(size))) for name, _ in names}
        dump["pg_config"] = {name: {"name": name, "desc": desc, "ranks": str(ranks[name])} for name, desc in names}
        for entry in dump["entries"]:
            entry["process_group"] = tuple(entry["process_group"])
        path.write_bytes(pickle.dumps(dump))


def _analyse(dumps, output):
    """The analyser's text, from a fork."""
    pid = os.fork()
    if pid == 0:
        try:
            handle = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            from torch.distributed.flight_recorder.components import loader
            from torch.distributed.flight_recorder.fr_trace import main

            # The analyser holds all ranks against the first file that the file system happens to name: rank 0's here.
            in_order = SimpleNamespace(walk=lambda top: [(top, [], sorted(os.listdir(top)))], path=os.path)
            loader.os = in_order
            main(["--allow-incomplete-ranks", "--prefix", "rank_", str(dumps)])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    return output.read_text(errors="replace")
