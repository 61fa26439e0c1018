"""The ledger counts what a rank hands to each call, by the documented conventions, and reads back without torch."""

import json
import subprocess
import sys

import pytest
import torch

from crosscut.comm import Ledger, spawn
from crosscut.comm.ledger import Entry
from crosscut.layout.mesh import Mesh


def calls(ctx):
    """One call of each kind on float32; bytes as in the ledger's docstring."""
    ctx.set_mesh(Mesh.of("tp=2,dp=2"), [("dp", "tp")])
    g, rank = ctx.group("tp"), ctx.group("tp").rank
    ctx.ledger.clear()
    x = torch.ones(4, 3)  # 48 bytes
    g.all_reduce(x, tag="a/forward")
    g.all_reduce(x.t(), "max", tag="a/forward")
    g.all_reduce(x.bfloat16(), tag="half")  # counted as the caller's 24 bytes, not as what travels
    g.broadcast(x, 1, tag="b")
    g.reduce(x, 1, tag="c")
    g.all_gather(x, tag="d")
    g.reduce_scatter(x, tag="e")
    g.gather(x, 1, tag="f")
    g.scatter([x, x] if rank == 1 else None, 1, out=x.clone(), tag="g")
    g.all_to_all(x, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1], tag="h")
    if rank == 0:
        g.send(x, 1, tag="i")
    else:
        g.recv(x, 0, tag="i")
    g.barrier(tag="j")
    g.all_reduce(torch.ones(0), tag="empty")
    g.all_reduce(torch.ones(3, dtype=torch.bool), "max", tag="flags")
    ctx.group("dp+tp").all_reduce(torch.ones((), dtype=torch.int64), tag="tokens")
    ctx.group("dp").all_gather(x, async_op=True, tag="z").wait()
    ctx.decide(False)
    return ctx.ledger.to_json(), [entry._asdict() for entry in ctx.ledger.entries]


EXPECTED = {  # tag: (op, axis, calls, bytes at tp rank 0, at tp rank 1)
    "a/forward": ("all_reduce", "tp", 2, 96, 96),
    "half": ("all_reduce", "tp", 1, 24, 24),
    "b": ("broadcast", "tp", 1, 48, 48),
    "c": ("reduce", "tp", 1, 48, 48),
    "d": ("all_gather", "tp", 1, 96, 96),
    "e": ("reduce_scatter", "tp", 1, 48, 48),
    "f": ("gather", "tp", 1, 48, 48),
    "g": ("scatter", "tp", 1, 0, 96),
    "h": ("all_to_all", "tp", 1, 48, 48),
    "j": ("barrier", "tp", 1, 0, 0),
    "empty": ("all_reduce", "tp", 1, 0, 0),
    "flags": ("all_reduce", "tp", 1, 3, 3),
    "tokens": ("all_reduce", "dp+tp", 1, 8, 8),
    "z": ("all_gather", "dp", 1, 96, 96),
}


def test_bytes_of_every_call(run):
    for rank, (text, entries) in enumerate(run(calls, world_size=4)):
        ledger = Ledger.from_json(text)
        assert (ledger.rank, ledger.world_size) == (rank, 4)
        tp_rank = rank % 2
        expected = {
            ("step", tag, axis, op): (count, (low, high)[tp_rank])
            for tag, (op, axis, count, low, high) in EXPECTED.items()
        }
        expected["step", "i", "tp", "send" if tp_rank == 0 else "recv"] = (1, 48 if tp_rank == 0 else 0)
        expected["control", "decide", "world", "all_reduce"] = (1, 4)
        assert ledger.counters == expected
        assert ledger.totals()["dp+tp"] == {"all_reduce": 8}
        assert ledger.totals()["tp"]["all_reduce"] == 96 + 24 + 0 + 3
        assert ledger.calls()["tp"]["all_reduce"] == 5
        assert ledger.totals("control") == {"world": {"all_reduce": 4}}
        assert ledger.by_tag()["a/forward"] == {("tp", "all_reduce"): (2, 96)}
        first = entries[0]
        assert (first["op"], first["shape"], first["dtype"]) == ("all_reduce", (4, 3), "float32")
        assert "test_ledger.py:" in first["site"]


def test_differences_and_sums():
    one = Ledger(0, 2)
    one.record(Entry("step", "a", "tp", "all_reduce", 8))
    mark = one.copy()
    one.record(Entry("step", "a", "tp", "all_reduce", 8))
    one.record(Entry("control", "b", "world", "barrier", 0))
    since = one - mark
    assert since.counters == {
        ("step", "a", "tp", "all_reduce"): (1, 8),
        ("control", "b", "world", "barrier"): (1, 0),
    }
    assert Ledger.sum([one, mark]).totals() == {"tp": {"all_reduce": 24}}
    one.clear()
    assert not one.counters
    assert mark.counters


def test_counters_are_exact_where_entries_are_bounded():
    ledger = Ledger(max_entries=10)
    for i in range(1000):
        ledger.record(Entry("step", "x", "dp", "send", 2**33, seq=i))
    assert len(ledger.entries) == 10
    assert ledger.entries[-1].seq == 999
    assert ledger.totals() == {"dp": {"send": 1000 * 2**33}}


def test_file_round_trip(tmp_path):
    ledger = Ledger(1, 4)
    ledger.record(Entry("step", "loss", "dp+tp", "all_reduce", 8))
    ledger.save(tmp_path / "rank-1.json")
    assert Ledger.load(tmp_path / "rank-1.json").counters == ledger.counters
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]
    data = json.loads((tmp_path / "rank-1.json").read_text())
    assert list(data)[:2] == ["schema", "version"]
    assert data["rows"] == [
        {"kind": "step", "tag": "loss", "axis": "dp+tp", "op": "all_reduce", "calls": 1, "bytes": 8}
    ]


def test_other_files_are_refused(tmp_path):
    for text, match in [("{", "not a ledger"), ('{"schema": "x"}', "'x'"), ("[]", "list")]:
        (tmp_path / "f.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            Ledger.load(tmp_path / "f.json")
    newer = json.loads(Ledger().to_json()) | {"version": 99}
    with pytest.raises(ValueError, match="version 99 is newer than 1"):
        Ledger.from_json(json.dumps(newer))


def test_reading_needs_no_torch(tmp_path):
    Ledger(0, 1).save(tmp_path / "rank-0.json")
    code = (
        "import sys; from crosscut.comm import Ledger; from crosscut.comm.errors import RankError; "
        f"Ledger.load({str(tmp_path / 'rank-0.json')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_refused_and_single_rank_calls_are_not_counted():
    def body(ctx):
        ctx.set_mesh(Mesh.of("tp=2"))
        ctx.ledger.clear()
        ctx.group("dp").all_reduce(torch.ones(3))
        with pytest.raises(ValueError, match="op='mean'"):
            ctx.group("tp").all_reduce(torch.ones(3), "mean")
        assert not ctx.ledger.counters

    spawn(body, world_size=2, backend="threads")
