"""What the reductions compute: always in rank order, ((x0 + x1) + x2) + ..., so that every rank, every algorithm and
every size give bitwise the same.

| dtype | sum, avg, prod | min, max | band, bor, bxor |
|---|---|---|---|
| float64, float32, complex | own dtype | own dtype (a NaN wins); not for complex | refused |
| float16, bfloat16, float8 | in float32, rounded once at the end | exact | refused |
| integers | wrap around; avg is cut off towards zero | exact | bitwise |
| bool | sum is or, prod is and; avg refused | or, and | or, and |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor

OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
_BITWISE = ("band", "bor", "bxor")
_TORCH: dict[str, Any] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_NUMPY: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch moves these but does not compute with them


def check(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `op` is defined for `dtype`."""
    if op not in _TORCH:
        raise ValueError(f"op={op!r} is unknown; use one of {', '.join(OPS)}")
    number = dtype.is_floating_point or dtype.is_complex
    if op in _BITWISE and number:
        raise ValueError(f"op={op!r} is not defined on {dtype}; use an integer dtype or bool")
    if op in ("min", "max") and dtype.is_complex:
        raise ValueError(f"op={op!r} is not defined on {dtype}; complex numbers have no order")
    if op == "avg" and dtype == torch.bool:
        raise ValueError(f"op='avg' is not defined on {dtype}; use x.to(torch.float32)")


def widens(op: str, dtype: torch.dtype, size: int) -> bool:
    """Whether the reduction runs in float32, rounded at the end. (A sum of two halves is rounded once anyway.)"""
    if not dtype.is_floating_point or dtype.itemsize >= 4:
        return False
    return op == "avg" or (op in ("sum", "prod") and size > 2) or dtype.itemsize == 1


def fold(op: str, parts: Sequence[Tensor], out: Tensor, scratch: Tensor) -> None:
    """`out` = the reduction of `parts`, in their order. `out` may be one of the parts.

    scratch: a uint8 tensor of at least 4 bytes an element, which no part overlaps.
    """
    if out.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # else torch would refuse to write to it
            fold(op, parts, out, scratch)
        return
    size, dtype = len(parts), out.dtype
    if widens(op, dtype, size):
        wide = scratch[: 4 * out.numel()].view(torch.float32)
        wide.copy_(parts[0])
        for part in parts[1:]:
            _TORCH[op](wide, part.to(torch.float32) if dtype.itemsize == 1 else part, out=wide)
        out.copy_(wide.div_(size) if op == "avg" else wide)
        return
    if dtype in _UNSIGNED:
        _fold_unsigned(op, parts, out)
        return
    function = _TORCH[op]
    if size == 1:
        out.copy_(parts[0])
    elif size == 2:
        function(parts[0], parts[1], out=out)
    else:
        # Where `out` is a later part it must not be overwritten before its turn.
        late = out.numel() and any(part.data_ptr() == out.data_ptr() for part in parts[2:])
        total = scratch[: out.nbytes].view(dtype) if late else out
        function(parts[0], parts[1], out=total)
        for part in parts[2:-1]:
            function(total, part, out=total)
        function(total, parts[-1], out=out if late and parts[-1].data_ptr() == out.data_ptr() else total)
        if late and parts[-1].data_ptr() != out.data_ptr():
            out.copy_(total)
    if op == "avg":
        if dtype.is_floating_point or dtype.is_complex:
            out.div_(size)
        else:
            torch.div(out, size, rounding_mode="trunc", out=out)


def fold_plain(op: str, parts: Sequence[Tensor], out: Tensor) -> None:
    """The same for dtypes of at least 4 bytes or integers and an `out` that is none of the parts: fewer cases."""
    if out.is_inference() or (op == "avg" and not out.is_floating_point()) or len(parts) == 1:
        fold(op, parts, out, parts[0])
        return
    function = _TORCH[op]
    function(parts[0], parts[1], out=out)
    for part in parts[2:]:
        function(out, part, out=out)
    if op == "avg":
        out.div_(len(parts))


def _fold_unsigned(op: str, parts: Sequence[Tensor], out: Tensor) -> None:
    total = parts[0].numpy().copy()
    for part in parts[1:]:
        _NUMPY[op](total, part.numpy(), out=total)
    if op == "avg":
        total //= len(parts)
    out.numpy()[...] = total
