"""What can be wrong with a call on one rank alone, said before any data moves. All raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crosscut.comm.dtypes import dtype_name


def kind(where: str, value: str) -> None:
    """`kind` is one of the ledger's two."""
    if value not in ("step", "control"):
        raise ValueError(f"{where}: kind={value!r} is unknown; use 'step' or 'control'")


def tensor(where: str, x: torch.Tensor, device: torch.device) -> None:
    """A dense tensor on the group's device."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{where}: expected a tensor, got {type(x).__name__}; wrap it: torch.tensor(value)")
    if x.layout != torch.strided:
        raise ValueError(f"{where}: layout {x.layout} is not supported; use x.to_dense()")
    if x.device.type != device.type or (device.index is not None and x.device.index != device.index):
        raise ValueError(f"{where}: the tensor is on {x.device}, the group on {device}; use x.to(group.device)")


def member(where: str, name: str, root: int, ranks: Sequence[int], own: int | None) -> None:
    """A group-local rank; `own` is set where it must be another rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < len(ranks):
        raise ValueError(
            f"{where}: {name}={root!r} is outside the group of ranks {','.join(map(str, ranks))}; "
            f"{name} counts within the group: use 0 to {len(ranks) - 1}"
        )
    if own is not None and root == own:
        raise ValueError(f"{where}: {name}={root} is this rank itself; a rank cannot send to or receive from itself")


def dim(where: str, x: torch.Tensor, value: int) -> int:
    """`value` as a non-negative dim of `x`."""
    if x.dim() == 0:
        raise ValueError(f"{where}: a 0-d tensor has no dim to cut; use x.view(1)")
    if not -x.dim() <= value < x.dim():
        raise ValueError(f"{where}: dim={value} is outside a tensor of shape {tuple(x.shape)}; use 0 to {x.dim() - 1}")
    return value % x.dim()


def divides(where: str, x: torch.Tensor, value: int, size: int) -> None:
    """The group's size divides that dim."""
    extent = x.shape[value]
    if extent % size:
        raise ValueError(
            f"{where}: dim {value} of shape {tuple(x.shape)} has {extent} rows, which {size} ranks do not divide; "
            f"pad it to {-(-extent // size) * size}"
        )


def parts(where: str, value: Sequence[torch.Tensor] | None, out: torch.Tensor, size: int, at_src: bool) -> None:
    """One part a rank at the root, each like `out`; None elsewhere."""
    if not at_src:
        if value is not None:
            raise ValueError(f"{where}: parts are given on a rank that is not src; pass None there")
        return
    if value is None:
        raise ValueError(f"{where}: parts=None on rank src; pass a list of {size} tensors there")
    if len(value) != size:
        raise ValueError(f"{where}: {len(value)} parts for {size} ranks; pass one part a rank")
    for index, part in enumerate(value):
        tensor(f"{where}, part {index}", part, out.device)
        if part.shape != out.shape or part.dtype != out.dtype:
            raise ValueError(
                f"{where}: part {index} is {dtype_name(part.dtype)} {tuple(part.shape)}, "
                f"out is {dtype_name(out.dtype)} {tuple(out.shape)}; make them equal"
            )


def out(where: str, value: torch.Tensor, x: torch.Tensor, shape: Sequence[int], dim: int = 0) -> None:
    """Memory for a result of that shape, along dim 0, of a call on `x`."""
    if type(value) is not torch.Tensor or value.device != x.device:
        tensor(f"{where}, out", value, x.device)
    if dim:
        raise ValueError(f"{where}: out= beside dim={dim}; use dim=0, or leave out= away for a new tensor")
    if value.dtype != x.dtype or value.shape != shape:
        raise ValueError(
            f"{where}: out is {dtype_name(value.dtype)} {tuple(value.shape)}, the result {dtype_name(x.dtype)} "
            f"{tuple(shape)}; make them equal"
        )
    if not value.is_contiguous() or value.requires_grad:
        what = "is not contiguous" if not value.requires_grad else "requires grad"
        raise ValueError(f"{where}: out {what}; pass memory of its own: torch.empty({tuple(shape)}, dtype=...)")
    begin, source = value.data_ptr(), x.data_ptr()
    if begin < source + x.nbytes and source < begin + value.nbytes:
        raise ValueError(f"{where}: out overlaps x; pass other memory")


def splits(
    where: str,
    x: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    size: int,
    rank: int,
) -> tuple[list[int], list[int]]:
    """The two lists of rows a rank. None and None: equal pieces."""
    if x.dim() == 0:
        raise ValueError(f"{where}: a 0-d tensor has no rows to split; use x.view(1)")
    rows = x.shape[0]
    if input_splits is None and output_splits is None:
        divides(where, x, 0, size)
        equal = [rows // size] * size
        return equal, list(equal)
    if input_splits is None or output_splits is None:
        missing = "input_splits" if input_splits is None else "output_splits"
        raise ValueError(f"{where}: {missing}=None beside the other one; pass both, or neither for equal pieces")
    for name, given in (("input_splits", input_splits), ("output_splits", output_splits)):
        if len(given) != size:
            raise ValueError(f"{where}: {name}={list(given)} has {len(given)} numbers for {size} ranks; one a rank")
        if any(int(n) != n or n < 0 for n in given):
            raise ValueError(f"{where}: {name}={list(given)} must be whole numbers, 0 or more")
    ins, outs = [int(n) for n in input_splits], [int(n) for n in output_splits]
    if sum(ins) != rows:
        raise ValueError(f"{where}: input_splits={ins} add up to {sum(ins)}, x has {rows} rows; make them equal")
    if ins[rank] != outs[rank]:
        raise ValueError(
            f"{where}: rank {rank} sends itself {ins[rank]} rows but expects {outs[rank]} from itself; make "
            f"input_splits[{rank}] and output_splits[{rank}] equal"
        )
    return ins, outs
