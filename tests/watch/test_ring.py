"""The ring file: what is written is read back, live, after kill -9, after wrapping; what is no ring is refused."""

import os
import signal
import struct
import subprocess
import sys
import threading

import pytest

from crosscut.comm.call import Call
from crosscut.watch.reading import Lane, RingFile, read_ring
from crosscut.watch.ring import AT_COUNTS, FAILED, FORMAT_VERSION, HEADER_BYTES, NUM_TOTALS, RingWriter

WRITER = """
import sys
from crosscut.comm.call import Call
from crosscut.watch.ring import RingWriter
ring = RingWriter(sys.argv[1], 1, 3)
lane = ring.lane("dp", (1, 2))
number = 0
while True:
    number += 1
    call = Call("all_reduce", "dp", "", "step", "train.py:7", number, (number % 50,), "float32", "sum")
    got = ring.enter(lane, call, number * 4)
    if number % 2:
        ring.complete(got)
    if number == 10_000:
        print("ready", flush=True)
"""


def call(op, seq, site="a.py:1", shape=(), dtype="", tag="", **rest):
    return Call(op, "dp", tag, "step", site, seq, shape, dtype, **rest)


def test_what_is_written_is_read(tmp_path):
    ring = RingWriter(tmp_path / "rank-1.ring", 1, 4, signal=40, device="cuda")
    dp, tp = ring.lane("dp", (1, 3)), ring.lane("tp", (0, 1), 1)
    assert ring.lane("dp", (1, 3)) == dp
    ring.step = 7
    first = ring.enter(dp, call("reduce", 1, "a.py:3", (3, 4), "float32", "grads", reduce_op="sum", root=1), 48)
    second = ring.enter(tp, call("recv", 0, "b.py:9", (), "int64", peer=0), 0, message_tag=5)
    splits = {"input_splits": (1, 1), "output_splits": (0, 2)}
    third = ring.enter(dp, call("all_to_all", 2, "c.py:1", (2,), "float32", **splits), 8, is_async=True)
    ring.complete(second)
    ring.waits(third)
    read = read_ring(ring.path)
    assert (read.rank, read.world_size, read.pid, read.signal, read.device) == (1, 4, os.getpid(), 40, "cuda")
    assert [record.number for record in read.records] == [first, second, third] == [1, 2, 3]
    a, b, c = read.records
    assert a.lane == Lane("dp", (1, 3), 0)
    assert b.lane == Lane("tp", (0, 1), 1)
    assert (a.call.op, a.call.reduce_op, a.call.root, a.call.shape, a.bytes) == ("reduce", "sum", 1, (3, 4), 48)
    assert (a.call.tag, a.call.site, a.call.seq, a.step) == ("grads", "a.py:3", 1, 7)
    assert (b.call.peer, b.message_tag, b.call.seq) == (0, 5, 1)
    assert (c.call.input_splits, c.call.output_splits) == ((1, 1), (0, 2))
    assert (b.is_async, c.is_async) == (False, True)
    assert a.entered <= b.entered <= b.completed
    assert (a.completed, a.waiting) == (0, 0)
    assert c.waiting >= c.entered
    assert read.last_seq == {Lane("dp", (1, 3), 0): 2, Lane("tp", (0, 1), 1): 0}
    assert not read.wrapped
    assert read.totals == {
        ("step", "grads", "dp", "reduce"): (1, 48),
        ("step", "", "tp", "recv"): (1, 0),
        ("step", "", "dp", "all_to_all"): (1, 8),
    }


def test_sections_clock_and_end(tmp_path):
    ring = RingWriter(tmp_path / "r", 0, 1)
    lane = ring.lane("x", (0, 1))
    ring.enter(lane, call("barrier", 1), 0)
    before = read_ring(ring.path)
    ring.section("saving a checkpoint", 90.5)
    ring.align(-1_000_000)
    ring.end(4)
    after = read_ring(ring.path)
    assert (after.section, after.section_limit_s, after.ended, after.exit_code) == (
        *("saving a checkpoint", 90.5),
        *(FAILED, 4),
    )
    assert before.records[0].entered - after.records[0].entered == 1_000_000
    assert abs(before.wall(before.records[0].entered) - after.wall(after.records[0].entered)) < 1e-6
    ring.section("")
    assert read_ring(ring.path).section == ""


def test_it_wraps_and_the_totals_do_not(tmp_path):
    ring = RingWriter(tmp_path / "r", 0, 2, capacity=16)
    lane = ring.lane("dp", (0, 1))
    numbers = [ring.enter(lane, call("send", 0, shape=(i,), peer=1), i) for i in range(50)]
    ring.complete(numbers[0])  # long overwritten: must not touch the record that has its place
    read = read_ring(ring.path)
    assert [record.call.seq for record in read.records] == list(range(35, 51))
    assert read.wrapped
    assert all(record.completed == 0 for record in read.records)
    assert read.totals["step", "", "dp", "send"] == (50, sum(range(50)))


