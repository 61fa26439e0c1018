"""Async handles: results after wait, post-processing in wait, early reads and writes found, forgotten waits named."""

import time

import pytest
import torch

from crosscut.comm import CommError, MismatchError, RankError, spawn


def threads(fn, *args, world_size=2):
    return spawn(fn, *args, world_size=world_size, backend="threads", timeout_s=30)


def overlapped(ctx):
    n, rank = ctx.world_size, ctx.rank
    x = torch.arange(6.0).view(2, 3) + 100 * rank
    wide = torch.zeros(4, 6)
    view = wide[::2, ::2].copy_(x)  # not contiguous: the copy back happens in wait()
    half = x.to(torch.bfloat16)  # travels wider: the rounding happens in wait()
    handles = {
        "all_reduce": ctx.world.all_reduce(view, "avg", async_op=True),
        "half": ctx.world.all_reduce(half, async_op=True),
        "gather1": ctx.world.all_gather(x, 1, async_op=True),
        "reduce_scatter": ctx.world.reduce_scatter(x.repeat(1, n), 1, async_op=True),
        "all_to_all": ctx.world.all_to_all(x.repeat(n, 1), async_op=True),
        "gather": ctx.world.gather(x, async_op=True),
        "barrier": ctx.world.barrier(async_op=True),
    }
    out = {name: handle.wait() for name, handle in reversed(handles.items())}  # any order
    again = {name: handle.wait() for name, handle in handles.items()}
    assert all(out[name] is again[name] for name in out)
    assert all(handle.done() for handle in handles.values())
    total = torch.arange(6.0).view(2, 3) * n + 100 * sum(range(n))
    assert out["all_reduce"] is view
    assert torch.equal(view, total / n)
    assert torch.equal(
        half, sum((torch.arange(6.0).view(2, 3) + 100 * r).bfloat16().float() for r in range(n)).bfloat16()
    )
    parts = [torch.arange(6.0).view(2, 3) + 100 * r for r in range(n)]
    assert torch.equal(out["gather1"], torch.cat(parts, 1))
    assert torch.equal(out["reduce_scatter"], total)
    assert torch.equal(out["all_to_all"], torch.cat(parts))
    assert (out["gather"] is None) == (rank != 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_right_after_wait(run, world_size):
    run(overlapped, world_size=world_size)


def with_a_slow_peer(ctx):
    """What is done to the data after it arrives must not be done before."""
    for step in range(20):
        x = torch.full((3, 2), float(10 * step + ctx.rank))
        if ctx.rank == step % 2:
            time.sleep(0.01)
        handle = ctx.world.all_gather(x, 1, async_op=True)
        assert handle.wait().tolist() == [[10.0 * step] * 2 + [10.0 * step + 1] * 2] * 3


def test_a_slow_peer_changes_nothing(run):
    run(with_a_slow_peer, world_size=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_a_result_read_before_wait_is_poison(dtype):
    def body(ctx):
        x = torch.ones(3, dtype=dtype)
        handle = ctx.world.all_reduce(x, "max", async_op=True)
        early = x.clone()
        handle.wait()
        assert torch.equal(x, torch.ones(3, dtype=dtype))
        return early

    early = threads(body)[0]
    if dtype.is_floating_point:
        assert early.isnan().all()
    elif dtype != torch.bool:
        assert (early == torch.iinfo(dtype).min).all()


def test_a_received_tensor_is_poison_until_waited_for():
    def body(ctx):
        if ctx.rank == 0:
            ctx.world.send(torch.ones(2), 1)
            return None
        out = torch.zeros(2)
        handle = ctx.world.recv(out, 0, async_op=True)
        assert out.isnan().all()
        handle.wait()
        return out.tolist()

    assert threads(body)[1] == [1.0, 1.0]


CHANGES = {
    "input of async all_gather": lambda g, x: g.all_gather(x, async_op=True, tag="mlp.up"),
    "input of async reduce_scatter": lambda g, x: g.reduce_scatter(x, async_op=True, tag="mlp.up"),
    "input of async all_to_all": lambda g, x: g.all_to_all(x, async_op=True, tag="mlp.up"),
    "result of async all_reduce": lambda g, x: g.all_reduce(x, async_op=True, tag="mlp.up"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_tensor_changed_before_wait_is_an_error(what):
    def body(ctx):
        x = torch.arange(4.0)
        handle = CHANGES[what](ctx.world, x)
        x[2] = 7
        handle.wait()

    with pytest.raises((CommError, RankError), match=f'{what}.*"mlp.up".*before wait'):
        threads(body)


def test_the_value_sent_is_the_one_at_the_call():
    """On a network a later change is a race; in lockstep it is found, and what was sent is what was there."""

    def body(ctx):
        x = torch.full((2,), float(ctx.rank))
        handle = ctx.world.send(x, 1 - ctx.rank, async_op=True)
        out = torch.empty(2)
        ctx.world.recv(out, 1 - ctx.rank)
        handle.wait()
        return out.tolist()

    assert threads(body) == [[1.0, 1.0], [0.0, 0.0]]


def forgets(ctx):
    ctx.world.all_reduce(torch.ones(2), async_op=True, tag="grads/bucket 3")


def test_a_handle_never_waited_for_is_named(run):
    with pytest.raises((CommError, RankError), match=r'never waited for.*all_reduce.*"grads/bucket 3".*test_async.py'):
        run(forgets, world_size=2)


def test_a_mismatch_of_async_calls_is_raised_at_wait():
    def body(ctx):
        handle = ctx.world.all_reduce(torch.ones(2 + ctx.rank), async_op=True, tag="t")
        with pytest.raises(MismatchError, match=r"all_reduce #1.*\(2,\).*\(3,\)"):
            handle.wait()

    threads(body)


def test_polling_lets_the_others_run():
    def body(ctx):
        if ctx.rank == 0:
            handle = ctx.world.all_reduce(torch.ones(1), async_op=True)
            polls = 0
            while not handle.done():
                polls += 1
            return polls, handle.wait().item()
        return 1, ctx.world.all_reduce(torch.ones(1)).item()

    results = threads(body, world_size=3)
    assert [value for _, value in results] == [3.0] * 3
    assert results[0][0] <= 1


def gives_up(ctx):
    """An error between a call and its wait: the call is given up, and the world closes cleanly."""
    handle = ctx.world.all_reduce(torch.ones(3), async_op=True)
    handle.forget()
    return ctx.world.all_reduce(torch.tensor(1.0 + ctx.rank)).item()


def test_a_call_that_is_given_up(run):
    assert run(gives_up, world_size=2) == [3.0, 3.0]
