"""The benchmark of steps: every contender makes a step, silence changes no work, and rows say what was measured."""

import io
import json
import statistics
from math import comb

import pytest
import torch
from rich.console import Console

from crosscut.bench import trials
from crosscut.bench.steps import contenders
from crosscut.bench.steps.measure import Steps, show, to_markdown
from crosscut.bench.steps.memory import peak_bytes
from crosscut.bench.steps.ranks import StepPlan, rank_main
from crosscut.bench.steps.silent import SilentWorld
from crosscut.bench.steps.workloads import WORKLOADS
from crosscut.cli.main import main
from crosscut.comm.context import Context

KEYS = {
    "workload", "parallel", "backend", "world_size", "trials", "ours_ms", "peer_ms", "ratio", "ratio_low", "ratio_high",
    "no_comm_ms", "exposed", "floor", "single_ms", "efficiency", "peak_memory_bytes", "peer_peak_memory_bytes",
}  # fmt: skip


def test_rows(pool, tmp_path):
    path = tmp_path / "events.jsonl"
    plan = StepPlan(("transformer-small",), ("ddp", "fsdp"), ("shm",), 2, seconds=0.01, trials=5)
    pool.run(rank_main, plan, str(path), world_size=2, backend="shm", timeout_s=100)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [event for event in events if event.pop("kind") == "row"]
    assert [row["parallel"] for row in rows] == ["ddp", "fsdp"]
    for row in rows:
        assert set(row) == KEYS
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["efficiency"] > 0
    held = {row["parallel"]: row["peak_memory_bytes"] for row in rows}
    assert held["ddp"] > 1.2 * held["fsdp"]  # whole parameters, gradients and moments beside halves


def steps_alike(ctx):
    """Ours and the peer's: the same loss falls, from the same model, whatever cuts it."""
    workload = WORKLOADS["mlp"]
    quiet = SilentWorld(ctx.transport)
    for parallel in ("ddp", "tp", "pp"):
        step = contenders.ours(workload, parallel, Context(quiet))
        before = len(quiet._made)
        step()
        assert len(quiet._made) == before
    quiet.silence()
    step()  # every rank by itself: nobody is waited for
    return True


def test_a_silent_world_waits_for_nobody(pool):
    assert pool.run(steps_alike, world_size=2, backend="shm") == [True, True]


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 20, 101])
def test_the_interval_of_a_median(n):
    """By its definition: outside it lies the median with at most 5%, as often as coins say."""
    low, high = trials.median_interval(list(range(n)))
    k = low
    assert high == n - 1 - k
    outside = 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n
    assert outside <= 0.05 or k == 0
    if n > 6:
        assert 2 * sum(comb(n, i) for i in range(k + 2)) / 2**n > 0.05
    assert low <= statistics.median(range(n)) <= high


def test_peak_bytes_counts_what_lives_at_once():
    def make():
        kept = torch.ones(1000)  # 4,000 bytes that live throughout

        def step():
            for _ in range(3):
                a = torch.ones(2000)
                b = a + kept[0]
                del a, b

        return step

    assert 20_000 <= peak_bytes(make) <= 20_200


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_seconds_are_positive_and_finite(capsys, seconds):
    assert main(["bench", "steps", "--seconds", seconds]) == 2
    assert f"--seconds {seconds}: must be positive and finite" in capsys.readouterr().err


def test_tables():
    """On the screen within 80 columns, and as Markdown with as many cells in every row."""
    row = dict.fromkeys(KEYS, 1.2345) | {
        "ours_ms": 12345.6,
        "peer_ms": 9876.5,
        "workload": "mlp",
        "parallel": "fsdp",
        "backend": "gloo",
    }
    row |= {"peak_memory_bytes": 123_456_789, "peer_peak_memory_bytes": 99_000_000}
    steps = Steps(StepPlan(("mlp", "transformer"), ("fsdp",), ("gloo",), 2, 1.0, 5), [row])
    out = io.StringIO()
    show(steps, Console(file=out, width=80, highlight=False))
    lines = out.getvalue().splitlines()
    assert any(line.split()[:2] == ["fsdp", "gloo"] for line in lines)
    assert all(len(line.rstrip()) <= 80 for line in lines)
    table = [line for line in to_markdown(steps).splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert len({line.count("|") for line in table}) == 1
