"""Every collective against its definition: ranks 1 to 4, every dtype, strided, empty and 0-d, on every back end."""

import random

import pytest
import torch

from comm.data import ALL, make, ops_for, reduce, same, small, strided

SHAPES = [(6,), (4, 3), (), (0,), (2, 0, 3)]


def forms(x):
    """The tensor, and the same in memory that is not contiguous."""
    return [x.clone(), strided(x)]


def values(op, size, shape, dtype):
    maker = small if op == "prod" else make
    return [maker(rank, shape, dtype) for rank in range(size)]


def check_all_reduce(ctx, dtype):
    for turn, op in enumerate(ops_for(dtype)):
        for shape in SHAPES:
            data = values(op, ctx.world_size, shape, dtype)
            for x in forms(data[ctx.rank])[turn % 2 :][:1]:  # every op, shape and form, not their whole product
                out = ctx.world.all_reduce(x, op)
                assert out is x
                same(x, reduce(op, data))


def check_reduce(ctx, dtype):
    for turn, op in enumerate(ops_for(dtype)):
        for dst in range(ctx.world_size):
            for shape in SHAPES:
                data = values(op, ctx.world_size, shape, dtype)
                for x in forms(data[ctx.rank])[(turn + dst) % 2 :][:1]:
                    assert ctx.world.reduce(x, dst, op) is x
                    same(x, reduce(op, data) if ctx.rank == dst else data[ctx.rank])


def check_reduce_scatter(ctx, dtype):
    n = ctx.world_size
    for op in ops_for(dtype):
        for shape, dim in [((2 * n,), 0), ((n, 3), 0), ((3, 2 * n), 1), ((3, n, 2), -2), ((0,), 0), ((n, 0), 0)]:
            data = values(op, n, shape, dtype)
            expected = reduce(op, data).chunk(n, dim)[ctx.rank] if data[0].numel() else None
            for x in forms(data[ctx.rank]):
                before = x.clone()
                out = ctx.world.reduce_scatter(x, dim, op)
                same(x, before)
                assert out.is_contiguous()
                if expected is not None:
                    same(out, expected)
                else:
                    assert out.shape[dim] == shape[dim] // n


def check_broadcast(ctx, dtype):
    for src in range(ctx.world_size):
        for shape in SHAPES:
            for x in forms(make(ctx.rank, shape, dtype)):
                assert ctx.world.broadcast(x, src) is x
                same(x, make(src, shape, dtype))


def check_gather_scatter(ctx, dtype):
    n, rank = ctx.world_size, ctx.rank
    for root in range(n):
        for shape in SHAPES:
            for x in forms(make(rank, shape, dtype)):
                got = ctx.world.gather(x, root)
                assert (got is not None) == (rank == root)
                for r, part in enumerate(got or []):
                    same(part, make(r, shape, dtype))
            parts = [strided(make(r, shape, dtype)) for r in range(n)]
            for out in forms(make(9, shape, dtype)):
                assert ctx.world.scatter(parts if rank == root else None, root, out=out) is out
                same(out, make(rank, shape, dtype))


def check_all_gather(ctx, dtype):
    n = ctx.world_size
    for shape, dim in [((3,), 0), ((2, 3), 0), ((2, 3), 1), ((2, 3, 2), -1), ((0,), 0), ((1, 0, 2), 2)]:
        for x in forms(make(ctx.rank, shape, dtype)):
            out = ctx.world.all_gather(x, dim)
            same(out, torch.cat([make(r, shape, dtype) for r in range(n)], dim))
            assert out.is_contiguous()
    same(ctx.world.all_gather(make(ctx.rank, (), dtype)), torch.stack([make(r, (), dtype) for r in range(n)]))


def check_all_to_all(ctx, dtype):
    n, rank = ctx.world_size, ctx.rank
    for shape in [(2 * n,), (n, 3), (0,), (n, 0)]:
        for x in forms(make(rank, shape, dtype)):
            rows = shape[0] // n
            pieces = [make(r, shape, dtype)[rank * rows : (rank + 1) * rows] for r in range(n)]
            same(ctx.world.all_to_all(x), torch.cat(pieces))
    for splits in split_matrices(n):
        for tail in [(), (3,)]:
            ins, outs = splits[rank], [splits[r][rank] for r in range(n)]
            for x in forms(make(rank, (sum(ins), *tail), dtype)):
                sent = [make(r, (sum(splits[r]), *tail), dtype).split(splits[r])[rank] for r in range(n)]
                same(ctx.world.all_to_all(x, ins, outs), torch.cat(sent))


def split_matrices(n):
    """Rows rank i sends rank j: random, with whole rows, whole columns and the diagonal of zeros, and all zeros."""
    draw = random.Random(n)
    base = [[draw.randrange(4) for _ in range(n)] for _ in range(n)]
    zero_row = [[0] * n if i == 0 else row for i, row in enumerate(base)]
    zero_column = [[0 if j == n - 1 else k for j, k in enumerate(row)] for row in base]
    zero_diagonal = [[0 if i == j else k for j, k in enumerate(row)] for i, row in enumerate(base)]
    return [base, zero_row, zero_column, zero_diagonal, [[0] * n for _ in range(n)]]


def check_send_recv(ctx, dtype):
    n, rank = ctx.world_size, ctx.rank
    if n == 1:
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    for shape in SHAPES:
        for x, out in zip(forms(make(rank, shape, dtype)), forms(make(9, shape, dtype)), strict=True):
            handle = ctx.world.send(x, right, async_op=True)
            assert ctx.world.recv(out, left) is out
            handle.wait()
            same(out, make(left, shape, dtype))
            assert ctx.world.exchange(x, left, out, right) is out
            same(out, make(right, shape, dtype))


