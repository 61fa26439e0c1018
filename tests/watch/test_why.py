"""`crosscut why`: run folders alive and dead, Flight Recorder dumps, and what cannot be read."""

import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from crosscut.cli.main import main
from crosscut.cli.why import _folded
from crosscut.comm.call import Call
from crosscut.watch.folder import path_of, write_json
from crosscut.watch.ring import FORMAT_VERSION, RingWriter

DATA = Path(__file__).parent / "data"
DEAD = """
import sys
from crosscut.comm.call import Call
from crosscut.watch.ring import RingWriter
run, rank, calls, code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ring = RingWriter(f"{run}/ledger/rank-{rank}.ring", rank, 3)
lane = ring.lane("world", range(3))
for seq in range(1, calls + 1):
    number = ring.enter(lane, Call("all_reduce", "dp", "", "step", "train.py:7", seq, (4,), "float32", "sum"), 16)
    if seq < calls or code == "ends":
        ring.complete(number)
if code == "ends":
    ring.end(0)
"""


def why(*words, capsys):
    code = main(["why", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def dead_run(folder, calls, code=("dies", "dies", "dies")):
    for rank, number in enumerate(calls):
        subprocess.run([sys.executable, "-c", DEAD, folder, str(rank), str(number), code[rank]], check=True)


def test_a_run_that_is_over(tmp_path, capsys):
    dead_run(tmp_path, (9, 9, 8), ("dies", "dies", "ends"))
    for rank in (0, 1):
        write_json(path_of(tmp_path, rank, "end"), {"exit_code": 0, "last_lines": [], "ended_s": 1.0})
    code, out, _ = why(tmp_path, capsys=capsys)
    assert code == 0
    assert "ranks 0,1 wait in all_reduce(sum) #9 over world, at train.py:7 since" in out
    assert "rank 2 never came: it has ended; its last call was all_reduce(sum) #8" in out
    assert "alive" not in out
    code, _, _ = why(tmp_path, "--json", tmp_path / "v.json", capsys=capsys)
    body = json.loads((tmp_path / "v.json").read_text())
    assert code == 0
    assert list(body)[:2] == ["schema", "version"]
    assert (body["schema"], body["verdict"], body["culprits"]) == ("crosscut.why", "missing_call", [2])
    assert (body["axis"], body["op"], body["seq"], body["site"]) == ("world", "all_reduce", 9, "train.py:7")
    assert set(body) >= {"evidence", "advice"}


def test_without_a_folder_the_run_that_recorded_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["why"]) == 2
    assert "runs/ holds no run that recorded its calls; give a run folder" in capsys.readouterr().err
    for age, name in enumerate(("old", "new", "older")):
        folder = tmp_path / "runs" / name
        dead_run(folder, (3,), ("dies",))
        when = 1e9 - (2, 1, 3)[age]
        os.utime(path_of(folder, 0, "ring"), (when, when))
    (tmp_path / "runs" / "latest").symlink_to("new")
    assert main(["why"]) == 0
    assert capsys.readouterr().out.startswith(f"run: {Path('runs/new')}\n")


def test_a_run_that_is_alive(tmp_path, capsys):
    rings = [RingWriter(path_of(tmp_path, rank, "ring"), rank, 2) for rank in range(2)]
    lanes = [ring.lane("dp", (0, 1)) for ring in rings]
    for ring, lane in zip(rings, lanes, strict=True):
        ring.complete(ring.enter(lane, Call("barrier", "dp", "", "step", "a.py:1", 1), 0))
    rings[0].enter(lanes[0], Call("barrier", "dp", "", "step", "a.py:2", 2), 0)
    write_json(tmp_path / "autopsy.json", {"verdict": "oom", "text": "of an earlier attempt", "culprits": [0]})
    code, out, _ = why(tmp_path, "--json", "-", capsys=capsys)
    body = json.loads(out)
    assert code == 0
    assert body["alive"] is True
    assert (body["verdict"], body["culprits"]) == ("stuck_outside", [1])
    code, out, _ = why(tmp_path, capsys=capsys)
    assert out.startswith("the run is alive; this is how it stands now\nrank 0 waits in barrier #2 over dp, at a.py:2")


@pytest.mark.parametrize(
    "what, words",
    [
        ("missing", "no such folder"),
        ("empty", "holds no ledger"),
        ("half", "half written"),
        ("cut", "cut short (5000 of "),
        ("newer", f"format_version {FORMAT_VERSION + 1} is newer than {FORMAT_VERSION}"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, what, words):
    run = tmp_path / "run"
    if what != "missing":
        run.mkdir()
    if what in ("half", "cut", "newer"):
        ring = RingWriter(path_of(run, 0, "ring"), 0, 1)
        with open(ring.path, "r+b") as file:
            if what in ("half", "cut"):
                file.truncate({"half": 100, "cut": 5000}[what])
            else:
                file.seek(8)
                file.write(struct.pack("<I", FORMAT_VERSION + 1))
    code, out, err = why(run, capsys=capsys)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_files_of_another_version_beside_the_ledger(tmp_path, capsys):
    ring = RingWriter(path_of(tmp_path, 0, "ring"), 0, 1)
    ring.end(1)
    write_json(path_of(tmp_path, 0, "error"), {"pid": os.getpid(), "line": "KeyError: 'w'", "of_later": 1})
    write_json(path_of(tmp_path, 0, "end"), {"pid": 0})
    code, out, err = why(tmp_path, capsys=capsys)
    assert (code, err) == (0, "")
    assert "KeyError: 'w'" in out


@pytest.mark.parametrize("form", ["json", "pickle"])
@pytest.mark.parametrize(
    "name, verdict, culprit, words",
    [
        ("gloo_missing", "stuck_outside", 2, "ranks 0,1 wait in all_reduce #8 over world"),
        ("gloo_order", "order", 1, "rank 1 called broadcast #8"),
        ("gloo_mismatch", "mismatch", 1, "rank 1 called all_reduce(shape=(2, 3), float)"),
    ],
)
def test_dumps_of_the_flight_recorder(tmp_path, capsys, name, verdict, culprit, words, form):
    """Recorded from Gloo on three ranks by torch 2.13."""
    folder = DATA / name
    if form == "pickle":
        folder = tmp_path
        for file in (DATA / name).iterdir():
            (folder / f"nccl_trace_rank_{file.name[-1]}").write_bytes(pickle.dumps(json.loads(file.read_text())))
    code, out, _ = why(folder, "--json", "-", capsys=capsys)
    body = json.loads(out)
    assert code == 0
    assert (body["verdict"], body["culprits"]) == (verdict, [culprit])
    assert words in body["text"]
    assert "job/train.py:" in body["text"]


def test_a_dump_that_would_run_code_or_is_of_another_version(tmp_path, capsys):
    (tmp_path / "trace_0").write_bytes(pickle.dumps(Path("x")))
    code, _, err = why(tmp_path, capsys=capsys)
    assert code == 2
    assert "no Flight Recorder dump" in err
    (tmp_path / "trace_0").write_text(json.dumps({"version": "9.1", "entries": [], "pg_config": {}}))
    code, _, err = why(tmp_path, capsys=capsys)
    assert code == 2
    assert "version '9.1'" in err


def test_long_lines_are_folded_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    lines = ["rank 0 waits in all_reduce #14 over world-0-1", "  rank 1 at /a/path/that/is/longer/than/that.py"]
    sentence = ["rank 0 waits in all_reduce #14", "over world-0-1"]
    assert _folded(lines) == [*sentence, "  rank 1 at", "    /a/path/that/is/longer/than/that.py"]
    assert _folded(['    raise  KeyError("a b")']) == ['    raise  KeyError("a b")']
