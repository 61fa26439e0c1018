"""Units of sharded parameters by themselves: sizes, dtypes, freed storage, autograd through it, and reductions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crosscut.comm.launch import spawn
from crosscut.layout.plan import own_rows
from crosscut.parallel.shard import Member, Unit, collect, rows_of, spread

SHAPES = [(4, 3), (5, 2), (1, 7), (3,), (2, 2, 3), (7,)]  # with 4 ranks: even, uneven, ranks without a row
SIZES = [1, 2, 3, 4]


def value(shape, dtype=torch.float64, scale=1.0):
    """Every number another."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).add(1 + 100 * len(shape)).mul(scale).view(shape)).to(dtype)


def make_unit(ctx, *, whole, dtype=torch.float64, compute=None, **options):
    holder = nn.Module()
    members = []
    for i, shape in enumerate(SHAPES):
        p = nn.Parameter(value(shape, dtype, 1 + i))
        holder.register_parameter(f"p{i}", p)
        owners = ((holder, f"p{i}"),)
        if whole:
            members.append(Member(f"p{i}", whole=p, owners=owners))
        else:
            rows = rows_of(p, ctx.world)
            members.append(Member(f"p{i}", rows=rows, shape=tuple(p.shape), owners=owners))
    return holder, Unit(members, ctx.world, compute=compute, **options)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("rows", range(8))
def test_rows_are_cut_as_torch_chunk_cuts_them(rows, count):
    pieces = [list(range(rows))[slice(*own_rows(rows, i, count))] for i in range(count)]
    chunks = [c.tolist() for c in torch.arange(rows).chunk(count)] if rows else []
    assert [p for p in pieces if p] == [c for c in chunks if c]
    assert len(pieces) == count


@pytest.mark.parametrize("count", SIZES)
def test_spread_and_collect_are_inverse_and_pad_with_zeros(count):
    for shape in [*SHAPES, (0, 3), (3, 0)]:
        whole = value(shape)
        width = own_rows(shape[0], 0, count)[1] * torch.Size(shape[1:]).numel()
        chunks = torch.full((count, width), float("nan"), dtype=torch.float64)
        spread(whole, chunks)
        for i in range(count):
            own = whole[slice(*own_rows(shape[0], i, count))].reshape(-1)
            assert torch.equal(chunks[i, : own.numel()], own)
            assert not chunks[i, own.numel() :].any()
        for out in (torch.full_like(whole, -1), torch.full_like(whole, -1).transpose(0, -1).clone().transpose(0, -1)):
            collect(chunks, out)
            assert torch.equal(out, whole)
        spread(None, chunks)
        assert not chunks.any()


def gather_and_release(ctx, whole):
    holder, unit = make_unit(ctx, whole=whole)
    nbytes = sum(p.numel() for p in holder.parameters()) * 8
    if not whole:
        unit.release()
        assert unit._whole.untyped_storage().nbytes() == 0
        assert [tuple(p.shape[1:]) for p in holder.parameters()] == [s[1:] for s in SHAPES]
        assert sum(p.numel() for p in holder.parameters()) <= unit.width
    with torch.no_grad():
        for p in unit.pieces:
            p.shard.mul_(2)  # what an optimizer does, each rank to its own rows
    unit.shards_changed()
    assert (unit.changed() is not None) == whole
    unit.start_gather("x")
    unit.gather("x")
    assert unit.changed() is None
    for i, p in enumerate(holder.parameters()):
        assert torch.equal(p, 2 * value(SHAPES[i], scale=1 + i))
    if not whole:
        assert unit._whole.untyped_storage().nbytes() == nbytes
        unit.start_gather()  # nothing: it is there
        unit.release()
        assert unit._whole.untyped_storage().nbytes() == 0
        unit.start_gather("prefetched, and not used")
        unit.release()
    return ctx.ledger.totals()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("whole", [True, False])
def test_gather_gives_all_ranks_rows_and_release_frees_them(size, whole):
    padded = sum(size * own_rows(s[0], 0, size)[1] * torch.Size(s[1:]).numel() for s in SHAPES) * 8
    for counted in spawn(gather_and_release, whole, world_size=size, backend="threads"):
        assert counted == ({} if size == 1 else {"world": {"all_gather": padded * (1 if whole else 2)}})


