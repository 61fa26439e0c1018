"""Every call of torch.distributed, on shm, against its definition: dtypes, forms, sizes over several chunks, ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from comm.data import make, reduce, same, small, strided

from crosscut.comm.dtypes import flat
from crosscut.comm.shm.layout import SLOT

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}
SHAPES = [(6,), (4, 3), (), (0,), (2, 0, 3)]
MOVED = [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint32]
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def forms(x):
    return [x.clone(), strided(x)]


def moved(rank, shape, dtype):
    """Data of any dtype, also of those torch cannot compute with."""
    if dtype in (torch.float8_e5m2, torch.uint32):
        return (
            make(rank, shape, torch.int64).abs().to(torch.float32 if dtype.is_floating_point else torch.int64).to(dtype)
        )
    return make(rank, shape, dtype)


def alike(found, expected):
    """Bitwise equal, in any dtype."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(flat(found).view(torch.uint8), flat(expected).view(torch.uint8)), (found, expected)


@pytest.mark.ranks(1, 2, 3, 4, backend="shm")
def test_what_moves(ctx):
    n, rank = ctx.world_size, ctx.rank
    for dtype in MOVED:
        for shape in SHAPES:
            mine = list(forms(moved(rank, shape, dtype)))
            every = [moved(r, shape, dtype) for r in range(n)]
            root = (len(shape) + n - 1) % n
            for x in mine:
                y = x if rank == root else torch.empty_strided(x.size(), x.stride(), dtype=dtype)
                dist.broadcast(y, root)
                alike(y, every[root])
                outs = [torch.empty_strided(x.size(), x.stride(), dtype=dtype) for _ in range(n)]
                dist.all_gather(outs, x)
                for out, expected in zip(outs, every, strict=True):
                    alike(out, expected)
                outs = [torch.empty(shape, dtype=dtype) for _ in range(n)]
                dist.gather(x, outs if rank == root else None, root)
                if rank == root:
                    for out, expected in zip(outs, every, strict=True):
                        alike(out, expected)
                out = torch.empty_strided(x.size(), x.stride(), dtype=dtype)
                dist.scatter(out, [moved(r, shape, dtype) for r in range(n)] if rank == root else None, root)
                alike(out, every[rank])
                outs = [torch.empty(shape, dtype=dtype) for _ in range(n)]
                dist.all_to_all(outs, [moved(rank * n + r, shape, dtype) for r in range(n)])
                for r, out in enumerate(outs):
                    alike(out, moved(r * n + rank, shape, dtype))
                into = torch.empty(n, *shape, dtype=dtype)
                gather_into(into, x)
                for out, expected in zip(into, every, strict=True):
                    alike(out, expected)
            total = moved(rank, (2 * n, 3), dtype)
            into = torch.empty(2 * n, 3, dtype=dtype)
            dist.all_to_all_single(into, total)
            pieces = [moved(r, (2 * n, 3), dtype)[2 * rank : 2 * rank + 2] for r in range(n)]
            for r, piece in enumerate(pieces):
                alike(into[2 * r : 2 * r + 2], piece)
        # Row counts that differ from pair to pair: r + c rows from r to c, none on the diagonal of the even ranks.
        counts = [[0 if r == c and r % 2 == 0 else r + c for c in range(n)] for r in range(n)]
        x = moved(rank, (sum(counts[rank]), 2), dtype)
        out = torch.empty(sum(row[rank] for row in counts), 2, dtype=dtype)
        dist.all_to_all_single(out, x, [row[rank] for row in counts], counts[rank])
        sent = [moved(r, (sum(counts[r]), 2), dtype).split(counts[r])[rank] for r in range(n)]
        for piece, expected in zip(out.split([row[rank] for row in counts]), sent, strict=True):
            alike(piece, expected)


