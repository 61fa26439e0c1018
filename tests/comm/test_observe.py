"""An observer of a context is told of every call as it is made, waited for and done; of nothing that is refused."""

import pytest
import torch

from crosscut.comm import spawn
from crosscut.layout.mesh import Mesh


class Log:
    """Writes down what it is told."""

    def __init__(self):
        self.lanes, self.marks, self.told = [], [], []

    def lane(self, label, ranks, channel):
        self.lanes.append((label, ranks, channel))
        return len(self.lanes) - 1

    def mark(self, lane, call, num_bytes, is_async):
        self.marks.append((self.lanes[lane][0], call, num_bytes, is_async))
        return len(self.marks) - 1

    def begin(self, mark, seq):
        self.told.append(("begins", self.marks[mark], seq))
        return len(self.told) - 1

    def waits(self, number):
        self.told.append(("waits", self.told[number][1], self.told[number][2]))

    def complete(self, number):
        self.told.append(("is done", self.told[number][1], self.told[number][2]))

    def lines(self):
        return [f"{call.op} {seq} {what}" for what, (_, call, _, _), seq in self.told]


def every_call(ctx):
    log = Log()
    before = ctx.new_group((0, 1), "before")
    ctx.observe(log)
    w, n = ctx.world, ctx.world_size
    x = torch.arange(6.0) + ctx.rank
    w.all_reduce(x.clone())
    start = ctx.ledger.entries[-1].seq  # the transport has counted calls before
    for _ in range(2):
        w.reduce_scatter(x.view(3, 2)[: 3 if n == 3 else 2])
    handle = w.all_gather(x, async_op=True)
    w.broadcast(x.clone(), src=1)  # x belongs to the other call
    handle.wait()
    w.exchange(x, (ctx.rank + 1) % n, torch.empty(6), (ctx.rank - 1) % n)
    if ctx.rank == 0:
        w.send(x, 1)
    if ctx.rank == 1:
        w.recv(x, 0)
    lines = [line.replace(f" {seq} ", f" +{seq - start} ") for line in log.lines() for seq in [int(line.split()[1])]]
    count = len(log.told)
    with pytest.raises(ValueError, match="op='mean' is unknown"):
        w.all_reduce(x, op="mean")
    with pytest.raises(ValueError, match="kind='neither' is unknown"):
        w.barrier(kind="neither")
    assert len(log.told) == count
    with ctx.ledger.control():
        w.barrier()
    assert log.told[-1][1][1].kind == "control"
    if ctx.rank < 2:
        before.all_reduce(x)
        assert log.told[-1][1][0] == "before"
    ctx.set_mesh(Mesh.of(f"dp={n}"))
    ctx.group("dp").all_reduce(x)
    _, (label, call, num_bytes, is_async), seq = log.told[-1]
    assert (label, call.op, num_bytes, is_async, seq) == ("dp", "all_reduce", 24, False, ctx.ledger.entries[-1].seq)
    assert len(log.marks) == len(set(log.marks))  # calls that are alike are described once
    return lines, log.lanes


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_every_call_is_told(pool, backend):
    run = spawn if backend == "threads" else pool.run
    values = run(every_call, world_size=3, backend=backend)
    for rank, (lines, lanes) in enumerate(values):
        assert lines[:10] == [
            *("all_reduce +0 begins", "all_reduce +0 is done"),
            *("reduce_scatter +1 begins", "reduce_scatter +1 is done"),
            *("reduce_scatter +2 begins", "reduce_scatter +2 is done"),
            *("all_gather +3 begins", "broadcast +4 begins", "broadcast +4 is done", "all_gather +3 waits"),
        ], rank
        messages = [line.split(" ", 2)[::2] for line in lines[11:]]
        assert messages[:5] == [
            *(["send", "begins"], ["recv", "begins"], ["send", "waits"], ["send", "is done"], ["recv", "is done"]),
        ]
        assert messages[5:] == {
            0: [["send", "begins"], ["send", "is done"]],
            1: [["recv", "begins"], ["recv", "is done"]],
        }.get(rank, [])
        ranks = (0, 1, 2)
        assert lanes == [("world", ranks, 0), *([("before", (0, 1), 0)] if rank < 2 else []), ("dp", ranks, 0)]


def test_an_observer_takes_another_ones_place():
    def main(ctx):
        first, second = Log(), Log()
        ctx.observe(first)
        ctx.world.barrier()
        ctx.observe(second)
        ctx.world.barrier()
        return len(first.told), len(second.told)

    assert spawn(main, world_size=2, backend="threads") == [(2, 2)] * 2
