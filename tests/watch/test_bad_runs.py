"""`crosscut why` on what is no run, half a run, a run that goes on, a run whose ring has wrapped."""

import os
import struct
import subprocess
import sys

import pytest

from crosscut.cli.main import main
from crosscut.comm.call import Call
from crosscut.watch.folder import path_of, write_json
from crosscut.watch.ring import FORMAT_VERSION, RingWriter


def why(run, capsys):
    code = main(["why", str(run)])
    said = capsys.readouterr()
    return code, said.out, said.err


def ring_of(run, rank, size=2, **options):
    ring = RingWriter(path_of(run, rank, "ring"), rank, size, **options)
    return ring, ring.lane("world", range(size))


def call(ring, lane, seq, site="train.py:7", done=True, length=4):
    number = ring.enter(lane, Call("all_reduce", "world", "", "step", site, seq, (length,), "float32", "sum"), 16)
    if done:
        ring.complete(number)


def make(kind, folder):
    """What `crosscut why` is given."""
    run = folder / "run"
    if kind == "missing":
        return run
    run.mkdir()
    if kind == "no ledgers":
        (run / "config.toml").write_text("")
        (run / "ledger").mkdir()
    elif kind in ("half written", "newer", "no ring"):
        ring, _ = ring_of(run, 0)
        with open(ring.path, "r+b") as file:
            if kind == "half written":
                file.truncate(100)
            else:
                file.seek(8 if kind == "newer" else 0)
                file.write(struct.pack("<I", FORMAT_VERSION + 1) if kind == "newer" else b"notaring")
    elif kind.startswith("a file"):
        ring, _ = ring_of(run, 0)
        return ring.path if kind == "a file of it" else run.parent / "other"
    return run


@pytest.mark.parametrize(
    "kind, said",
    [
        ("missing", "run: no such folder; give a run folder or a folder of Flight Recorder dumps"),
        ("no ledgers", "run: holds no ledger (ledger/rank-N.ring) and no Flight Recorder dump"),
        ("half written", "rank-0.ring: half written: its rank has ended, or is, before its recorder had started"),
        ("newer", f"rank-0.ring: format_version {FORMAT_VERSION + 1} is newer than {FORMAT_VERSION}; update crosscut"),
        ("no ring", "rank-0.ring: not a ledger of crosscut"),
        ("a file of it", "rank-0.ring is a file; give run: a run folder, or a folder of Flight Recorder dumps"),
        ("a file elsewhere", "other is a file; give the folder that it lies in: a run folder, or a folder of Flight"),
    ],
)
def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, kind, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("x")
    code, out, err = why(make(kind, tmp_path), capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("what", ["run", "run/ledger", "run/ledger/rank-0.ring"])
def test_what_may_not_be_read(tmp_path, what):
    """Root may read everything, so this is asked by nobody."""
    run = tmp_path / "run"
    ring_of(run, 0)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    (tmp_path / what).chmod(0)
    ring_of(tmp_path / "good", 0)
    ask = """
import os, sys
from crosscut.cli.main import main
assert main(["why", "good"]) == 0  # Python may lie where nobody reads: what it takes is imported now
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main(["why", "run"]))
"""
    done = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=False)
    (tmp_path / what).chmod(0o755)
    assert done.returncode == 2, done.stderr
    assert f"{what}: cannot be read (Permission denied)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_ledger_of_several_is_half_written(tmp_path, capsys):
    ring, lane = ring_of(tmp_path, 0)
    call(ring, lane, 1, done=False)
    ring_of(tmp_path, 1)[0].path.write_bytes(bytes(100))
    code, out, _ = why(tmp_path, capsys)
    assert code == 0
    assert "rank 1 never came: it has not started recording" in out
    assert "not read: " in out
    assert "rank-1.ring: half written" in out


def test_a_run_of_which_some_ranks_live_is_read_live(tmp_path, capsys):
    ring, lane = ring_of(tmp_path, 0)
    call(ring, lane, 1)
    call(ring, lane, 2, done=False)
    dies = (
        "import sys; from crosscut.watch.ring import RingWriter; ring = RingWriter(sys.argv[1], 1, 2); "
        "ring.lane('world', (0, 1))"
    )
    subprocess.run([sys.executable, "-c", dies, path_of(tmp_path, 1, "ring")], check=True)
    write_json(path_of(tmp_path, 1, "end"), {"exit_code": -9, "last_lines": ["step 1"], "ended_s": 1.0})
    code, out, _ = why(tmp_path, capsys)
    assert code == 0
    assert out.startswith("the run is alive; this is how it stands now\nrank 1 of 2 was killed by SIGKILL")
    assert "rank 0 waits in all_reduce(sum) #2 over world, at train.py:7 for rank 1" in out


def test_a_ring_that_wrapped_past_the_divergence(tmp_path, capsys):
    """Rank 1 leaves one call out, at the second step; only the last 16 calls are there."""
    for rank in range(2):
        ring, lane = ring_of(tmp_path, rank, capacity=16)
        kinds = [number % 2 for number in range(60)]
        if rank == 1:
            del kinds[3]
        for seq, kind in enumerate(kinds, 1):
            call(ring, lane, seq, f"train.py:{kind}", length=4 + kind)
    code, out, _ = why(tmp_path, capsys)
    assert code == 0
    assert "the recorder holds no earlier call of this group: the ranks may have come apart before #" in out
    assert "certain is that from there on their calls differ" in out


def test_the_folder_that_lies_around_is_named_as_it_is_reached(tmp_path, monkeypatch, capsys):
    ring_of(tmp_path / "runs" / "one", 0)
    (tmp_path / "runs" / "one" / "autopsy.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    _, _, err = why(os.path.join("runs", "one", "autopsy.txt"), capsys)
    assert "autopsy.txt is a file; give runs/one:" in err
