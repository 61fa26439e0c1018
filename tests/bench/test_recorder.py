"""The benchmark of the recorder: every row is measured with and without it, and is judged by its interval."""

import io
import json

import pytest
from rich.console import Console

from crosscut.bench import recorder as bench
from crosscut.bench.recorder import RecorderCost, RecorderPlan, rank_main
from crosscut.cli.bench_recorder import show
from crosscut.cli.main import main
from crosscut.comm import spawn
from crosscut.watch.reading import read_ring

KEYS = {
    *("of", "what", "backend", "trials", "calls", "holds"),
    *("plain_us_median", "recorded_us_median", "added_us_median", "added_us_low", "added_us_high"),
}
PLAN = RecorderPlan(seconds=0.001)


def rows_of(path):
    events = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [event for event in events if event.pop("kind") == "row"]
    for row in rows:
        assert set(row) - {"share_median", "share_low", "share_high"} == KEYS
        assert row["added_us_low"] <= row["added_us_median"] <= row["added_us_high"]
        assert row["trials"] == bench.MIN_TRIALS
    return rows


def recorded(path, rank=0):
    return read_ring(path.with_suffix("") / "ledger" / f"rank-{rank}.ring")


def test_groups_on_threads(tmp_path):
    path = tmp_path / "threads.jsonl"
    spawn(rank_main, PLAN, "threads", str(path), world_size=2, backend="threads")
    rows = rows_of(path)
    kinds = ["all_reduce", "all_gather", "send, recv"]
    assert [row["what"] for row in rows] == [*(f"{kind}, nothing sent" for kind in kinds), *kinds]
    for rank in range(2):
        ring = recorded(path, rank)
        ops = {(lane.label, op) for (_, _, _, op) in ring.totals for lane in ring.last_seq}
        assert ops == {("world", op) for op in ("all_reduce", "all_gather", "send", "recv")}
        assert {record.bytes for record in ring.records} == {4096, 2 * 4096, 0} & {r.bytes for r in ring.records}
        assert ring.entered > 6 * bench.MIN_TRIALS


def test_steps(pool, tmp_path, monkeypatch):
    path = tmp_path / "shm.jsonl"
    pool.run(rank_main, PLAN, "shm", str(path), world_size=2, backend="shm", timeout_s=200)
    rows = [row for row in rows_of(path) if row["of"] == "step"]
    assert [row["what"] for row in rows] == [
        *("mlp, dp=2", "mlp, tp=2", "transformer-small, dp=2", "transformer-small, tp=2"),
    ]
    for row in rows:
        assert row["share_low"] <= row["share_median"] <= row["share_high"]
        assert row["calls"] >= 3


def test_calls_of_torch(pool, tmp_path):
    path = tmp_path / "stock.jsonl"
    pool.run(rank_main, PLAN, "stock", str(path), world_size=2, backend="gloo", timeout_s=100)
    rows = rows_of(path)
    assert [(row["what"], row["backend"]) for row in rows] == [
        *(("all_reduce, nothing sent", ""), ("all_reduce", "gloo"), ("DDP's all_reduce", "gloo")),
    ]
    assert rows[2]["calls"] > 1  # several buckets
    assert len({record.lane for record in recorded(path).records}) == 2


@pytest.mark.parametrize(("low", "high", "holds"), [(0.5, 1.9, True), (1.9, 2.1, None), (2.1, 3.0, False)])
def test_what_holds_is_told_by_the_interval(low, high, holds):
    times = [[0.0] * 9, [low * 1e-6] * 4 + [high * 1e-6] * 5]
    row = bench._row("group", "x", "shm", times)
    assert (row["holds"], row["trials"]) == (holds, 9)
    steps = [[1.0] * 9, [1 + low / 200] * 4 + [1 + high / 200] * 5]
    row = bench._row("step", "x", "shm", steps, 7)
    assert (row["holds"], row["calls"]) == (holds, 7)
    assert row["share_high"] == pytest.approx(high / 200)
    assert row["added_us_high"] == pytest.approx(high * 5000)


def test_the_table():
    times = [[10e-6] * 9, [11.5e-6] * 9]
    rows = [
        bench._row("write", "a record written", "", [[0.0] * 9, [1e-6] * 9]),
        bench._row("torch", "DDP's all_reduce", "gloo", [[1e-3] * 9, [1.02e-3] * 9], 4),
        bench._row("group", "send, recv, nothing sent", "threads", times),
        bench._row("step", "transformer-small, dp=2", "shm", [[0.03] * 9, [0.0302] * 9], 21),
    ]
    of_shm = [rows[2] | {"backend": "shm", "added_us_median": added} for added in (4.0, 5.0)]
    rows[3]["calls_share"] = bench._share_of_calls(rows[3], [*rows[:3], *of_shm])
    assert rows[3]["calls_share"] == pytest.approx(21 * 5e-6 / 0.03)
    out = io.StringIO()
    rows.append(rows[3] | {"plain_us_median": 3e5, "recorded_us_median": 3e5, "share_low": -0.23, "share_high": 0.16})
    show(RecorderCost(PLAN, rows), Console(file=out, width=80, highlight=False))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    words = [line.split() for line in lines]
    assert ["DDP's", "all_reduce", "gloo", "1000.00", "1020.00", "20.00", "20.00..20.00", "no"] in words
    step = "transformer-small, dp=2 shm 30.00 30.20 0.7% 0.7%..0.7% yes 21: 0.35%".split()
    assert step in words
    assert "a call of crosscut's, us; promised: 2 more at most; holds: yes 1, no 0, ? 0" in lines
    assert "a call of torch's, us; promised: 2 more at most; holds: yes 0, no 1, ? 0" in lines
    assert "a training step, ms; promised: 1% more at most; holds: yes 2, no 0, ? 0" in lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seconds 0", "--seconds 0: must be positive and finite"),
        ("--seconds nan", "--seconds nan: must be positive and finite"),
        ("--world-size 5", "--world-size 5: these models are cut over 2 to 4 ranks"),
        ("--json /nowhere/x.json", "--json /nowhere/x.json: cannot be written"),
        ("--trials 3", "--trials goes with bench collectives and steps and machine, not with recorder"),
        ("--backends gloo", "--backends goes with bench collectives and steps and machine, not with recorder"),
        ("--workloads mlp", "--workloads goes with bench steps, not with recorder"),
    ],
)
def test_bad_input(capsys, words, said):
    assert main(["bench", "recorder", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
