"""The warm pool: failures leave nothing to the next job, and workers are started once."""

import os
import time

import pytest
import torch

from crosscut.comm import RankError, StuckError


def total(ctx, scale):
    return ctx.world.all_reduce(torch.tensor(float(ctx.rank * scale))).item(), os.getpid()


def raises_mid_collective(ctx):
    ctx.world.all_reduce(torch.ones(2))
    if ctx.rank == 1:
        raise ValueError("rows=7 is odd")
    ctx.world.all_reduce(torch.ones(2), tag="grads")


def forgets_async(ctx):
    ctx.world.all_reduce(torch.ones(1 << 20), async_op=True)


def one_call_too_few(ctx):
    if ctx.rank == 0:
        ctx.world.all_reduce(torch.ones(2), tag="last batch")


def draws(ctx):
    return torch.rand(1).item()


def exits(ctx):
    os._exit(4)


def sleeps(ctx):
    time.sleep(60)


def test_a_failed_job_leaves_nothing(pool):
    before = pool.run(total, 2, world_size=3)
    launches = pool.launches
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(
            ValueError, match="rank 1 of 3 raised ValueError: rows=7 is odd; stopped ranks 0,2"
        ) as caught:
            pool.run(raises_mid_collective, world_size=3)
        assert all(line.startswith("PeerError") for line in caught.value.folded.values())
        assert 'tag "grads"' in caught.value.folded[0]
        with pytest.raises(RankError, match="never waited for"):
            pool.run(forgets_async, world_size=2)
        assert pool.run(total, 2, world_size=3) == before
    assert time.monotonic() - began < 20
    assert pool.launches == launches


def test_a_rank_that_returns_while_another_waits(pool):
    with pytest.raises(RankError, match=r'rank 0 of 2 .*"last batch".*rank 1 had returned by then') as caught:
        pool.run(one_call_too_few, world_size=2, check=False)
    assert "all_reduce(sum) #1 over world" in str(caught.value)
    assert "CROSSCUT_CHECK=1 tells which" in str(caught.value)
    with pytest.raises(RankError, match=r'all_reduce #1 .*rank 0 called .*"last batch".*rank 1 has returned from its'):
        pool.run(one_call_too_few, world_size=2, check=True)


def test_every_job_starts_from_the_same_random_state(pool):
    assert pool.run(draws, world_size=2) == pool.run(draws, world_size=2)


def test_worlds_that_do_not_fit(pool):
    with pytest.raises(ValueError, match=f"world_size=99 is outside the pool; use 1 to {pool.max_workers}"):
        pool.run(total, 1, world_size=99)


def test_a_dead_or_stuck_worker_is_replaced():
    from crosscut.testing.pool import WorkerPool

    workers = WorkerPool(1)
    try:
        with pytest.raises(StuckError, match="rank 0 of 1 did not end within 1 s"):
            workers.run(sleeps, world_size=1, timeout_s=1)
        with pytest.raises(RankError, match=r"rank 0 of 1 \(pid \d+\) ended with exit code 4 without returning"):
            workers.run(exits, world_size=1)
        assert workers.launches == 2
    finally:
        workers.close()
