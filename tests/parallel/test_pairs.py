"""Each autograd pair against its definition: forward value and input gradient, on 1 to 4 ranks, along several dims."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crosscut.comm import pairs
from crosscut.comm.context import Context
from crosscut.comm.launch import spawn

WORLDS = (1, 2, 3, 4)


def value(rank: int, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """Position- and rank-dependent, exact in fp64."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) * (rank + 2) + 100 * rank + salt).reshape(shape)


def run(ctx: Context, fn, shape: tuple[int, ...], out_shape: tuple[int, ...], replicated: str):  # type: ignore
    """(output, gradient of the input) for the gradient `value(rank, out_shape, 7)` of the output; rank 0's if the
    input or the gradient is replicated."""
    x = value(0 if replicated == "x" else ctx.rank, shape).requires_grad_()
    y = fn(x * 1.0, ctx.world)
    assert tuple(y.shape) == out_shape, (tuple(y.shape), out_shape)
    y.backward(value(0 if replicated == "grad" else ctx.rank, out_shape, 7))
    return y.detach().clone(), x.grad.clone()


@pytest.mark.parametrize("n", WORLDS)
def test_enter(n: int) -> None:
    out = spawn(run, pairs.enter, (3, 4), (3, 4), "x", world_size=n, backend="threads")
    total = sum(value(r, (3, 4), 7) for r in range(n))
    for y, grad in out:
        assert torch.equal(y, value(0, (3, 4)))
        assert torch.equal(grad, total)


@pytest.mark.parametrize("n", WORLDS)
def test_leave(n: int) -> None:
    out = spawn(run, pairs.leave, (3, 4), (3, 4), "grad", world_size=n, backend="threads")
    for y, grad in out:
        assert torch.equal(y, sum(value(r, (3, 4)) for r in range(n)))
        assert torch.equal(grad, value(0, (3, 4), 7))


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("dim", (0, 1, -1))
def test_gather_then_cut(n: int, dim: int) -> None:
    shape = (2, 3, 2)
    whole = list(shape)
    whole[dim] *= n
    out = spawn(run, lambda x, g: pairs.gather(x, g, dim), shape, tuple(whole), "", world_size=n, backend="threads")
    total = sum(value(r, tuple(whole), 7) for r in range(n))
    for rank, (y, grad) in enumerate(out):
        assert torch.equal(y, torch.cat([value(r, shape) for r in range(n)], dim))
        assert torch.equal(grad, total.chunk(n, dim)[rank])


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("dim", (0, 1, -1))
def test_gather_then_replicated(n: int, dim: int) -> None:
    shape = (2, 3, 2)
    whole = list(shape)
    whole[dim] *= n
    out = spawn(
        run,
        lambda x, g: pairs.gather(x, g, dim, then="replicated"),
        shape,
        tuple(whole),
        "grad",
        world_size=n,
        backend="threads",
    )
    for rank, (y, grad) in enumerate(out):
        assert torch.equal(y, torch.cat([value(r, shape) for r in range(n)], dim))
        assert torch.equal(grad, value(0, tuple(whole), 7).chunk(n, dim)[rank])


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("dim", (0, 1, -1))
def test_scatter_sum(n: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] *= n
    out = spawn(
        run, lambda x, g: pairs.scatter_sum(x, g, dim), tuple(shape), (2, 3, 2), "", world_size=n, backend="threads"
    )
    total = sum(value(r, tuple(shape)) for r in range(n))
    for rank, (y, grad) in enumerate(out):
        assert torch.equal(y, total.chunk(n, dim)[rank])
        assert torch.equal(grad, torch.cat([value(r, (2, 3, 2), 7) for r in range(n)], dim))


@pytest.mark.parametrize("n", WORLDS)
def test_slice(n: int) -> None:
    out = spawn(run, lambda x, g: pairs.slice_own(x, g, 1), (2, 12), (2, 12 // n), "x", world_size=n, backend="threads")
    for rank, (y, grad) in enumerate(out):
        assert torch.equal(y, value(0, (2, 12)).chunk(n, 1)[rank])
        want = torch.zeros(2, 12, dtype=torch.float64)
        want.chunk(n, 1)[rank].copy_(value(rank, (2, 12 // n), 7))
        assert torch.equal(grad, want)


def test_slice_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="cannot be cut over world=2"):
        spawn(run, lambda x, g: pairs.slice_own(x, g, 1), (2, 5), (2, 2), "x", world_size=2, backend="threads")


def _expanded(ctx: Context):  # type: ignore[no-untyped-def]
    """Gradients that are expanded, transposed or strided views must be summed like any other."""
    grads = []
    for reduce in (lambda y: y.sum(), lambda y: y.t().sum(), lambda y: y[:, ::2].sum()):
        x = value(ctx.rank, (2, 3)).requires_grad_()
        reduce(pairs.gather(x, ctx.world, 0)).backward()
        grads.append(x.grad)
    return grads


def test_gradients_that_are_views() -> None:
    for plain, transposed, strided in spawn(_expanded, world_size=2, backend="threads"):
        assert torch.equal(plain, torch.full((2, 3), 2.0, dtype=torch.float64))
        assert torch.equal(transposed, plain)
        assert torch.equal(strided, plain * torch.tensor([1.0, 0.0, 1.0]))


def _shared_gradient(ctx: Context) -> Tensor:
    """A residual branch beside `enter` gets the same gradient object: the sum must not leak into it."""
    x = value(0, (4,)).requires_grad_()
    (x * 1.0 + pairs.enter(x * 1.0, ctx.world)).backward(torch.ones(4, dtype=torch.float64))
    return x.grad


def test_enter_leaves_the_other_branch_alone() -> None:
    for grad in spawn(_shared_gradient, world_size=3, backend="threads"):
        assert torch.equal(grad, torch.full((4,), 4.0, dtype=torch.float64))  # 1 of the residual + 3 of the sum


def _leave_in_place(ctx: Context) -> Tensor:
    """`leave` writes into its input; a graph that still needs the unsummed value must be refused, not be wrong."""
    x = value(ctx.rank, (4,)).requires_grad_()
    squashed = torch.tanh(x)  # tanh keeps its output for backward
    pairs.leave(squashed, ctx.world).sum().backward()
    return x.grad


def test_leave_after_something_that_keeps_its_output_is_refused() -> None:
    with pytest.raises(Exception, match="modified by an inplace operation"):
        spawn(_leave_in_place, world_size=2, backend="threads")
