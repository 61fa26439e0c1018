"""Who is slow, from arrival times: ranks and links, loops without a torch optimizer, clocks that disagree."""

import pytest

from crosscut.comm.call import Call
from crosscut.watch import ring as ring_file
from crosscut.watch.autopsy import autopsy
from crosscut.watch.facts import Facts
from crosscut.watch.reading import Lane, read_ring
from crosscut.watch.ring import RingWriter
from crosscut.watch.stragglers import exposed_waits

from .synthetic import recv, reduce, run, send, steps

WORLD = Lane("world", (0, 1, 2))


def loop(rank, slow, number=20, ms=20.0):
    """Two calls a step, and one that other ranks' steps are told by; rank 1 takes `slow` times as long."""
    factor = slow if rank == 1 else 1
    body = [
        reduce(WORLD, "a.py:1", ms=ms * factor / 2),
        reduce(WORLD, "a.py:1", ms=ms * factor / 2),
        reduce(WORLD, "a.py:9", ms=0.1),
    ]
    return body * number


def test_a_slow_rank_of_a_loop_that_counts_no_steps():
    found = autopsy(run({rank: loop(rank, 1.25) for rank in range(3)}), 3)
    assert (found.verdict, found.culprits) == ("straggler", [1])
    assert "ranks 0,2 at most 20.1 ms" in found.text
    assert autopsy(run({rank: loop(rank, 1.0) for rank in range(3)}), 3).verdict == "none"


def test_a_slow_rank_of_two_meshes():
    """tp=2 x dp=2: rank 1 is slow; its neighbour over tp waits for it and is late over dp, though not slow."""
    programs = {}
    for rank in range(4):
        tp, dp = Lane("tp", (rank // 2 * 2, rank // 2 * 2 + 1)), Lane("dp", (rank % 2, rank % 2 + 2))
        ms = 25.0 if rank == 1 else 20.0
        programs[rank] = steps([reduce(tp, "tp.py:1", ms=ms), reduce(dp, "dp.py:1", ms=1.0)], 20)
    found = autopsy(run(programs), 4)
    assert (found.verdict, found.culprits) == ("straggler", [1])
    waits = {(row["rank"], row["axis"]): row["wait_s"] for row in found.rows}
    assert waits[0, "tp"] == pytest.approx(19 * 0.005, rel=0.05)  # the first step is left out
    assert waits[1, "tp"] == 0
    assert waits[2, "dp"] == pytest.approx(19 * 0.005, rel=0.05)
    assert any(line.startswith("rank 0 waited for others: 0.000 s over dp, 0.09") for line in found.evidence)


def test_a_slow_first_step_names_nobody():
    programs = {rank: steps([reduce(WORLD, "a.py:1", ms=20.0)], 20) for rank in range(3)}
    programs[0][0] = programs[0][0].__class__(**{**vars(programs[0][0]), "ms": 5000.0})
    found = autopsy(run(programs), 3)
    assert found.verdict == "none"
    assert all(row["wait_s"] == 0 for row in found.rows)


def test_a_wait_for_a_message_counts():
    lane = Lane("pp", (0, 1))
    programs = {
        0: steps([send(lane, 1, "p.py:1", ms=8.0)], 5),
        1: steps([recv(lane, 0, "p.py:2", ms=3.0)], 5),
    }
    waits = exposed_waits({rank: fact.ring for rank, fact in run(programs).items()})
    assert waits[1, "pp"] == pytest.approx(4 * (0.008 - 0.003), rel=0.1)
    assert (0, "pp") not in waits


@pytest.mark.parametrize("aligned", [True, False])
def test_clocks_of_two_hosts(tmp_path, monkeypatch, aligned):
    """Rank 1's clock is an hour ahead. Its header says so, or not."""
    ahead, time_ns = 3600 * 10**9, [10**9]
    rings = {}
    for rank in range(2):
        monkeypatch.setattr(ring_file, "now", lambda rank=rank: time_ns[0] + rank * ahead)
        rings[rank] = RingWriter(tmp_path / f"rank-{rank}.ring", rank, 2)
    if aligned:
        rings[1].align(-ahead)
    for step in range(12):
        for rank in (0, 1):  # rank 1 comes 5 ms after rank 0
            monkeypatch.setattr(ring_file, "now", lambda rank=rank: time_ns[0] + rank * ahead)
            rings[rank].step = step
            rings[rank].enter(rings[rank].lane("dp", (0, 1)), Call("barrier", "dp", "", "step", "a.py:1", step + 1), 0)
            time_ns[0] += 5_000_000
        for rank in (0, 1):
            monkeypatch.setattr(ring_file, "now", lambda rank=rank: time_ns[0] + rank * ahead)
            rings[rank].complete(step + 1)
    read = {rank: read_ring(ring.path) for rank, ring in rings.items()}
    waits = exposed_waits(read)
    right = {(0, "dp"): 11 * 0.005, (1, "dp"): 0.0}
    assert (waits == pytest.approx(right)) == aligned
    found = autopsy({rank: Facts(rank, ring) for rank, ring in read.items()}, 2)
    assert found.verdict == "none"