def reduce(ctx, whole, average):
    holder, unit = make_unit(ctx, whole=whole, average=average)
    for turn in range(2):  # two micro-batches add up
        unit.release()
        unit.gather()
        for i, p in enumerate(holder.parameters()):
            if (i, turn) != (4, 1) and i != 5:  # one gets a gradient once, one never
                p.grad = value(SHAPES[i]) * (ctx.rank + 1) * (turn + 1)
        unit.start_reduce("g")
        assert all(p.whole.grad is None for p in unit.pieces)
        unit.finish_reduce()
    unit.publish()
    total = sum(r + 1 for r in range(ctx.world_size)) / (ctx.world_size if average else 1)
    for i, p in enumerate(unit.pieces):
        want = value(SHAPES[i]) * total * (0 if i == 5 else 1 if i == 4 else 3)
        first, last = own_rows(SHAPES[i][0], ctx.rank, ctx.world_size)
        assert p.shard.grad.shape == p.shard.shape
        torch.testing.assert_close(p.shard.grad, want[first:last], rtol=1e-15, atol=0)


def one_parameter(ctx, rows):
    holder = nn.Module()
    holder.w = nn.Parameter(value((rows, 3)))
    member = Member("w", rows=rows_of(holder.w, ctx.world), shape=(rows, 3), owners=((holder, "w"),))
    unit = Unit([member], ctx.world)
    for _ in range(2):
        unit.start_gather()
        unit.gather()
        assert torch.equal(holder.w, value((rows, 3)))
        holder.w.grad = value((rows, 3)) * (ctx.rank + 1)
        unit.release()
        assert unit._whole.untyped_storage().nbytes() == 0
        unit.start_reduce()
        unit.finish_reduce()
    unit.publish()
    total = 2 * sum(range(1, ctx.world_size + 1))
    assert torch.equal(holder.w.grad, rows_of(value((rows, 3)), ctx.world) * total)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [12, 7])
def test_a_unit_of_one_parameter(size, rows):
    """Where it divides, it is gathered into the storage itself, and its gradient is sent as it is."""
    spawn(one_parameter, rows, world_size=size, backend="threads")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_reduced_gradients_are_the_sum_of_all_ranks_and_micro_batches(size, whole, average):
    spawn(reduce, whole, average, world_size=size, backend="threads")


def mixed(ctx):
    """fp32 shards computed with in fp16, gradients reduced in fp32."""
    holder, unit = make_unit(ctx, whole=False, dtype=torch.float32, compute=torch.float16, reduce=torch.float32)
    unit.release()
    assert all(p.dtype == torch.float32 for p in holder.parameters())
    unit.gather()
    for i, p in enumerate(holder.parameters()):
        assert torch.equal(p, value(SHAPES[i], torch.float16, 1 + i))
        # The sum over ranks has bits that fp16 does not: 2048 and 1.
        p.grad = torch.full_like(p, 2048.0 if ctx.rank == 0 else 1.0)
    unit.start_reduce()
    unit.finish_reduce()
    unit.publish()
    for p in unit.pieces:
        assert p.shard.grad.dtype == torch.float32
        assert torch.equal(p.shard.grad, torch.full_like(p.shard, 2049.0))
    ops = ctx.ledger.totals()["world"]
    return ops["all_gather"] * 2 == ops["reduce_scatter"]  # half as wide on the wire


def test_shards_are_cast_before_they_are_sent_and_gradients_summed_wide():
    assert all(spawn(mixed, world_size=2, backend="threads"))


def through_freed_storage(ctx):
    """Forward, free, fill again, backward: autograd saved views of the storage and computes with the same numbers."""
    torch.manual_seed(3)
    layer = nn.Linear(5, 7, dtype=torch.float64)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    members = [
        Member(n, rows=rows_of(p, ctx.world), shape=tuple(p.shape), owners=((layer, n),))
        for n, p in layer.named_parameters()
    ]
    unit = Unit(members, ctx.world)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    unit.gather()
    y = layer(x).tanh()
    unit.release()
    assert unit._whole.untyped_storage().nbytes() == 0
    assert layer.weight.size(0) == rows_of(weight, ctx.world).size(0)
    unit.gather()
    y.sum().backward()
    wholes = [p.whole.grad for p in unit.pieces]
    x_grad, x.grad = x.grad, None
    w, b = weight.requires_grad_(), bias.requires_grad_()
    F.linear(x, w, b).tanh().sum().backward()
    assert torch.equal(x_grad, x.grad)
    assert torch.equal(wholes[0], w.grad)
    assert torch.equal(wholes[1], b.grad)


@pytest.mark.parametrize("size", SIZES)
def test_backward_goes_through_storage_that_was_freed_and_filled_again(size):
    spawn(through_freed_storage, world_size=size, backend="threads")
