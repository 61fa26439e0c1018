"""Autograd pairs: a collective in forward and the one that it owes in backward, named for what they do.

===================  ============================  ==================================================
pair                 forward                       backward
===================  ============================  ==================================================
enter                identity                      all_reduce of the gradient
leave                all_reduce                    identity
gather               all_gather along a dim        reduce_scatter along it   (then="cut")
gather_replicated    all_gather along a dim        this rank's own slice     (then="replicated")
scatter_sum          reduce_scatter along a dim    all_gather along it
slice_own            this rank's own slice         nothing: the gradient is partial before it
===================  ============================  ==================================================

`leave` and `gather_replicated` are not the mathematical transposes of their forward: they rely on the gradient being
the same on every rank of the group, which holds where their output is replicated. A placement checker
(layout/placements.py) refuses, before anything runs, a layout in which it would not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crosscut.comm.group import Group


def enter(x: Tensor, group: Group, tag: str = "") -> Tensor:
    """Begin a region whose ranks hold different columns of the weights that read x (replicated)."""
    return _Enter.apply(x, group, tag) if group.size > 1 else x


def leave(x: Tensor, group: Group, tag: str = "") -> Tensor:
    """End a region: the ranks' partial sums x become their sum, replicated."""
    return _Leave.apply(x, group, tag) if group.size > 1 else x


def gather(x: Tensor, group: Group, dim: int, tag: str = "", back_tag: str = "", *, then: str = "cut") -> Tensor:
    """Concatenate the ranks' slices along `dim`.

    then="cut": what follows makes a partial gradient on each rank, which is summed and cut again (reduce_scatter).
    then="replicated": what follows is the same on every rank, and so is its gradient: each takes its own slice.
    """
    if then not in ("cut", "replicated"):
        raise ValueError(f"gather(then={then!r}): use 'cut' or 'replicated'")
    if group.size == 1:
        return x
    return (_Gather if then == "cut" else _GatherReplicated).apply(x, group, dim, tag, back_tag)


def scatter_sum(x: Tensor, group: Group, dim: int, tag: str = "", back_tag: str = "") -> Tensor:
    """Sum the ranks' partial x and keep this rank's slice of the sum along `dim`."""
    return _ScatterSum.apply(x, group, dim, tag, back_tag) if group.size > 1 else x


def slice_own(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice along `dim` of a replicated x. Its gradient is zero outside the slice: partial, sum it
    later."""
    return own_slice(x, group, dim) if group.size > 1 else x


def own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """The group.rank-th of group.size equal slices along `dim` (a view)."""
    width, rest = divmod(x.size(dim), group.size)
    if rest:
        raise ValueError(
            f"dim {dim} of size {x.size(dim)} cannot be cut over {group.label}={group.size}: not divisible"
        )
    return x.narrow(dim, group.rank * width, width)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, tag: str) -> Tensor:
        ctx.group, ctx.tag = group, tag
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # A copy: the incoming gradient may be shared with another branch (both inputs of an addition get the same one).
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format), tag=ctx.tag), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, tag: str) -> Tensor:
        if x.is_leaf or x._is_view() or not x.is_contiguous():
            return group.all_reduce(x.clone(memory_format=torch.contiguous_format), tag=tag)
        ctx.mark_dirty(x)  # in place: autograd refuses, by version, a graph that still needs the unsummed value
        return group.all_reduce(x, tag=tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, tag: str, back_tag: str) -> Tensor:
        ctx.group, ctx.dim, ctx.tag = group, dim, back_tag
        return group.all_gather(x, dim, tag=tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.group.reduce_scatter(grad, ctx.dim, tag=ctx.tag), None, None, None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, tag: str, back_tag: str) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x, dim, tag=tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return own_slice(grad, ctx.group, ctx.dim).contiguous(), None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, tag: str, back_tag: str) -> Tensor:
        ctx.group, ctx.dim, ctx.tag = group, dim, back_tag
        return group.reduce_scatter(x, dim, tag=tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.group.all_gather(grad, ctx.dim, tag=ctx.tag), None, None, None, None
