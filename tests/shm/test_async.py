"""Async work, futures, overlapping groups, messages in any order."""

import pytest
import torch
import torch.distributed as dist
from comm.data import make, same

from crosscut.comm.shm.layout import PART, PARTS


@pytest.mark.ranks(2, 3, backend="shm")
def test_async_calls_are_waited_for_in_any_order(ctx):
    n, rank = ctx.world_size, ctx.rank
    xs = [make(rank, (50_000 + k,), torch.float32) for k in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    for k, x in enumerate(xs):
        same(x, sum(make(r, (50_000 + k,), torch.float32) for r in range(n)))
    x = torch.ones(3) * rank
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.done()
    assert future.then(lambda f: f.value()[0] * 2).wait().tolist() == [n * (n - 1)] * 3
    wide = torch.ones(3, 4).mul_(rank).t()  # strided: in place only after wait
    work = dist.all_reduce(wide, async_op=True)
    assert work.result()[0] is wide
    assert wide.unique().tolist() == [n * (n - 1) / 2]


def overlapping(ctx):
    """Three groups of two on three ranks, each rank waiting in another order: only progress of all groups ends it."""
    rank = ctx.rank
    groups = {(a, b): dist.new_group([a, b]) for a, b in [(0, 1), (1, 2), (0, 2)]}
    mine = {members: group for members, group in groups.items() if rank in members}
    for numel in (5, 700_000):
        xs = {members: torch.full((numel,), float(rank + 1)) for members in mine}
        works = {members: dist.all_reduce(xs[members], group=group, async_op=True) for members, group in mine.items()}
        order = sorted(works, key=lambda members: (members[0] + members[1] + rank) % 3)
        for members in order:
            works[members].wait()
            assert xs[members].unique().tolist() == [sum(members) + 2]
    whole = torch.tensor([rank])
    dist.all_reduce(whole)
    assert whole.item() == 3
    for group in mine.values():
        dist.destroy_process_group(group)


def test_overlapping_groups(shm):
    shm(overlapping, world_size=3)


@pytest.mark.ranks(2, backend="shm")
def test_messages_in_any_order(ctx):
    """Large and small messages both ways, waited for in the order that blocks a naive transport."""
    rank, peer = ctx.rank, 1 - ctx.rank
    sizes = [3, 3 * PARTS * PART // 4, 0, PART // 4, 2 * PARTS * PART // 4 + 1]
    outs = [torch.empty(size) for size in sizes]
    sends = [dist.isend(make(rank, (size,), torch.float32) + k, peer, tag=k) for k, size in enumerate(sizes)]
    receives = {k: dist.irecv(outs[k], peer, tag=k) for k in (4, 1, 3, 0, 2)}
    for k in (2, 4, 0, 3, 1):
        receives[k].wait()
        same(outs[k], make(peer, (sizes[k],), torch.float32) + k)
    for work in sends:
        work.wait()


@pytest.mark.ranks(2, backend="shm")
def test_messages_of_one_tag_keep_their_order(ctx):
    """Messages of one tag arrive in the order sent, many of them, also behind one that nobody wants yet."""
    if ctx.rank == 0:
        works = [dist.isend(torch.full((5,), 99.0), 1, tag=7)]
        works += [dist.isend(torch.tensor([float(k)]), 1, tag=1) for k in range(4 * PARTS)]
        for work in works:
            work.wait()
    else:
        x = torch.empty(1)
        for k in range(4 * PARTS):
            assert dist.recv(x, 0, tag=1) == 0
            assert x.item() == k
        y = torch.empty(5)
        dist.recv(y, 0, tag=7)
        assert y.unique().tolist() == [99]


@pytest.mark.ranks(3, backend="shm")
def test_any_source_and_oneself(ctx):
    n, rank = ctx.world_size, ctx.rank
    if rank == 0:
        seen = set()
        for _ in range(n - 1):
            x = torch.empty(4)
            source = dist.recv(x)
            assert x.tolist() == [source * 1.0] * 4
            seen.add(source)
        assert seen == set(range(1, n))
        x = torch.empty(2, 3).t()
        assert dist.recv(x, tag=5) == n - 1
        assert x.tolist() == torch.arange(6.0).view(3, 2).tolist()
    else:
        dist.send(torch.full((4,), float(rank)), 0)
        if rank == n - 1:
            dist.send(torch.arange(6.0).view(3, 2), 0, tag=5)
    a, b = torch.full((3,), float(rank)), torch.empty(3)
    works = [dist.irecv(b, rank), dist.isend(a, rank)]  # to oneself
    for work in works:
        work.wait()
    same(a, b)


@pytest.mark.ranks(2, 3, backend="shm")
def test_batches_of_messages(ctx):
    n, rank = ctx.world_size, ctx.rank
    x, before, after = (
        make(rank, (9,), torch.int64),
        torch.empty(9, dtype=torch.int64),
        torch.empty(9, dtype=torch.int64),
    )
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % n),
        dist.P2POp(dist.isend, x + 1, (rank - 1) % n),
        dist.P2POp(dist.irecv, after, (rank + 1) % n),
        dist.P2POp(dist.irecv, before, (rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if n > 2:
        same(before, make((rank - 1) % n, (9,), torch.int64))
        same(after, make((rank + 1) % n, (9,), torch.int64) + 1)
    z = torch.complex(torch.arange(3.0) + rank, torch.ones(3))
    out = torch.empty_like(z)
    work = dist.isend(z, (rank + 1) % n)
    dist.recv(out, (rank - 1) % n)
    work.wait()
    same(out, torch.complex(torch.arange(3.0) + (rank - 1) % n, torch.ones(3)))


@pytest.mark.ranks(2, backend="shm")
def test_messages_move_while_ranks_are_in_collectives(ctx):
    """A large send that is only finished while both ranks are in collectives."""
    rank = ctx.rank
    x = make(0, (5_000_000,), torch.float32)
    out = torch.empty_like(x)
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(out, 0)
    y = torch.ones(3)
    for _ in range(20):
        dist.all_reduce(y, dist.ReduceOp.MAX)
    work.wait()
    if rank == 1:
        same(out, x)


@pytest.mark.ranks(2, backend="shm")
def test_what_a_rank_has_sent_outlives_its_group(ctx):
    """Rank 0 leaves as soon as it has done its part; the data it has left behind is still read."""
    group = dist.new_group([0, 1])
    x = make(0, (600_000,), torch.float32) if ctx.rank == 0 else torch.empty(600_000)
    work = dist.broadcast(x, 0, group=group, async_op=True)
    if ctx.rank == 0:
        dist.isend(x[:1000], 1, group=group)  # not waited for: destroy finishes it
        dist.destroy_process_group(group)
        return
    work.wait()
    same(x, make(0, (600_000,), torch.float32))
    y = torch.empty(1000)
    dist.recv(y, 0, group=group)
    same(y, x[:1000])
    dist.destroy_process_group(group)


@pytest.mark.ranks(2, backend="shm")
def test_threads(ctx):
    """Several threads of a rank, each with its own group, at the same time."""
    import threading

    groups = [dist.new_group([0, 1]) for _ in range(3)]
    found = []

    def work(index):
        x = torch.full((40_000,), float(ctx.rank + index))
        for _ in range(20):
            dist.all_reduce(x, dist.ReduceOp.MAX, group=groups[index])
        found.append((index, x.unique().tolist()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [(index, [1.0 + index]) for index in range(3)]
