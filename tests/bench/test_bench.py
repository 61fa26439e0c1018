"""The command: what it writes, what it refuses, what it keeps when it is stopped."""

import csv
import json
import re
import signal
import threading

import pytest
import torch

from crosscut.bench import calls, measure, plan, plot, show
from crosscut.bench.definitions import OPS
from crosscut.cli.main import main
from crosscut.comm.algorithms.registry import ALGORITHMS

BENCH = ["bench", "collectives"]
KEYS = "op backend via algorithm world_size bytes time_us_median time_us_p95 algbw_gbs busbw_gbs correct".split()


def bench(*words, capsys):
    code = main([*BENCH, *words, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_all_operations_and_algorithms_on_threads(tmp_path, capsys):
    before = torch.get_num_threads()
    words = "--backends threads --world-size 3 --sizes 8,4KiB --trials 2 --algorithms all --csv"
    code, out = bench(*words.split(), str(tmp_path / "rows.csv"), capsys=capsys)
    assert code == 0
    assert torch.get_num_threads() == before
    assert list(out)[:2] == ["schema", "version"]
    assert (out["schema"], out["version"], out["complete"]) == ("crosscut.bench.collectives", 1, True)
    rows = out["rows"]
    assert all(list(row) == KEYS for row in rows)
    assert all(row["correct"] is True and row["via"] == "group" and row["backend"] == "threads" for row in rows)
    assert {row["op"] for row in rows} == set(OPS)
    for op, table in ALGORITHMS.items():
        assert {row["algorithm"] for row in rows if row["op"] == op} == {"", *table}
    assert {row["bytes"] for row in rows if row["op"] == "all_reduce"} == {8, 4096}
    assert {row["bytes"] for row in rows if row["op"] == "all_gather"} == {12, 4104}  # whole numbers on 3 ranks
    for row in rows:
        assert 0 < row["time_us_median"] <= row["time_us_p95"]
        assert row["algbw_gbs"] == pytest.approx(row["bytes"] / row["time_us_median"] / 1e3)
        factor = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "reduce": 1}.get(row["op"])
        assert factor is None or row["busbw_gbs"] == pytest.approx(factor * row["algbw_gbs"])
    pairs = [(row["src"], row["dst"]) for row in out["matrix"]["rows"]]
    assert pairs == [(i, j) for i in range(3) for j in range(3) if i != j]
    assert all(row["latency_us"] > 0 and row["bandwidth_gbs"] > 0 for row in out["matrix"]["rows"])
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == KEYS
    assert [(row["op"], int(row["bytes"]), float(row["busbw_gbs"])) for row in read] == [
        (row["op"], row["bytes"], row["busbw_gbs"]) for row in rows
    ]


def test_gloo_and_shm_in_the_same_processes(tmp_path, capsys):
    page = tmp_path / "curves.html"
    words = "--ops all_reduce,send_recv --sizes 64,1MB --trials 3 --algorithms ring --plot"
    code, out = bench(*words.split(), str(page), capsys=capsys)
    assert code == 0
    rows = [row for row in out["rows"] if row["op"] == "all_reduce" and row["bytes"] == 64]
    assert [(row["backend"], row["via"], row["algorithm"]) for row in rows] == [
        (backend, via, algorithm)
        for backend in ("gloo", "shm")
        for via, algorithm in (("group", ""), ("torch", ""), ("checked", ""), ("group", "ring"))
    ]
    assert all(row["correct"] for row in out["rows"])
    ratios = out["ratios"]["rows"]
    gloo = [
        (r["op"], r["via"], r["algorithm"], r["bytes"])
        for r in ratios
        if (r["backend"], r["versus"]) == ("shm", "gloo")
    ]
    assert ("send_recv", "torch", "", 1_000_000) in gloo
    assert ("all_reduce", "group", "ring", 64) in gloo
    assert {(r["op"], r["bytes"]) for r in ratios if r["versus"] == "copy limit"} == {("all_reduce", 1_000_000)}
    assert all(r["speed_ratio"] > 0 for r in ratios)
    assert [row["bytes"] for row in out["copy_limit"]["rows"]] == [1_000_000]
    assert {row["backend"] for row in out["matrix"]["rows"]} == {"gloo", "shm"}
    text = page.read_text()
    assert len(text) > 10**6  # plotly's script is in it
    assert "all_reduce: busbw" in text
    assert "shm, ring" in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=.http", text)


def test_a_wrong_result_is_exit_code_1(monkeypatch, capsys):
    by_group = calls.by_group

    def broken(group, b, algorithm=""):
        call = by_group(group, b, algorithm)

        def run():
            result = call()
            if b.op == "broadcast" and b.rank == 1:
                result[-1] += 1
            return result

        return run

    monkeypatch.setattr(calls, "by_group", broken)
    words = "--backends threads --ops all_reduce,broadcast --sizes 64 --trials 1".split()
    code, out = bench(*words, capsys=capsys)
    assert code == 1
    assert [(row["op"], row["correct"]) for row in out["rows"]] == [("all_reduce", True), ("broadcast", False)]
    assert main([*BENCH, *words]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_what_is_printed(capsys):
    assert main([*BENCH, *"--backends threads --ops all_reduce --sizes 4KiB --trials 2".split()]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "all_reduce: S is the tensor, f = 2(n-1)/n" in shown
    assert "4 KiB threads group" in shown
    assert "sent = 2 S (n-1) = 8,192 bytes" in shown  # the lectures' formula, and that it is busbw
    counted, busbw = re.search(r"4 KiB\): ([\d.e-]+) GB/s; busbw ([\d.e-]+) GB/s", shown).groups()
    assert counted == busbw
    assert "rank 0 - " in shown


def test_the_matrix_of_many_ranks_comes_in_blocks(capsys):
    assert main([*BENCH, *"--backends threads --world-size 9 --ops reduce --sizes 8 --trials 1".split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("rank 7" in line for line in lines) == 2 + 4  # two headers, and a row in each of four tables
    assert [line.split()[0] for line in lines if "rank 8" in line and not line.startswith("rank")] == ["us", "GB/s"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_measured_is_kept_when_it_is_stopped(number, code, tmp_path, monkeypatch, capsys, no_gc):
    """Stopped for real, in the middle: after the second row."""
    take, sent = measure.Measured.add, []

    def add(self, event):
        take(self, event)
        if len(self.rows) == 2 and not sent:
            sent.append(threading.Timer(0, signal.raise_signal, [number]))
            sent[0].start()

    monkeypatch.setattr(measure.Measured, "add", add)
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    words = f"--backends threads --ops all_reduce --trials 3 --sizes {','.join(str(8 * i) for i in range(1, 2000))}"
    files = ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")]
    assert main([*BENCH, *words.split(), *files]) == code
    assert sent
    assert {name: signal.getsignal(name) for name in before} == before
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["complete"] is False
    assert 2 <= len(out["rows"]) < 1999
    assert [row["bytes"] for row in out["rows"]] == [8 * i for i in range(1, len(out["rows"]) + 1)]
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + len(out["rows"])
    assert "4 KiB" not in capsys.readouterr().err


def test_a_rank_that_fails_leaves_its_rows(tmp_path, monkeypatch, capsys):
    by_group = calls.by_group

    def broken(group, b, algorithm=""):
        if b.count == 4:
            raise RuntimeError("no such luck")
        return by_group(group, b, algorithm)

    monkeypatch.setattr(calls, "by_group", broken)
    words = f"--backends threads --ops all_reduce --sizes 8,16,24 --trials 1 --csv {tmp_path / 'out.csv'}"
    assert main([*BENCH, *words.split()]) == 1
    assert "no such luck" in capsys.readouterr().err
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "words, part",
    [
        ("collectives --ops all_redcue", "did you mean 'all_reduce'?"),
        ("collectives --backends glo", "did you mean 'gloo'?"),
        ("collectives --sizes 4KoB", "unknown unit 'KoB'; did you mean"),
        ("collectives --sizes ,", "names nothing"),
        ("collectives --algorithms rign", "did you mean 'ring'?"),
        ("collectives --ops broadcast --algorithms ring", "--ops names none of them"),
        ("collectives --dtype fp23", "did you mean 'fp32'?"),
        ("collectives --world-size 1", "2 ranks or more"),
        ("collectives --world-size 100000", "use at most"),
        ("collectives --sizes 100000GB", "use at most"),
        ("collectives --trials 0", "--trials 0"),
        ("collectives --json /no/such/folder/x.json", "--json /no/such/folder/x.json: cannot be written"),
        ("collectives --csv /no/such/folder/x.csv", "--csv /no/such/folder/x.csv: cannot be written"),
        ("collectives --plot /tmp", "is a folder"),
        ("collectives --csv -", "only --json writes to stdout"),
        ("collectives --out x.json", "--out goes with bench machine"),
        ("collectives --wrld-size 2", "did you mean '--world-size'?"),
        ("machine --ops all_reduce", "--ops goes with bench collectives"),
        ("machine --backends threads", "needs ranks that are processes"),
        ("machine --out /no/such/folder/m.json", "--out /no/such/folder/m.json: cannot be written"),
        ("colectives", "did you mean 'collectives'?"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(words, part, capsys, monkeypatch):
    monkeypatch.setattr(measure, "spawn", None)
    assert main(["bench", *words.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"crosscut bench: error: [^\n]+\n", shown.err)
    assert part in shown.err


def test_nccl_without_gpus_plotly_that_is_missing_and_a_launched_world(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*BENCH, "--backends", "nccl"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main([*BENCH, "--plot", "x.html"]) == 2
    assert "pip install 'crosscut[plot]'" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(BENCH) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_each_size_is_measured_once_and_quick_is_small():
    full = plan.make_plan(
        ops="all_gather",
        sizes="1,2,8,9",
        world_size=2,
        backends="threads",
        algorithms=None,
        dtype="fp32",
        trials=None,
        quick=False,
    )
    assert [cell.num_bytes for cell in full.cells()] == [8, 16]
    assert full.trials == plan.TRIALS
    quick = plan.make_plan(
        ops=None, sizes=None, world_size=2, backends="gloo", algorithms=None, dtype="fp32", trials=None, quick=True
    )
    assert quick.ops == ("all_reduce", "all_gather", "reduce_scatter")
    assert quick.trials == 10
    assert max(quick.sizes) == 16_000_000


def test_a_machine_profile(tmp_path, monkeypatch, capsys):
    """From rows as a sweep gives them; the ranks are stood in for."""

    def stand_in(fn, a_plan, backends, with_shm, path, **options):
        assert a_plan.with_machine
        assert options["world_size"] == 2
        events = [{"kind": "machine", "copy_gbs": 6.0, "copy_all_gbs": 9.0, "matmul": []}]
        for cell in a_plan.cells():
            row = {"op": cell.op, "backend": "gloo", "via": "group", "algorithm": "", "world_size": 2}
            row |= {"bytes": cell.num_bytes, "time_us_median": 50 + cell.num_bytes / 2000, "correct": True}
            events.append({"kind": "row", **row})
        with open(path, "a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    monkeypatch.setattr(measure, "spawn", stand_in)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "machine", "--backends", "gloo"]) == 0
    assert str(tmp_path) in "".join(capsys.readouterr().out.split())
    profile = json.loads((tmp_path / "crosscut" / "machine.json").read_text())
    assert (profile["schema"], profile["version"]) == ("crosscut.machine", 1)
    assert profile["host"]["cores"] == profile["cores"] >= 1
    assert profile["copy_gbs"] == 6.0
    assert len(profile["links"]) == 6
    for link in profile["links"]:
        assert link["latency_us"] == pytest.approx(50, rel=1e-6)
        assert link["bandwidth_gbs"] == pytest.approx(2, rel=1e-6)
    assert [path.name for path in (tmp_path / "crosscut").iterdir()] == ["machine.json"]


def test_figures():
    assert [show.figures(x) for x in (0.123, 1.234, 12.34, 123.4, 12345.6)] == ["0.12", "1.23", "12.3", "123", "12,346"]