@pytest.mark.ranks(1, 2, 3, 4, backend="shm")
def test_what_is_reduced(ctx):
    n, rank = ctx.world_size, ctx.rank
    for dtype in [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8]:
        for name, op in OPS.items():
            if name == "avg" and not dtype.is_floating_point:
                continue
            for shape in SHAPES:
                data = [(small if name == "prod" else make)(r, shape, dtype) for r in range(n)]
                expected = reduce(name, data)
                for x in forms(data[rank]):
                    dist.all_reduce(x, op)
                    same(x, expected)
                root = (len(shape) + 1) % n
                for x in forms(data[rank]):
                    dist.reduce(x, root, op)
                    same(x, expected if rank == root else data[rank])
                blocks = [
                    [(small if name == "prod" else make)(r + s, shape, dtype) for s in range(n)] for r in range(n)
                ]
                out = strided(torch.zeros(shape, dtype=dtype))
                dist.reduce_scatter(out, blocks[rank], op)
                same(out, reduce(name, [blocks[r][rank] for r in range(n)]))
                if shape:
                    out = torch.empty(shape, dtype=dtype)
                    scatter_from(out, torch.cat(blocks[rank]), op)
                    same(out, reduce(name, [blocks[r][rank] for r in range(n)]))


@pytest.mark.ranks(2, 3, 4, backend="shm")
def test_long_tensors(ctx):
    """Sizes around and beyond one slot, that no chunk divides."""
    n, rank = ctx.world_size, ctx.rank
    for numel in (SLOT // 4 - 1, SLOT // 4, SLOT // 4 + 1, 3 * SLOT // 4 + 5, 6 * SLOT // 4 + 7):
        x = make(rank, (numel,), torch.float32)
        expected = reduce("sum", [make(r, (numel,), torch.float32) for r in range(n)])
        dist.all_reduce(x)
        same(x, expected)
        x = make(rank, (numel,), torch.float32)
        dist.reduce(x, n - 1)
        same(x, expected if rank == n - 1 else make(rank, (numel,), torch.float32))
        dist.broadcast(x, n - 1)
        same(x, expected)
        out = torch.empty(numel)
        dist.reduce_scatter(out, [make(rank + s, (numel,), torch.float32) for s in range(n)])
        same(out, reduce("sum", [make(r + rank, (numel,), torch.float32) for r in range(n)]))
        outs = [torch.empty(numel) for _ in range(n)]
        dist.all_gather(outs, out)
        same(outs[rank], out)
        outs = [torch.empty(numel) for _ in range(n)]
        dist.all_to_all(outs, [make(rank * n + s, (numel,), torch.float32) for s in range(n)])
        for r in range(n):
            same(outs[r], make(r * n + rank, (numel,), torch.float32))
        dist.gather(x, outs if rank == 0 else None, 0)
        dist.scatter(x, outs if rank == 0 else None, 0)
        same(x, expected)


@pytest.mark.ranks(2, 3, backend="shm")
def test_all_operations(ctx):
    n, rank = ctx.world_size, ctx.rank
    for dtype in (torch.int32, torch.uint8, torch.bool):
        data = [make(r, (7,), dtype) for r in range(n)]
        for op, function in {
            dist.ReduceOp.BAND: torch.bitwise_and,
            dist.ReduceOp.BOR: torch.bitwise_or,
            dist.ReduceOp.BXOR: torch.bitwise_xor,
        }.items():
            x = data[rank].clone()
            dist.all_reduce(x, op)
            expected = data[0]
            for other in data[1:]:
                expected = function(expected, other)
            same(x, expected)
    x = torch.tensor([True, rank == 0, False])
    dist.all_reduce(x)  # a sum of bools is "or"
    assert x.tolist() == [True, True, False]
    x = torch.tensor([-7 - rank, 8])
    dist.all_reduce(x, dist.ReduceOp.AVG)  # cut off towards zero
    assert x.tolist() == [int(sum(-7 - r for r in range(n)) / n), 8]
    for dtype in (torch.uint16, torch.uint32):  # torch cannot compute with them
        top = torch.iinfo(dtype).max
        x = torch.tensor([rank, top - rank]).to(dtype)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert x.tolist() == [n - 1, top]
        x = torch.tensor([rank + 1, top]).to(dtype)
        dist.all_reduce(x)
        assert x.tolist() == [n * (n + 1) // 2, (top * n) % (top + 1)]
    x = torch.tensor([1.0, 2.0 * rank], dtype=torch.float8_e4m3fn)
    dist.all_reduce(x)
    assert x.float().tolist() == [n, n * (n - 1)]
    half = dist._make_nccl_premul_sum(0.5)
    x = make(rank, (5,), torch.float32)
    dist.all_reduce(x, half)
    same(x, reduce("sum", [make(r, (5,), torch.float32) for r in range(n)]) / 2)
    out, pieces = torch.empty(5), [make(rank + s, (5,), torch.float32) for s in range(n)]
    dist.reduce_scatter(out, pieces, half)
    same(out, reduce("sum", [make(r + rank, (5,), torch.float32) for r in range(n)]) / 2)
    same(pieces[0], make(rank, (5,), torch.float32))  # inputs are not touched
    z = torch.complex(torch.tensor([1.0, rank]), torch.tensor([2.0, -rank]))
    dist.all_reduce(z)
    assert z.tolist() == [complex(n, 2 * n), complex(n * (n - 1) / 2, -n * (n - 1) / 2)]
    for op, x in [(dist.ReduceOp.BOR, torch.ones(2)), (dist.ReduceOp.AVG, torch.tensor([True]))]:
        with pytest.raises(ValueError, match=r"all_reduce: op=.* is not defined on torch"):
            dist.all_reduce(x, op)


@pytest.mark.ranks(2, 3, 4, backend="shm")
def test_halves_are_summed_in_float32(ctx):
    """In bfloat16 one step at a time, 256 + 1 + 1 + 1 would stay 256."""
    x = torch.full((3,), 256.0 if ctx.rank == 0 else 1.0, dtype=torch.bfloat16)
    dist.all_reduce(x)
    expected = torch.tensor(256.0 + ctx.world_size - 1).to(torch.bfloat16)
    assert x.tolist() == [expected.item()] * 3
    if ctx.world_size > 2:
        assert expected > 256
    y = torch.full((3,), 60000.0, dtype=torch.float16)  # the sum does not fit, the mean does
    dist.all_reduce(y, dist.ReduceOp.AVG)
    assert y.tolist() == [torch.tensor(60000.0).half().item()] * 3


def noise(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)


def sums_of_noise(ctx, sizes):
    out = []
    for numel in sizes:
        x = noise(ctx.rank, numel)
        dist.all_reduce(x)
        piece = torch.empty(numel)
        dist.reduce_scatter(piece, [noise(ctx.rank, numel) for _ in range(ctx.world_size)])
        y = noise(ctx.rank, numel)
        dist.reduce(y, 0)
        out.append((x, piece, y if ctx.rank == 0 else x))
    return out


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reductions_are_bitwise_equal_on_all_ranks_and_in_all_sizes(shm, world_size):
    sizes = [1, 33, 9000, 65_536, 65_537, 300_000]
    results = shm(sums_of_noise, sizes, world_size=world_size)
    for index, numel in enumerate(sizes):
        expected = noise(0, numel)
        for rank in range(1, world_size):
            expected = expected + noise(rank, numel)  # in rank order
        for rank in range(world_size):
            assert all(torch.equal(found, expected) for found in results[rank][index])


@pytest.mark.ranks(3, backend="shm")
def test_coalesced_calls(ctx):
    n, rank = ctx.world_size, ctx.rank
    xs = [make(rank, (k + 1, 2), torch.float32) for k in range(3)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for k, x in enumerate(xs):
        same(x, reduce("sum", [make(r, (k + 1, 2), torch.float32) for r in range(n)]))
    outs = [torch.empty(n * (k + 1)) for k in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for k, out in enumerate(outs):
            gather_into(out, make(rank, (k + 1,), torch.float32))
    manager.wait()
    for k, out in enumerate(outs):
        same(out, torch.cat([make(r, (k + 1,), torch.float32) for r in range(n)]))
    outs = [torch.empty(k + 1) for k in range(3)]
    with dist._coalescing_manager():
        for k, out in enumerate(outs):
            scatter_from(out, make(rank, (n * (k + 1),), torch.float32))
    for k, out in enumerate(outs):
        whole = reduce("sum", [make(r, (n * (k + 1),), torch.float32) for r in range(n)])
        same(out, whole.chunk(n)[rank])


@pytest.mark.ranks(2, 3, backend="shm")
def test_functional_collectives(ctx):
    n, rank, group = ctx.world_size, ctx.rank, dist.group.WORLD
    x = make(rank, (2 * n, 3), torch.float32)
    every = [make(r, (2 * n, 3), torch.float32) for r in range(n)]
    total = reduce("sum", every)
    results = [
        (fc.all_reduce(x, "sum", group), total),
        (fc.all_gather_tensor(x, 0, group), torch.cat(every)),
        (fc.all_gather_tensor(x, 1, group), torch.cat(every, 1)),
        (fc.reduce_scatter_tensor(x, "sum", 0, group), total.chunk(n)[rank]),
        (fc.broadcast(x, n - 1, group), every[-1]),
        (fc.all_to_all_single(x, None, None, group), torch.cat([e[2 * rank : 2 * rank + 2] for e in every])),
    ]
    results += list(
        zip(
            fc.all_reduce_coalesced([x, x + 1], "sum", group),
            [total, reduce("sum", [e + 1 for e in every])],
            strict=True,
        )
    )
    results += list(zip(fc.all_gather_into_tensor_coalesced([x, 2 * x], group), [torch.cat(every)] * 2, strict=True))[
        :1
    ]
    results += [
        (fc.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group)[1], total.chunk(n)[rank]),
        (fc.permute_tensor(x.view(-1), [(r + 1) % n for r in range(n)], group), every[rank - 1].view(-1)),
    ]
    for found, expected in reversed(results):  # waited for in another order than issued
        same(found + 0, expected)
    same(x, every[rank])
    leaf = x.clone().requires_grad_()
    out = fc.all_gather_tensor_autograd(leaf, 0, group)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    weights = torch.arange(out.numel(), dtype=torch.float32).view_as(out)
    same(leaf.grad, n * weights.chunk(n)[rank])


@pytest.mark.ranks(3, backend="shm")
def test_objects(ctx):
    n, rank = ctx.world_size, ctx.rank
    mine = {"rank": rank, "data": "x" * (rank * 70_000)}
    everybody = [{"rank": r, "data": "x" * (r * 70_000)} for r in range(n)]
    out = [None] * n
    dist.all_gather_object(out, mine)
    assert out == everybody
    dist.gather_object(mine, out if rank == 1 else None, 1)
    assert out == everybody
    box = [mine, rank]
    dist.broadcast_object_list(box, n - 1)
    assert box == [everybody[-1], n - 1]
    box = [None]
    dist.scatter_object_list(box, everybody if rank == 0 else None, 0)
    assert box == [everybody[rank]]
    if rank == 0:
        dist.send_object_list([mine, "last"], 1)
    elif rank == 1:
        box = [None, None]
        assert dist.recv_object_list(box, 0) == 0
        assert box == [everybody[0], "last"]
    dist.barrier()


@pytest.mark.ranks(2, backend="shm")
def test_wrong_arguments_are_refused_before_anything_moves(ctx):
    n = ctx.world_size
    for text, call in {
        "1 tensors for 2 ranks": lambda: dist.distributed_c10d._get_default_group().allgather(
            [[torch.ones(2)]], [torch.ones(2)]
        ),
        "tensor 0 is torch.float32 .3,.*make them equal": lambda: dist.all_gather([torch.ones(3)] * n, torch.ones(2)),
        "output must be 2 times the input": lambda: gather_into(torch.ones(3), torch.ones(2)),
        "input must be 2 times the output": lambda: scatter_from(torch.ones(2), torch.ones(3)),
        "3 rows of the output, which 2 ranks do not divide": lambda: dist.all_to_all_single(
            torch.ones(3), torch.ones(3)
        ),
        "input splits .1, 1. for 3 rows": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 1]),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()
    x = torch.ones(2)
    dist.all_reduce(x)  # nothing was begun by any of them
    assert x.tolist() == [2, 2]
