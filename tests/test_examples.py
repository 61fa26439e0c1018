"""The examples do what they say: as scripts in this process (ranks are threads), and one of them under torchrun."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import crosscut as cc

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run_script(monkeypatch, capsys, name, *args):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def load(name):
    return runpy.run_path(str(EXAMPLES / name))["main"]


def test_all_examples_are_short():
    assert [name[:3] for name in SCRIPTS] == ["01_", "02_", "03_", "04_", "05_", "06_"]
    for name in SCRIPTS:
        assert len((EXAMPLES / name).read_text().splitlines()) < 60, name


def test_collectives(monkeypatch, capsys):
    lines = run_script(monkeypatch, capsys, "01_collectives.py")
    assert lines[0] == "rank 0: all_reduce of [0.0, 1.0, 2.0, 3.0] is [6.0, 10.0, 14.0, 18.0]"
    assert lines[4:8] == [f"rank {r}: its piece [{6.0 + 4 * r}]" for r in range(4)]
    assert lines[8] == "rank 0: all_to_all gives [0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]"
    assert lines[15] == "rank 3: maximum [3.0, 4.0, 5.0, 6.0], own sum of squares 86.0"
    assert lines[19] == "rank 3: handed in 32 bytes to all_reduce"
    assert len(lines) == 20


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_on_other_world_sizes(size):
    total = [float(size * (size - 1) // 2 + size * i) for i in range(size)]
    assert cc.spawn(load("01_collectives.py"), world_size=size, backend="threads") == [total] * size


def test_data_parallel_by_hand(monkeypatch, capsys):
    lines = run_script(monkeypatch, capsys, "02_data_parallel_by_hand.py")
    found = [re.fullmatch(r"rank (\d): loss of its rows (\S+) -> (\S+); weights off by (\S+)", line) for line in lines]
    assert [int(m[1]) for m in found] == [0, 1, 2, 3]
    assert all(float(m[3]) < float(m[2]) for m in found)
    assert len({m[2] for m in found}) == 4
    assert all(float(m[4]) < 1e-14 for m in found)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_data_parallel_on_other_world_sizes(size):
    assert all(off < 1e-14 for off in cc.spawn(load("02_data_parallel_by_hand.py"), world_size=size, backend="threads"))


def test_own_model(monkeypatch, capsys):
    lines = run_script(monkeypatch, capsys, "03_own_model.py")
    assert lines[4:] == [f"rank {r} (dp {r // 2}, tp {r % 2}): up.weight (32, 16) of (64, 16)" for r in range(4)]
    assert run_script(monkeypatch, capsys, "03_own_model.py", "dp=1")[:4] == lines[:4]
    losses = [float(line.split()[3]) for line in lines[:4]]
    assert losses[3] < losses[0] / 10


def test_own_model_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "03_own_model.py"), "tp=2"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    alone = cc.spawn(load("03_own_model.py"), cc.Mesh.of("dp=1"), world_size=1, backend="threads")[0]
    assert f"step 20  loss {alone:.4f}" in done.stdout
    assert "rank 1 (dp 0, tp 1): up.weight (32, 16) of (64, 16)" in done.stdout


def test_drop_in_fsdp(monkeypatch):
    """As a person runs it: two processes."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    command = [sys.executable, str(EXAMPLES / "04_drop_in_fsdp.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    pattern = r"rank (\d): (\S+) bytes -> (\S+); loss of its rows \S+; weights off by (\S+)"
    found = [re.fullmatch(pattern, line) for line in done.stdout.splitlines()]
    assert [int(m[1]) for m in found] == [0, 1]
    for m in found:
        whole, part = (int(number.replace(",", "")) for number in (m[2], m[3]))
        assert whole / 2 <= part * 1.01
        assert part <= whole / 2 * 1.01
        assert float(m[4]) < 1e-9


@pytest.mark.parametrize("size", [1, 3])
def test_drop_in_fsdp_on_other_world_sizes(size):
    assert all(off < 1e-9 for off in cc.spawn(load("04_drop_in_fsdp.py"), world_size=size, backend="threads"))


def test_find_a_hang():
    """It starts a job of its own, which hangs for the five seconds that it gives it."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "06_find_a_hang.py"], capture_output=True, text=True, timeout=100, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "the job ended with exit code 3; crosscut why says:"
    assert "rank 1 never made that call" in done.stdout
    assert lines[-1].startswith("as data: missing_call by rank 1 at ")
