"""`python -m crosscut.watch`: what is wrong with the call, a program without torch.distributed, and one that hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from crosscut.watch.folder import look_at, python_stack
from crosscut.watch.reading import read_ring

SPAWNS = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank_main(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for step in range(5):
        dist.all_reduce(torch.ones(3))
    while rank == 1:
        pass
    dist.broadcast(torch.ones(2), 0)

if __name__ == "__main__":
    mp.spawn(rank_main, nprocs=2)
"""
ALONE = """
import sys
print("I run", sys.argv[1:], __name__)
sys.exit(7)
"""


def watch(*words, **rest):
    command = [sys.executable, "-m", "crosscut.watch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **rest)


@pytest.mark.parametrize(
    "words, said",
    [
        (["nowhere.py"], "nowhere.py: no such script"),
        (["-m", "no_such_module"], "no such module"),
        (["-m", "os.path.more"], "-m os.path.more: no such module"),
        (["--hang-timeout", "-1", __file__], "must be positive"),
        (["--hang-timeout", "nan", __file__], "must be positive"),
    ],
)
def test_what_is_wrong_with_the_call(words, said, tmp_path):
    done = watch(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.xdist_group("processes")
def test_a_program_without_torch_distributed(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    done = watch("--run", tmp_path / "run", tmp_path / "alone.py", "--lr", "3")
    assert done.returncode == 7
    assert "I run ['--lr', '3'] __main__" in done.stdout
    assert "never called torch.distributed.init_process_group: nothing was recorded" in done.stderr


@pytest.mark.xdist_group("processes")
def test_ranks_that_the_program_spawns(tmp_path):
    """No launcher: the ranks are grandchildren. One loops; the job ends with exit code 3 and says which."""
    (tmp_path / "train.py").write_text(SPAWNS)
    done = watch("--run", tmp_path / "run", "--hang-timeout", 2, tmp_path / "train.py", 29000 + os.getpid() % 900)
    assert done.returncode == 3, done.stderr
    assert "rank 0 waits in broadcast #6 over world" in done.stderr
    assert "rank 1 never came: it computes or loops outside any collective at" in done.stderr
    assert re.search(r"train\.py:1[12] in rank_main", done.stderr)
    body = json.loads((tmp_path / "run" / "autopsy.json").read_text())
    assert (body["verdict"], body["culprits"]) == ("stuck_outside", [1])
    for rank in range(2):
        alive, _ = look_at(read_ring(tmp_path / "run" / "ledger" / f"rank-{rank}.ring"))
        assert not alive


@pytest.mark.xdist_group("processes")
def test_a_stopped_rank_of_crosscut_train(tmp_path):
    """Always on in `crosscut train`: rings in the run folder, and the watchdog ends a run that hangs."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "crosscut", "train", "--mesh", "dp=2", "--steps", "100000", "--run.dir", str(run)]
    command += ["--model.name", "mlp", "--model.dim", "16", "--train.eval_every", "0", "--run.hang_timeout_s", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        metrics = run / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 5):
            time.sleep(0.1)
        ring = read_ring(run / "ledger" / "rank-1.ring")
        assert ring.records[-1].step > 0
        os.kill(ring.pid, signal.SIGSTOP)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3, err
    assert "rank 1" in err
    assert "is stopped (SIGSTOP, or a debugger)" in err
    assert json.loads((run / "autopsy.json").read_text())["culprits"] == [1]
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


def test_the_stack_of_the_program_is_found_in_a_dump():
    text = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/distributed/c10d.py", line 9 in all_reduce
  File "/home/user/job/train.py", line 12 in step
  File "/home/user/job/train.py", line 30 in <module>
"""
    assert python_stack(text) == ["job/train.py:12 in step", "job/train.py:30 in <module>"]


INSTALLS = """
import os, time
import torch, torch.distributed as dist
import crosscut.watch

crosscut.watch.install(os.environ["WHERE"], hang_timeout=2)
torch.set_num_threads(1)
dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    with crosscut.watch.section("looking at the data", 1):
        time.sleep(100)
dist.all_reduce(torch.ones(3))
"""


def run_ranks(tmp_path):
    """The exit codes of two ranks of train.py, and what rank 0 said."""
    port = str(28000 + os.getpid() % 900)
    environ = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WHERE": "run"}
    environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE="2")
    ranks = []
    for rank in range(2):
        own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        errors = (tmp_path / f"{rank}.err").open("w")
        ranks.append(subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=own, stderr=errors))
        errors.close()
    codes = [process.wait(60) for process in ranks]
    return codes, (tmp_path / "0.err").read_text()


@pytest.mark.xdist_group("processes")
def test_three_lines_in_the_program(tmp_path):
    """Without the process around it: the first rank starts a monitor, which ends both ranks with exit code 3."""
    (tmp_path / "train.py").write_text(INSTALLS)
    codes, said = run_ranks(tmp_path)
    assert codes == [3, 3], said
    assert "rank 0 waits in all_reduce(sum) #4 over world, at train.py:14 since" in said
    assert 'rank 1 never came: it is outside any collective at train.py:13 in <module> (section "looking' in said


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("end", ["sys.exit(0)", "1 / 0"])
def test_a_rank_that_ends_before_the_others(tmp_path, end):
    """By itself that is no fault, though nobody stands around the program to see its exit code; by an error it is."""
    program = INSTALLS[: INSTALLS.index("if dist")] + f"if dist.get_rank() == 1:\n    {end}\ntime.sleep(4)\n"
    (tmp_path / "train.py").write_text("import sys\n" + program)
    codes, said = run_ranks(tmp_path)
    if end == "1 / 0":
        assert codes == [3, 1], said
        assert "rank 1 of 2 raised ZeroDivisionError: division by zero at train.py" in said
    else:
        assert (codes, said) == ([0, 0], "")
        assert not (tmp_path / "run" / "autopsy.json").exists()
