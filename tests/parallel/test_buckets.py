"""Gradients that are summed where they are, instead of in a bucket."""

import pytest
import torch
from torch import nn

import crosscut as cc
from crosscut.parallel.data import BucketReducer, Owed


def shares_memory(ctx):
    """Two gradients that are views of a third, which somebody keeps."""
    a, b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(1, 2))
    reducer = BucketReducer([Owed("a", a, ctx.world), Owed("b", b, ctx.world)], 1)
    assert [bucket.flat for bucket in reducer.buckets] == [None, None]
    both, kept = torch.cat([a, b]), []
    both.register_hook(kept.append)
    reducer.last_backward()
    (both * (ctx.rank + 1)).sum().backward()
    reducer.finish()
    return a.grad[0, 0].item(), b.grad[0, 0].item(), kept[0][0, 0].item()


def strided(ctx):
    """A gradient whose rows do not lie one after another, and one that this rank does not have."""
    a, b = nn.Parameter(torch.ones(4, 3).t()), nn.Parameter(torch.ones(2))
    reducer = BucketReducer([Owed("a", a, ctx.world), Owed("b", b, ctx.world)], 1)
    reducer.last_backward()
    x = torch.arange(12.0).view(3, 4) + ctx.rank
    loss = (a * x).sum() + (b.sum() * 5 if ctx.rank == 0 else 0)
    loss.backward()
    reducer.finish()
    n = ctx.world_size
    assert torch.equal(a.grad, n * torch.arange(12.0).view(3, 4) + n * (n - 1) / 2)
    return b.grad.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_a_large_gradient_is_summed_where_it_is(size):
    total = size * (size + 1) / 2
    found = cc.spawn(shares_memory, world_size=size, backend="threads")
    assert found == [(total, total, rank + 1) for rank in range(size)]
    assert cc.spawn(strided, world_size=size, backend="threads") == [[5.0, 5.0]] * size
