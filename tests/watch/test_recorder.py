"""The recorder around a back end and a context: what is called is recorded, in this process, on threads."""

from types import SimpleNamespace

import torch

from crosscut.comm import spawn
from crosscut.layout.mesh import Mesh
from crosscut.watch import program
from crosscut.watch.autopsy import autopsy
from crosscut.watch.facts import Facts
from crosscut.watch.reading import read_ring
from crosscut.watch.recorder import Recorder


def calls(ctx, folder):
    recorder = Recorder(folder, ctx.rank, ctx.world_size)
    ends = ctx.new_group((0, 1), "ends")  # the ranks of a group over tp, on another connection
    ctx.observe(recorder)
    ctx.set_mesh(Mesh.of("pp=2,tp=2"))
    tp, pp = ctx.group("tp"), ctx.group("pp")
    for step in range(3):
        recorder.ring.step = step
        x = torch.arange(6.0) + ctx.rank
        tp.all_reduce(x, "max", tag="norm")
        tp.all_gather(x.view(2, 3), dim=1)
        handle = tp.all_to_all(x[:4], async_op=True)
        ctx.world.barrier()
        handle.wait()
        pp.exchange(x, 1 - pp.rank, torch.empty(6), 1 - pp.rank, tag="turn")
        up = ctx.group("pp", channel=1)
        if pp.rank == 0:
            pp.send(x, 1)
            up.recv(torch.empty(2), 1)
        else:
            pp.recv(torch.empty(6), 0)
            up.send(torch.ones(2), 0)
        with ctx.ledger.control():
            tp.all_reduce(x, tag="evaluation")
    if ctx.rank < 2:
        ends.all_reduce(x)
    recorder.ring.end(0)
    return ctx.ledger.counters


def test_every_call_of_a_context_is_recorded(tmp_path):
    values = spawn(calls, tmp_path, world_size=4, backend="threads")
    facts = {}
    for rank, counted in enumerate(values):
        ring = read_ring(tmp_path / "ledger" / f"rank-{rank}.ring")
        facts[rank] = Facts(rank, ring, alive=False, exit_code=0)
        assert ring.totals == {key: value for key, value in counted.items() if key in ring.totals}
        assert sum(calls for calls, _ in ring.totals.values()) == ring.entered
        assert {op for kind, tag, _, op in counted if tag != "set_mesh"} >= {"all_to_all", "send", "recv", "barrier"}
        assert {kind for kind, tag, *_ in ring.totals if tag == "evaluation"} == {"control"}
        assert all(record.completed for record in ring.records)
        steps = [record for record in ring.records if record.call.tag == "norm"]
        assert [record.step for record in steps] == [0, 1, 2]
        assert steps[0].lane.ranks == ((0, 1), (2, 3))[rank // 2]
        assert steps[0].call.reduce_op == "max"
        assert steps[0].bytes == 24
        channels = {record.lane.channel for record in ring.records if record.lane.label == "pp"}
        assert channels == {0, 1}
        first = [
            record.call.seq for record in ring.records if record.call.op in ("send", "recv") and record.lane.channel
        ]
        assert first == [1, 2, 3]  # messages are numbered on each channel
        late = [record for record in ring.records if record.is_async]
        assert {record.call.op for record in late} == {"all_to_all", "send"}
        assert all(record.entered <= record.waiting <= record.completed for record in late)
        assert not any(record.waiting for record in ring.records if not record.is_async)
        if rank < 2:
            lanes = {r.lane.label: r.lane for r in ring.records if r.lane.ranks == (0, 1)}
            assert lanes["tp"].channel != lanes["ends"].channel  # each numbers its calls from 1
            assert ring.last_seq[lanes["ends"]] == 1
    assert autopsy(facts, 4).verdict == "none"


def deadlocks(ctx, folder):
    recorder = Recorder(folder, ctx.rank, ctx.world_size)
    ctx.observe(recorder)
    for step in range(3):
        ctx.world.all_reduce(torch.ones(2), tag=f"step {step}")
        if step == 2 and ctx.rank == 1:
            return
        ctx.world.barrier(tag="end")


def test_a_deadlock_of_threads_is_told_in_the_same_words(tmp_path):
    try:
        spawn(deadlocks, tmp_path, world_size=3, backend="threads")
    except RuntimeError as error:
        told = str(error)
    facts = {}
    for rank in range(3):
        facts[rank] = Facts(rank, read_ring(tmp_path / "ledger" / f"rank-{rank}.ring"))
        if rank == 1:
            facts[rank].alive, facts[rank].exit_code = False, 0
    found = autopsy(facts, 3)
    assert (found.verdict, found.culprits) == ("missing_call", [1])
    call = found.text.partition("wait in ")[2].partition(" since")[0]
    assert call.startswith("barrier #")
    assert call in told, (call, told)


def test_clocks_are_aligned(tmp_path):
    """Rank 1's clock runs five seconds behind."""

    class Dist:
        def barrier(self):
            pass

        def get_world_size(self):
            return 2

        def get_rank(self):
            return 1

        def all_gather_object(self, values, own):
            values[:] = [own + 5_000_000_000, own]

    recorder = SimpleNamespace(ring=SimpleNamespace(align=lambda offset: offsets.append(offset)))
    offsets = []
    program.align(recorder, Dist())
    assert offsets == [5_000_000_000]