CHECKS = [
    check_all_reduce,
    check_reduce,
    check_reduce_scatter,
    check_broadcast,
    check_gather_scatter,
    check_all_gather,
    check_all_to_all,
    check_send_recv,
]


def every_dtype(ctx, index):
    for dtype in ALL:
        CHECKS[index](ctx, dtype)
    ctx.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("index", range(len(CHECKS)), ids=[check.__name__.removeprefix("check_") for check in CHECKS])
def test_equals_its_definition(run, index, world_size):
    run(every_dtype, index, world_size=world_size)


def halves(ctx):
    """reduce_scatter + all_gather beside all_reduce, on values whose sum depends on the order."""
    torch.manual_seed(ctx.rank)
    out = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(ctx.world_size * 500, dtype=torch.float64).to(dtype) * 10.0 ** (ctx.rank * 3)
        whole = ctx.world.all_reduce(x.clone())
        pieces = ctx.world.all_gather(ctx.world.reduce_scatter(x))
        out.append((whole, pieces))
    return out


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_is_reduce_scatter_then_all_gather(run, world_size):
    results = run(halves, world_size=world_size)
    for whole, pieces in results[0]:
        tolerance = 1e-2 if whole.dtype == torch.bfloat16 else 1e-5
        assert torch.linalg.vector_norm(whole.double() - pieces.double()) <= tolerance * whole.double().norm()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_is_bitwise_the_same_on_all_ranks(run, world_size):
    """Else replicas drift. The sums depend on the order of addition: otherwise this would prove nothing."""
    results = run(halves, world_size=world_size)
    for each in zip(*results, strict=True):
        for whole, _ in each[1:]:
            assert torch.equal(whole, each[0][0])


def lecture(ctx):
    x = torch.arange(4) + ctx.rank
    return ctx.world.all_gather(ctx.world.reduce_scatter(x)).tolist(), ctx.world.all_to_all(
        torch.arange(4) + 4 * ctx.rank
    ).tolist()


def test_the_numbers_of_the_textbook(run):
    results = run(lecture, world_size=4)
    assert results == [([6, 10, 14, 18], [r, 4 + r, 8 + r, 12 + r]) for r in range(4)]


def transposed(ctx):
    x = torch.arange(10).view(2, 5).t() + 100 * ctx.rank
    assert not x.is_contiguous()
    return ctx.world.gather(x, dst=1)


def test_a_transposed_tensor_arrives_in_its_own_order(run):
    got = run(transposed, world_size=2)[1]
    for rank, part in enumerate(got):
        same(part, torch.arange(10).view(2, 5).t().contiguous() + 100 * rank)


def neighbours(ctx):
    """In-place calls on a view must leave what lies between its elements alone."""
    whole = torch.arange(12.0) + 100 * ctx.rank
    before = whole.clone()
    view = whole[1::3]
    ctx.world.broadcast(view, 1)
    ctx.world.all_reduce(view)
    ctx.world.reduce(view, 0)
    ctx.world.scatter([torch.full((4,), 5.0)] * ctx.world_size if ctx.rank == 0 else None, out=view)
    mask = torch.ones(12, dtype=torch.bool)
    mask[1::3] = False
    assert torch.equal(whole[mask], before[mask])
    assert view.tolist() == [5.0] * 4


def test_neighbours_of_a_strided_view_are_left_alone(run):
    run(neighbours, world_size=2)


def big_exchange(ctx):
    x = torch.full((4_000_000,), float(ctx.rank))
    out = torch.empty_like(x)
    for _ in range(2):
        ctx.world.exchange(x, (ctx.rank + 1) % ctx.world_size, out, (ctx.rank - 1) % ctx.world_size)
    return float(out.min()), float(out.max())


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_ring_of_large_exchanges_does_not_block_itself(run, world_size):
    """16 MB a message: above what any transport buffers on its own."""
    left = [(rank - 1) % world_size for rank in range(world_size)]
    assert run(big_exchange, world_size=world_size) == [(float(r), float(r)) for r in left]


def in_order(ctx):
    if ctx.rank == 0:
        handles = [ctx.world.send(torch.full((3,), float(i)), 1, async_op=True) for i in range(5)]
        for handle in handles:
            handle.wait()
        return None
    outs = [torch.zeros(3) for _ in range(5)]
    handles = [ctx.world.recv(out, 0, async_op=True) for out in outs]
    for handle in reversed(handles):  # the order of waiting must not matter
        handle.wait()
    return [float(out[0]) for out in outs]


def test_messages_of_a_pair_keep_their_order(run):
    assert run(in_order, world_size=2)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def grads_of_expanded(ctx):
    """What autograd hands a backward is often expanded or transposed."""
    x = torch.tensor(float(ctx.rank + 1)).expand(2, 3)
    gathered = ctx.world.all_gather(x, 1)
    scattered = ctx.world.reduce_scatter(torch.ones(1).expand(2 * ctx.world_size, 3))
    return gathered, scattered


def test_expanded_inputs(run):
    for gathered, scattered in run(grads_of_expanded, world_size=2):
        assert gathered.tolist() == [[1, 1, 1, 2, 2, 2]] * 2
        assert scattered.tolist() == [[2, 2, 2]] * 2
