"""Ranks as processes: started, named when they fail, never left behind; under torchrun; what cannot be run is said."""

import glob
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from comm import spawned
from crosscut.comm import RankError, spawn
from crosscut.comm.choose import choose_backend, choose_threads
from crosscut.comm.launched import Launched, launched
from crosscut.comm.outcome import End, Failure, settle

SCRIPT = str(Path(spawned.__file__))
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_place(monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)


def children():
    """Living child processes, apart from the warm pool and Python's resource tracker."""
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline())
    }


def folders():
    return set(glob.glob(os.path.join(tempfile.gettempdir(), f"crosscut-world-{os.getpid()}-*")))


def gone(pids, within_s=10.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_values_and_what_a_rank_knows(monkeypatch, capfd):
    """One launch: values in rank order, the port of the environment, threads, printing, nothing left behind."""
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before, handler = children(), signal.getsignal(signal.SIGTERM)
    environment = dict(os.environ)
    values = spawn(spawned.works, 5, extra=2, world_size=2, backend="gloo")
    assert [value["rank"] for value in values] == [0, 1]
    for value in values:
        assert value["sum"].tolist() == [1.0, 3.0, 5.0]
        assert value["value"] == 7
        assert value["port"] == port
        assert value["backend"] == ("gloo", "backend='gloo' was asked for")
        assert value["threads"] == (1, 1, "OMP_NUM_THREADS=1")
        assert value["interface"] == ("lo" if sys.platform == "linux" else None)
    assert len({value["pid"] for value in values} | {os.getpid()}) == 3
    out, err = capfd.readouterr()
    assert out.splitlines() == ["line of rank 0", "line of rank 1"]
    assert not err
    assert children() == before
    assert not folders()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert dict(os.environ) == environment


def test_a_rank_that_raises(capfd):
    before = children()
    with pytest.raises(ValueError, match="rank 1 of 3 raised ValueError: loss is nan at step 3") as caught:
        spawn(spawned.fails_at_step, 1, world_size=3, backend="gloo")
    error = caught.value
    assert isinstance(error, RankError)
    assert "stopped ranks 0,2 after" in str(error)
    assert "\n" not in str(error)
    assert float(str(error).rsplit(" after ", 1)[1].removesuffix(" s")) < 5
    assert isinstance(error.original, ValueError)
    assert "spawned.py" in error.traceback_text
    assert "Traceback" not in capfd.readouterr().err
    assert children() == before
    assert not folders()


def test_a_rank_that_is_killed():
    before = children()
    with pytest.raises(RankError, match=r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL \(out of memory\?\)") as caught:
        spawn(spawned.is_killed, 1, world_size=2, backend="gloo")
    assert caught.value.rank == 1
    assert children() == before
    assert not folders()


def started(folder):
    """A launcher in a process of its own, once both ranks run. Returns it and the ranks' pids."""
    launcher = subprocess.Popen([sys.executable, SCRIPT, "waits", str(folder)], env={**os.environ, **PATHS})
    end = time.monotonic() + 60
    files = [folder / "0.pid", folder / "1.pid"]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end
        assert launcher.poll() is None
        time.sleep(0.05)
    return launcher, [int(file.read_text()) for file in files]


PATHS = {"PYTHONPATH": os.pathsep.join([str(Path(SCRIPT).parent.parent), *filter(None, sys.path)])}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_to_the_launcher_ends_every_rank(number, tmp_path):
    """Rank 0 is inside a collective, where no Python handler runs. SIGKILL: the kernel tells the ranks."""
    launcher, ranks = started(tmp_path)
    began = time.monotonic()
    launcher.send_signal(number)
    code = launcher.wait(20)
    assert gone(ranks)
    assert time.monotonic() - began < 6
    assert code in ({signal.SIGINT: (-2, 130, 1), signal.SIGTERM: (-15,), signal.SIGKILL: (-9,)}[number])
    left = glob.glob(os.path.join(tempfile.gettempdir(), f"crosscut-world-{launcher.pid}-*"))
    if number != signal.SIGKILL:
        assert not left
    else:  # nobody was there to remove it: the next launcher does
        from crosscut.comm.processes import _folder

        assert left
        with _folder():
            assert not os.path.exists(left[0])


def test_ctrl_c_while_ranks_import_torch_is_quiet(tmp_path):
    """A terminal sends SIGINT to every process at once, also to ranks in which nothing of crosscut runs yet."""
    command = [sys.executable, SCRIPT, "waits", str(tmp_path)]
    launcher = subprocess.Popen(
        command, env={**os.environ, **PATHS}, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    ranks, end = [], time.monotonic() + 60
    while len(ranks) < 2:
        assert time.monotonic() < end
        found = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [process for process in found if "spawn_main" in " ".join(process.cmdline())]
        time.sleep(0.01)
    began = time.monotonic()
    os.killpg(launcher.pid, signal.SIGINT)
    said = launcher.communicate(timeout=30)[1]
    assert time.monotonic() - began < 5 * 2
    assert not list(tmp_path.glob("*.pid"))  # it was early enough
    assert gone([process.pid for process in ranks])
    assert said.count("Traceback") == 1  # the launcher's own: its script does not catch KeyboardInterrupt
    assert "spawn_main" not in said


def test_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["--log-dir", str(tmp_path / "logs"), SCRIPT]  # torchrun itself would leave a folder
    subprocess.run([*command, "torchrun", str(tmp_path)], env={**os.environ, **PATHS}, check=True, timeout=100)
    for rank in "01":
        said = json.loads((tmp_path / rank).read_text())
        assert said["values"] == [[10, 0, 0], [10, 1, 1]]
        assert said["again"] == [[1, 0, 0], [1, 1, 1]]
        assert "world_size=4" in said["refused"]
        assert "WORLD_SIZE=2" in said["refused"]


# -- without starting anything ---------------------------------------------------------------------------------------


def value_error(match, *args, **kwargs):
    with pytest.raises(ValueError, match=match) as caught:
        spawn(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_functions_that_processes_cannot_find():
    value_error("lambda.*top level of a module.*backend='threads'", lambda ctx: 1, world_size=2, backend="gloo")

    def inner(ctx):
        return 1

    value_error("inner.*top level", inner, world_size=2, backend="gloo")
    value_error("cannot be sent", spawned.works, 1, extra=(i for i in "ab"), world_size=2, backend="gloo")


def test_functions_of_a_prompt():
    code = (
        "from crosscut.comm import spawn\n"
        "def f(ctx): return 1\n"
        "try: spawn(f, world_size=2, backend='gloo')\n"
        "except ValueError as error: print(error)\n"
        "print(spawn(f, world_size=2, backend='threads'))\n"
    )
    out = subprocess.run([sys.executable, "-"], input=code, text=True, capture_output=True, check=True)
    assert "f is defined in a notebook or prompt" in out.stdout
    assert out.stdout.endswith("[1, 1]\n")


def test_places_said_in_part(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    value_error("RANK=0 is set but WORLD_SIZE is not", spawned.total, 1, world_size=2, backend="gloo")
    monkeypatch.setenv("WORLD_SIZE", "2")
    value_error("RANK=0 is set but MASTER_ADDR is not.*torchrun", spawned.total, 1, backend="gloo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    value_error("world_size=4.*WORLD_SIZE=2", spawned.total, 1, world_size=4, backend="gloo")
    assert launched() == Launched(0, 2, 0, 2)
    monkeypatch.setenv("RANK", "2")
    value_error("RANK=2 does not lie within WORLD_SIZE=2", spawned.total, 1, backend="gloo")
    monkeypatch.setenv("RANK", "two")
    value_error("RANK='two'", spawned.total, 1, backend="gloo")


def test_ports_and_addresses(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "x1")
    value_error("MASTER_PORT='x1'", spawned.total, 1, world_size=2, backend="gloo")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        value_error(f"MASTER_PORT={port} is in use.*free port", spawned.total, 1, world_size=2, backend="gloo")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    value_error("MASTER_ADDR=192.0.2.7 is not this machine.*torchrun", spawned.total, 1, world_size=2, backend="gloo")


def test_sizes_back_ends_and_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    value_error("world_size is not known", spawned.total, 1)
    for size in (0, -1, 2.0, True):
        value_error("world_size=.*whole number", spawned.total, 1, world_size=size, backend="threads")
    value_error("timeout_s=0", spawned.total, 1, world_size=1, timeout_s=0)
    value_error("backend='glo' is unknown; did you mean 'gloo'", spawned.total, 1, world_size=2, backend="glo")
    value_error("backend='nccl', but torch sees no GPU", spawned.total, 1, world_size=2, backend="nccl")
    value_error("device='cuda', but torch sees no GPU", spawned.total, 1, world_size=2, device="cuda")
    value_error("device='tpu' is unknown", spawned.total, 1, world_size=2, device="tpu")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert spawn(spawned.total, 1, backend="threads") == [(3, 0, 0), (3, 1, 1), (3, 2, 2)]
    monkeypatch.setenv("WORLD_SIZE", "many")
    value_error("WORLD_SIZE='many'", spawned.total, 1, backend="threads")


def test_gpus_are_used_or_it_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_backend(None, None, 2).backend == "nccl"
    assert "2 GPU" in choose_backend(None, None, 2).why
    assert choose_backend(None, "cpu", 4).backend == "shm"
    assert choose_backend(None, "cpu", 4, world_size=8).backend == "gloo"  # shared memory does not leave the host
    assert choose_backend("gloo", None, 4).device == "cpu"
    value_error("4 ranks on this host need 4 GPUs, it has 2.*device='cpu'", spawned.total, 1, world_size=4)
    for backend in ("gloo", "threads"):
        value_error("runs on the CPU", spawned.total, 1, world_size=2, backend=backend, device="cuda")
    value_error("NCCL runs on GPUs only", spawned.total, 1, world_size=2, backend="nccl", device="cpu")


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert choose_threads(2) == (4, "8 core(s) for 2 rank(s)")
    assert choose_threads(16)[0] == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads(2) == (3, "OMP_NUM_THREADS=3")


def failure(line, time_s, is_peer=False, is_value_error=False):
    return Failure(line, "a traceback", is_peer, is_value_error, time_s, None)


@pytest.mark.parametrize(
    "ends, message",
    [
        (
            [End(failure=failure("PeerError: x", 1, is_peer=True)), End(failure=failure("OSError: disk", 2))],
            "rank 1 of 2 raised OSError: disk; stopped rank 0",
        ),
        (
            [End(failure=failure("OSError: b", 2)), End(failure=failure("KeyError: a", 1))],
            "rank 1 of 2 raised KeyError",
        ),
        ([End(), End(exit_code=-11, pid=7)], r"rank 1 of 2 \(pid 7\) was killed by SIGSEGV \(a crash in native code\)"),
        ([End(exit_code=3, pid=7), End()], r"rank 0 of 2 \(pid 7\) ended with exit code 3 without returning"),
        ([End(exit_code=1, pid=7, started=False), End()], "before its function began.*__name__ == '__main__'"),
        (
            [End(failure=failure("PeerError: x", 1, is_peer=True)), End(pid=8)],
            r"rank 1 of 2 \(pid 8\) ended with exit code 0 but without returning; look for os._exit",
        ),
        (
            [End(failure=failure("PeerError: barrier", 1, is_peer=True)), End(returned=True)],
            "rank 0 of 2 raised PeerError: barrier; rank 1 had returned by then: look there for a call too few",
        ),
        ([End(returned=True), End(exit_code=-40, pid=7)], "killed by signal 40|killed by SIG"),
    ],
)
def test_which_rank_is_blamed(ends, message):
    with pytest.raises(RankError, match=message) as caught:
        settle(ends, time.monotonic())
    assert caught.value.rank not in caught.value.folded
