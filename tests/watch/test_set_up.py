"""Before the first call: limits of their own, ranks that never come, programs that never initialise; tracebacks, which
are those of `python SCRIPT`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from crosscut.cli.main import main
from crosscut.comm.call import Call
from crosscut.watch import program
from crosscut.watch.autopsy import autopsy
from crosscut.watch.facts import Facts, Failure
from crosscut.watch.folder import path_of
from crosscut.watch.ring import SET_UP, RingWriter
from crosscut.watch.watchdog import Watchdog

from .synthetic import reduce
from .synthetic import run as run_on_paper
from .test_main import watch

SPAWNS = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank_main(index, shift):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    rank = (index + shift) % 2
    if rank == 1 and sys.argv[2] == "before":
        time.sleep(100)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(2))

if __name__ == "__main__":
    mp.spawn(rank_main, (int(sys.argv[3]),), nprocs=2)
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("when, shift", [("before", 0), ("after", 1)])
def test_a_rank_that_never_comes_to_its_first_call(tmp_path, when, shift):
    """After the set-up's limit, not the shorter one of steps. With a shift, ranks are other than they look like."""
    (tmp_path / "train.py").write_text(SPAWNS)
    limits = ("--hang-timeout", 1, "--set-up-timeout", 6)
    done = watch("--run", "run", *limits, "train.py", 27000 + os.getpid() % 900, when, shift, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    call = {"before": "init_process_group, at train.py:11", "after": r"all_reduce\(sum\) #1 over world, at train.py:14"}
    assert re.search(f"rank 0 waits in {call[when]} since", done.stderr), done.stderr
    line = {"before": "10 in rank_main, before its first call", "after": "13 in rank_main since"}
    assert f"rank 1 never came: it is outside any collective at train.py:{line[when]}" in done.stderr
    assert "--set-up-timeout S" in done.stderr
    body = json.loads((tmp_path / "run" / "autopsy.json").read_text())
    assert (body["verdict"], body["culprits"]) == ("stuck_outside", [1])


@pytest.mark.parametrize("in_set_up", [True, False])
def test_a_rank_without_a_ledger_has_the_time_of_the_set_up(tmp_path, monkeypatch, in_set_up):
    """As long as the rank that waits for it has made no call either: later it has long been there, on another host."""
    ring = RingWriter(path_of(tmp_path, 0, "ring"), 0, 2)
    ring.section(SET_UP if in_set_up else "", 600)
    lane = ring.lane("world", (0, 1))
    monkeypatch.setattr("crosscut.watch.ring.now", lambda: 1)  # since boot
    ring.enter(lane, Call("barrier", "world", "", "step", "a.py:1", 1), 0)
    dog = Watchdog(tmp_path, 1e-3, set_up_s=1e9)
    dog.look()
    time.sleep(0.01)
    found = dog.look()
    assert (found is None) == in_set_up
    if found is not None:
        assert found.culprits == [1]
        assert "rank 1 never came: it has not started recording, so its program has not come to init" in found.text


def test_limits_must_be_positive(tmp_path):
    for name in ("hang_timeout", "set_up_timeout"):
        with pytest.raises(ValueError, match=f"{name}=0 must be positive"):
            program.install(tmp_path, **{name: 0})
    done = watch("--set-up-timeout", "0", __file__, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--set-up-timeout 0 must be positive" in done.stderr
    done = watch("--set-up-timeout", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert list(tmp_path.iterdir()) == []


PROGRAMS = {
    "raises": """
def f(x):
    try:
        {}["a"]
    except KeyError as e:
        raise ValueError(x) from e

f(1)
""",
    "syntax": "import os\nx = (1\ny = 2\n",
    "message": "import sys\nsys.exit('I stop: no data')\n",
    "interrupted": "raise KeyboardInterrupt\n",
    "imports": "import broken\n",
    "own_hook": """
import sys
sys.excepthook = lambda kind, error, trace: print("seen", kind, error, trace.tb_frame.f_code.co_name, trace.tb_next)
1 / 0
""",
    "main": """
import sys, atexit
class A:
    pass
atexit.register(lambda: print(A, sys.path[0], sys.modules["__main__"].A))
print(sorted(name for name in globals()), __spec__, __file__, sys.argv)
""",
}


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_it_prints_without_the_watch(tmp_path, name):
    (tmp_path / "own.py").write_text(PROGRAMS[name])
    (tmp_path / "broken.py").write_text("def g():\n    return = 3\n")
    bare = subprocess.run([sys.executable, "own.py", "7"], cwd=tmp_path, capture_output=True, text=True, check=False)
    seen = watch("--run", "run", "own.py", "7", cwd=tmp_path)
    ours = "" if name == "interrupted" else "crosscut watch: own.py never called torch.distributed.init_process_group: "
    assert seen.stdout == bare.stdout
    assert seen.stderr == bare.stderr + (f"{ours}nothing was recorded\n" if ours else "")
    assert seen.returncode == (130 if name == "interrupted" else bare.returncode)
    assert not (tmp_path / "run").exists() or name == "interrupted"


@pytest.mark.xdist_group("processes")
def test_a_program_that_is_killed_before_it_initialises(tmp_path):
    (tmp_path / "own.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    done = watch("own.py", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr == (
        "crosscut watch: own.py was killed by SIGKILL (out of memory?); it had not called "
        "torch.distributed.init_process_group: nothing was recorded\n"
    )


@pytest.mark.xdist_group("processes")
def test_a_progress_bar_comes_through_at_once(tmp_path):
    """It ends no line."""
    (tmp_path / "own.py").write_text("import os, time\nos.write(2, b'1%\\r')\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "crosscut.watch", "--run", "run", "own.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        assert process.stderr.read(3) == b"1%\r"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        process.stderr.close()


def test_an_error_of_a_process_that_loads_data_is_one_line():
    line = (
        "OSError: Caught OSError in DataLoader worker process 0. Original Traceback (most recent call last): File "
        '"worker.py", line 374, in _worker_loop data = fetcher.fetch(index) OSError: cannot decode 37.png'
    )
    facts = run_on_paper({rank: [reduce(lane, "a.py:1")] for lane in [_world()] for rank in range(2)})
    facts[1].failure = Failure(line, "train.py:16", 1.0, "Traceback ...\n  ^^^^\nOSError: cannot decode 37.png\n\n")
    facts[1].exit_code = 1
    found = autopsy(facts, 2)
    assert found.text.startswith(
        "rank 1 of 2 raised OSError: cannot decode 37.png (in a worker process) at train.py:16, after all_reduce"
    )


def _world():
    from crosscut.watch.reading import Lane

    return Lane("world", (0, 1))


def test_a_stopped_rank_is_told_how_to_go_on():
    facts = run_on_paper({0: [reduce(_world(), "a.py:1")], 1: []}, ended=False)
    facts[1].state, facts[1].ring.pid = "stopped", 4711
    assert autopsy(facts, 2).advice.startswith("kill -CONT 4711 lets it go on")
    facts[1].state = "running"
    assert "kill" not in autopsy(facts, 2).advice
    assert isinstance(facts[1], Facts)


MODEL = """
import os, signal, time, traceback
import torch
import crosscut

DIMS = crosscut.Dims({"embed.weight": ("vocab", "embed"), "head.weight": ("vocab", "embed")})

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 8)
        self.head = torch.nn.Linear(8, 256, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids))

def build(what):
    if os.environ.get("RANK") == "1" and any(frame.name == "run_rank" for frame in traceback.extract_stack()):
        if what == "sleeps":
            time.sleep(100)
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no weights")
    return Own()
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("what, code", [("sleeps", 3), ("dies", 3), ("raises", 1)])
def test_crosscut_train_before_its_first_step(tmp_path, what, code):
    """A model that is never built, that takes its rank along, or that raises: the last one leaves nothing."""
    (tmp_path / "own.py").write_text(MODEL)
    command = [sys.executable, "-m", "crosscut", "train", "--model", "own.py:build", "--mesh", "dp=2", "--steps", "2"]
    command += ["--model.args", f'{{what="{what}"}}', "--run.hang_timeout_s", "1", "--run.set_up_timeout_s", "4"]
    command += ["--train.seq_len", "16", "--run.dir", "runs/it", "--backend", "gloo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    if what == "raises":
        assert "rank 1 of 2 raised RuntimeError: no weights" in done.stderr
        assert not (tmp_path / "runs").exists()
        return
    body = json.loads((tmp_path / "runs" / "it" / "autopsy.json").read_text())
    assert body["culprits"] == [1]
    assert body["verdict"] == {"sleeps": "stuck_outside", "dies": "dead_rank"}[what]
    assert "own.py:20 in build" in done.stderr or what == "dies", done.stderr
    assert "run       runs/it (failed)" in done.stderr
    run = tmp_path / "runs" / "it"
    assert sorted(path.name for path in run.iterdir()) == ["autopsy.json", "autopsy.txt", "ledger"]
    assert (run / "ledger" / "rank-1.ring").exists()
    assert main(["why", str(run)]) == 0
