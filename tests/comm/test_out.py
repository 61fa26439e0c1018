"""`out=` of all_gather, reduce_scatter and all_to_all: the same values in the caller's memory, on every back end."""

import pytest
import torch

from comm.data import ALL, make, ops_for, reduce, same
from crosscut.comm import CommError, spawn


def check_out(ctx, async_op):
    n, rank = ctx.world_size, ctx.rank

    def into(out, call, *args):
        before = out.data_ptr()
        result = call(*args, out=out, async_op=async_op)
        result = result.wait() if async_op else result
        assert result is out
        assert out.data_ptr() == before
        return out

    for dtype in ALL:
        for rows, width in ((3, 5), (1, 40_000), (0, 2)):  # short, long and empty
            mine = make(rank, (rows, width), dtype)
            out = into(torch.empty((n * rows, width), dtype=dtype), ctx.world.all_gather, mine)
            same(out, torch.cat([make(r, (rows, width), dtype) for r in range(n)]))
            mine = make(rank, (n * rows, width), dtype)
            out = into(torch.empty((n * rows, width), dtype=dtype), ctx.world.all_to_all, mine)
            parts = [make(r, (n * rows, width), dtype)[rank * rows : (rank + 1) * rows] for r in range(n)]
            same(out, torch.cat(parts))
            for op in ops_for(dtype)[:2] if rows else ():
                out = into(torch.empty((rows, width), dtype=dtype), ctx.world.reduce_scatter, mine, 0, op)
                whole = reduce(op, [make(r, (n * rows, width), dtype) for r in range(n)])
                same(out, whole.chunk(n)[rank])
    out = into(torch.empty(n), ctx.world.all_gather, torch.tensor(float(rank)))
    same(out, torch.arange(n, dtype=torch.float32))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_result_is_put_in_out(run, world_size, async_op):
    run(check_out, async_op, world_size=world_size)


def read_early(ctx):
    out = torch.zeros(4)
    handle = ctx.world.all_gather(torch.full((2,), float(ctx.rank)), out=out, async_op=True)
    assert out.isnan().all()
    handle.wait()
    assert out.tolist() == [0, 0, 1, 1]
    handle = ctx.world.all_gather(torch.ones(2), out=out, async_op=True)
    out.zero_()
    with pytest.raises(CommError, match="result of async all_gather"):
        handle.wait()


def test_out_of_an_async_call_is_guarded():
    spawn(read_early, world_size=2, backend="threads", timeout_s=30)


def refusals(ctx):
    x = torch.ones(4, 2)
    gather, scatter = ctx.world.all_gather, ctx.world.reduce_scatter
    for call, out, message in (
        (gather, torch.ones(4, 2), r"out is float32 \(4, 2\), the result float32 \(8, 2\)"),
        (gather, torch.ones(8, 2, dtype=torch.int64), r"out is int64 \(8, 2\), the result float32 \(8, 2\)"),
        (gather, torch.ones(2, 8).T, "not contiguous"),
        (gather, torch.ones(8, 2, requires_grad=True), "requires grad"),
        (scatter, x[:2], "out overlaps x"),
        (scatter, [1.0], "expected a tensor, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            call(x, out=out)
    with pytest.raises(ValueError, match="out= beside dim=1"):
        gather(x, 1, out=torch.ones(4, 4))


def test_refusals():
    spawn(refusals, world_size=2, backend="threads", timeout_s=30)