def test_totals_and_last_numbers_are_right_after_every_call(tmp_path):
    """Whenever they were written last, and also of a lane whose calls have long been overwritten."""
    ring = RingWriter(tmp_path / "r", 0, 2, capacity=8)
    lanes = {name: ring.lane(name, (0, 1), channel) for channel, name in enumerate(("early", "often"))}
    counted, last = {}, {}
    for i in range(60):
        name, op = ("early", "barrier") if i < 3 else ("often", "send" if i % 3 else "all_reduce")
        seq = last[name] = last.get(name, 0) + (op != "send")
        more = {"peer": 1} if op == "send" else {}
        ring.complete(ring.enter(lanes[name], call(op, seq, shape=(i % 4,), tag=f"t{i % 2}", **more), i))
        key = ("step", f"t{i % 2}", name, op)
        counted[key] = (counted.get(key, (0, 0))[0] + 1, counted.get(key, (0, 0))[1] + i)
        read = read_ring(ring.path)
        assert read.totals == counted
        assert {lane.label: seq for lane, seq in read.last_seq.items() if seq} == last
    assert "early" not in {record.lane.label for record in read.records}


def test_shapes_that_change_for_ever_do_not_fill_it(tmp_path):
    ring = RingWriter(tmp_path / "r", 0, 2, capacity=64)
    lane = ring.lane("dp", (0, 1))
    for i in range(5000):
        ring.enter(lane, call("all_gather", i, shape=(i, i + 1), dtype="float32"), 4)
    read = read_ring(ring.path)
    assert [record.call.shape for record in read.records] == [(i, i + 1) for i in range(4936, 5000)]


def test_more_rules_than_there_is_room_for_are_counted_together(tmp_path):
    ring = RingWriter(tmp_path / "r", 0, 2)
    lane = ring.lane("dp", (0, 1))
    for i in range(NUM_TOTALS + 40):
        ring.enter(lane, call("all_reduce", i, tag=f"{'long ' * 80}{i}" if i % 2 else f"tag {i}"), 10)
    totals = read_ring(ring.path).totals
    assert sum(calls for calls, _ in totals.values()) == NUM_TOTALS + 40
    assert sum(size for _, size in totals.values()) == 10 * (NUM_TOTALS + 40)
    assert totals["other", "", "", ""][0] >= 41


def test_large_groups(tmp_path):
    ring = RingWriter(tmp_path / "r", 0, 100_000)
    even, odd = range(3, 99_000, 8), [0, *range(7, 90)]
    ring.enter(ring.lane("dp", even), call("barrier", 1), 0)
    ring.enter(ring.lane("odd", odd), call("barrier", 1), 0)
    assert [record.lane.ranks for record in read_ring(ring.path).records] == [tuple(even), tuple(odd)]


def test_it_survives_kill_9_and_is_read_live(tmp_path):
    path = tmp_path / "r"
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        file, seen = RingFile(path), []
        for _ in range(5):
            live = file.read()
            assert live.entered >= 10_000
            for record in live.records:
                assert record.call.seq == record.number
                assert record.bytes == record.number * 4
                assert record.call.shape == (record.number % 50,)
            seen.append(file.head().entered)
        assert seen == sorted(set(seen))  # it went on meanwhile
        file.close()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    dead = read_ring(path)
    assert dead.entered >= seen[-1]
    assert len(dead.records) + dead.half_written >= 4095
    assert dead.half_written <= 1
    assert dead.totals["step", "", "dp", "all_reduce"][0] in (dead.entered, dead.entered - 1)


def test_a_half_written_record_is_left_out(tmp_path):
    ring = RingWriter(tmp_path / "r", 0, 2)
    lane = ring.lane("dp", (0, 1))
    for i in range(3):
        ring.enter(lane, call("barrier", i), 0)
    with open(ring.path, "r+b") as file:
        file.seek(HEADER_BYTES + 64 + 56)  # the second number of record 2
        file.write(struct.pack("<Q", 0))
    read = read_ring(ring.path)
    assert [record.number for record in read.records] == [1, 3]
    assert read.half_written == 1
    with open(ring.path, "r+b") as file:  # killed between the record and the head: the record counts
        file.seek(AT_COUNTS)
        file.write(struct.pack("<Q", 2))
    assert read_ring(ring.path).records[-1].number == 3


def test_what_is_no_ring_is_refused(tmp_path):
    path = tmp_path / "r"
    with pytest.raises(ValueError, match="cannot be read"):
        read_ring(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="half written"):
        read_ring(path)
    path.write_bytes(bytes(HEADER_BYTES))
    with pytest.raises(ValueError, match="half written"):
        read_ring(path)
    path.write_bytes(b"x" * HEADER_BYTES)
    with pytest.raises(ValueError, match="not a ledger"):
        read_ring(path)
    ring = RingWriter(path, 0, 2)
    for version, said in ((FORMAT_VERSION + 1, "is newer"), (FORMAT_VERSION - 1, "is from before crosscut 0.1")):
        with open(path, "r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", version))
        with pytest.raises(ValueError, match=f"format_version {version} {said}"):
            read_ring(ring.path)


def test_a_file_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot make its file"):
        RingWriter(tmp_path / "file" / "r", 0, 2)


def test_one_write_overlaps_another_reader(tmp_path):
    """A reader in another thread never sees a record that is mixed from two."""
    ring = RingWriter(tmp_path / "r", 0, 2, capacity=8)
    lane = ring.lane("dp", (0, 1))
    stop = threading.Event()

    def write():
        i = 0
        while not stop.is_set():
            i += 1
            ring.enter(lane, call("send", 0, shape=(i % 5,), peer=1), i)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            for record in read_ring(ring.path).records:
                assert record.call.seq == record.bytes == record.number
    finally:
        stop.set()
        thread.join()
