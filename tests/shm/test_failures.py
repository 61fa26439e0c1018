"""What ranks are told when a peer dies, stays away, leaves, aborts, or calls something else; nothing is left behind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shm.failures import TIMEOUT_S

pytestmark = pytest.mark.xdist_group("processes")  # not beside other worlds: it measures memory and time


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the ranks of every scenario have met, by one process that forks them all."""
    folder = tmp_path_factory.mktemp("failures")
    script = Path(__file__).with_name("failures.py")
    subprocess.run([sys.executable, "-W", "ignore", str(script), str(folder)], check=True, timeout=110)
    found = json.loads((folder / "all.json").read_text())
    for name, ranks in found.items():
        for said in ranks if isinstance(ranks, list) else []:
            assert "failed" not in said, (name, said)
    return found


def test_a_dead_peer_is_named_within_a_second(told):
    dead = told["dies"][1]
    for rank in (0, 2):
        first, second = told["dies"][rank]["first"], told["dies"][rank]["second"]
        assert first["type"] == second["type"] == "PeerError"
        assert re.match(r"all_reduce of float32 \(3,\) over world, at \S*failures\.py:\d+: rank 1 \(pid", first["text"])
        assert f"rank 1 (pid {dead['pid']}) has ended" in first["text"]
        assert first["at"] - dead["at"] < 1
        assert second["seconds"] < 0.1
        assert "cannot be used any more" in second["text"]


def test_also_where_torch_waits_in_backward(told):
    first, dead = told["dies_under_ddp"][0]["first"], told["dies_under_ddp"][1]
    assert first["type"] == "PeerError"
    assert f"rank 1 (pid {dead['pid']}) has ended" in first["text"]
    assert first["at"] - dead["at"] < 1


def test_what_an_ended_rank_had_sent_is_received_first(told):
    said, pid = told["leaves"][0], told["leaves"][1]["pid"]
    assert said["got"] == [1, 1, 1]
    assert said["sum"] == [2, 2, 2]
    text = re.sub(r"at \S*failures.py:\d+", "at LINE", said["first"]["text"])
    assert text == f"recv of float32 (3,) from rank 1 over world, at LINE: rank 1 (pid {pid}) has ended"


def test_destroying_and_aborting_end_the_others_waits(told):
    destroyed = told["destroys"][0]["first"]["text"]
    assert re.search(r"over the group of ranks 0,1, at \S+: rank 1 \(pid \d+\) has destroyed the group", destroyed)
    assert re.search(r"rank 1 \(pid \d+\) has aborted the group", told["aborts"][0]["first"]["text"])
    assert told["aborts"][0]["first"]["seconds"] < 1.5
    assert told["aborts"][1]["first"]["text"] == "the group (world) cannot be used any more: this rank has aborted it"


def test_time_outs_name_the_ranks_that_did_not_come(told):
    for rank in (0, 1):
        first = told["is_late"][rank]["first"]
        assert first["type"] == "StuckError"
        assert "waited 1.5 s for rank 2: rank 2 (pid " in first["text"]
        assert "has begun 1 calls of this group, this is call #2" in first["text"]
        assert TIMEOUT_S <= first["seconds"] < TIMEOUT_S + 1
    late = told["is_late"][2]["first"]
    assert late["type"] == "PeerError"
    assert re.search(r"rank [01] \(pid \d+\) has given up waiting for rank 2", late["text"])
    for scenario, rank, call, missing in [
        ("nobody_sends", 0, "recv of float32 (3,) from rank 1", "rank 1"),
        ("nobody_sends", 2, "recv of float32 (3,) from any rank", "ranks 0,1"),
        ("nobody_receives", 0, "send of float32 (1048576,) to rank 1", "rank 1"),
    ]:
        first = told[scenario][rank]["first"]
        assert first["type"] == "StuckError"
        assert first["text"].startswith(f"{call} over world, at ")
        assert f": waited 1.5 s for {missing}: " in first["text"]
    assert told["does_not_join"][0]["first"]["text"] == (
        "shm: waited 1.5 s for rank 1 of 2 to join the group; start every rank, or raise the time-out"
    )
    assert "waited 0.3 s for rank 1" in told["short_wait"][0]["first"]["text"]
    assert told["short_wait"][0]["first"]["seconds"] < 1


@pytest.mark.parametrize(
    "name, mine, theirs",
    [
        ("op", "all_reduce(sum) of 24 bytes of float32", "all_reduce(max) of 24 bytes of float32"),
        ("collective", "all_gather of 24 bytes", "all_reduce(sum) of 24 bytes of float32"),
        ("size", "all_reduce(sum) of 24 bytes of float32", "all_reduce(sum) of 16 bytes of float32"),
        ("dtype", "all_reduce(sum) of 24 bytes of float32", "all_reduce(sum) of 24 bytes of int32"),
        ("gather size", "all_gather of 8 bytes", "all_gather of 12 bytes"),
        ("root", "broadcast(root=0) of 24 bytes", "broadcast(root=1) of 24 bytes"),
        ("roots of reduce", "reduce(sum, root=0) of 24 bytes of float32", "reduce(sum, root=1) of 24 bytes of float32"),
        ("barrier", "all_reduce(sum) of 24 bytes of float32", "barrier"),
    ],
)
def test_ranks_that_call_different_things_learn_it(told, name, mine, theirs):
    found = [said["first"] for said in told[name]]
    assert {one["type"] for one in found} <= {"MismatchError", "PeerError"}
    full = next(one for one in found if one["type"] == "MismatchError")
    assert f"rank 0 called {mine}" in full["text"]
    assert f"rank 1 called {theirs}" in full["text"]
    assert "call #1 over world" in full["text"]
    assert max(one["seconds"] for one in found) < 1


def test_sizes_of_pairs_must_agree(told):
    assert "rank 0 sends 8 bytes to rank 1, which expects 4" in told["splits"][1]["first"]["text"]
    assert "rank 0 sends 12 bytes, this receive is for 20" in told["message size"][1]["first"]["text"]


def test_world_after_world_leaves_nothing_open(told):
    for said in told["again"]:
        assert said == {"open": [0, 0, 0, 0], "mapped": [0, 0, 0, 0]}


def test_killed_ranks_leave_no_memory_behind(told):
    kib = told["memory"]
    assert kib["during"] - kib["before"] > 20_000  # it was there
    assert kib["after"] - kib["before"] < 10_000
