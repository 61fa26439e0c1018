"""The way in and out of every algorithm: the checks of a `Group`'s call, flat tensors to work on, and the result.

Reductions accumulate as on the other back ends: fp16 and bf16 travel and add up in fp32 and are rounded once at the
end (so a message has twice the bytes), int16 in int32, `avg` divides the sum (see `crosscut.comm.dtypes`). Whatever
only moves keeps its dtype. A group of one rank sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from crosscut.comm import checks
from crosscut.comm.algorithms.wire import Wire
from crosscut.comm.dtypes import flat, from_wire, to_wire
from crosscut.comm.group import Group
from crosscut.comm.group_base import copy_back, new_copy

Tensor = torch.Tensor


def _wire(group: Group, op: str, name: str, tag: str, kind: str) -> Wire:
    checks.kind(f"{op} over {group.label}", kind)
    return Wire(group, tag or f"{op}/{name}", kind)


def all_reduce(
    name: str, group: Group, x: Tensor, op: str, tag: str, kind: str, steps: Callable[[Wire, Tensor], None]
) -> Tensor:
    """In place. `steps(wire, x)` reduces the flat `x`."""
    group._check("all_reduce", x, op=op)
    if group.size == 1:
        return x
    wire_x = to_wire(x, widen=True)
    steps(_wire(group, "all_reduce", name, tag, kind), wire_x)
    return group._store(x, wire_x, op)


def reduce(
    name: str, group: Group, x: Tensor, dst: int, op: str, tag: str, kind: str, steps: Callable[[Wire, Tensor], None]
) -> Tensor:
    """In place at `dst`. `steps(wire, x)` reduces there and may use `x` as it likes elsewhere."""
    group._check("reduce", x, op=op, root=dst, root_name="dst")
    if group.size == 1:
        return x
    at_dst = group.rank == dst
    wire_x = to_wire(x, widen=True, copy=not at_dst)
    steps(_wire(group, "reduce", name, tag, kind), wire_x)
    return group._store(x, wire_x, op) if at_dst else x


def reduce_scatter(
    name: str,
    group: Group,
    x: Tensor,
    dim: int,
    op: str,
    tag: str,
    kind: str,
    steps: Callable[[Wire, Tensor], Tensor],
) -> Tensor:
    """A new tensor. `steps(wire, pieces)` takes (size, piece), its own to change, and returns this rank's piece."""
    group._check("reduce_scatter", x, op=op)
    where = f"reduce_scatter over {group.label}"
    dim = checks.dim(where, x, dim)
    checks.divides(where, x, dim, group.size)
    if group.size == 1:
        return new_copy(x)
    pieces = x.detach().unflatten(dim, (group.size, x.shape[dim] // group.size)).movedim(dim, 0)
    shape = tuple(pieces.shape[1:])
    wire_x = to_wire(pieces, widen=True, copy=True)
    wire = _wire(group, "reduce_scatter", name, tag, kind)
    piece = steps(wire, wire_x.view(group.size, wire_x.numel() // group.size))
    return from_wire(piece.clone(), x.dtype, shape, op, group.size)  # a clone: the other pieces are scratch


def all_gather(
    name: str, group: Group, x: Tensor, dim: int, tag: str, kind: str, steps: Callable[[Wire, Tensor], None]
) -> Tensor:
    """A new tensor. `steps(wire, blocks)` fills (size, block), of which row `rank` is there."""
    group._check("all_gather", x)
    dim = checks.dim(f"all_gather over {group.label}", x.view(1) if x.dim() == 0 else x, dim)
    shape = tuple(x.shape) or (1,)
    if group.size == 1:
        return new_copy(x).view(shape)
    own = flat(x)
    blocks = own.new_empty(group.size, own.numel())
    blocks[group.rank] = own
    steps(_wire(group, "all_gather", name, tag, kind), blocks)
    if dim == 0:
        return blocks.view(group.size * shape[0], *shape[1:])
    return torch.cat(blocks.view(group.size, *shape).unbind(0), dim)


def all_to_all(
    name: str,
    group: Group,
    x: Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    tag: str,
    kind: str,
    steps: Callable[[Wire, list[Tensor], list[Tensor]], None],
) -> Tensor:
    """A new tensor. `steps(wire, ins, outs)`: ins[j] goes to rank j, outs[i] is filled by rank i (both flat)."""
    group._check("all_to_all", x)
    where = f"all_to_all over {group.label}"
    in_rows, out_rows = checks.splits(where, x, input_splits, output_splits, group.size, group.rank)
    if group.size == 1:
        return new_copy(x)
    own = flat(x)
    row = 1
    for extent in x.shape[1:]:
        row *= extent
    out = own.new_empty(sum(out_rows) * row)
    ins = list(own.split([n * row for n in in_rows]))
    outs = list(out.split([n * row for n in out_rows]))
    steps(_wire(group, "all_to_all", name, tag, kind), ins, outs)
    return out.view(sum(out_rows), *x.shape[1:])


def broadcast(
    name: str, group: Group, x: Tensor, src: int, tag: str, kind: str, steps: Callable[[Wire, Tensor], None]
) -> Tensor:
    """In place. `steps(wire, x)` fills the flat `x` everywhere but at `src`."""
    group._check("broadcast", x, root=src, root_name="src")
    if group.size == 1:
        return x
    wire_x = flat(x)
    steps(_wire(group, "broadcast", name, tag, kind), wire_x)
    return x if group.rank == src else copy_back(x, wire_x)


def gather(
    name: str, group: Group, x: Tensor, dst: int, tag: str, kind: str, steps: Callable[[Wire, Tensor], Tensor | None]
) -> list[Tensor] | None:
    """A list of new tensors at `dst`, None elsewhere. `steps(wire, x)` returns (size, block) in rank order at `dst`."""
    group._check("gather", x, root=dst, root_name="dst")
    if group.size == 1:
        return [new_copy(x)]
    blocks = steps(_wire(group, "gather", name, tag, kind), flat(x))
    return None if blocks is None else list(blocks.view(group.size, *x.shape).unbind(0))


def scatter(
    name: str,
    group: Group,
    parts: Sequence[Tensor] | None,
    src: int,
    out: Tensor,
    tag: str,
    kind: str,
    steps: Callable[[Wire, Tensor | None, Tensor], None],
) -> Tensor:
    """In place in `out`. `steps(wire, blocks, out)`: blocks is (size, block) in rank order at `src`, None elsewhere."""
    group._check("scatter", out, root=src, root_name="src")
    at_src = group.rank == src
    checks.parts(f"scatter over {group.label}", parts, out, group.size, at_src)
    whole = torch.stack([flat(part) for part in parts]) if parts is not None else None
    wire_out = flat(out)
    if group.size == 1:
        assert whole is not None
        wire_out.copy_(whole[0])
    else:
        steps(_wire(group, "scatter", name, tag, kind), whole, wire_out)
    return copy_back(out, wire_out)
