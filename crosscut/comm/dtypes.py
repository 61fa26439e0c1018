"""How a tensor travels: dtype rules for moving and for reducing, the same on every back end.

| dtype | moved | sum | avg | min, max | prod |
|---|---|---|---|---|---|
| float64, float32 | as it is | own dtype | own dtype | own dtype | own dtype |
| float16, bfloat16 | as it is | in float32 * | in float32 * | exact | in float32 * |
| int64, int32, int8, uint8 | as it is | wraps around | refused | exact | wraps around |
| int16 | as bytes | in int32, then wraps | refused | exact | in int32, then wraps |
| bool | as uint8 | refused | refused | and, or | and |
| complex64, complex128 | as bytes | by parts | by parts | refused | refused |
| any other | as bytes | refused | refused | refused | refused |

\\* On NCCL, whose kernels reduce in the tensor's own dtype at each hop, 16-bit floats are not widened: pass float32 for
float32 accumulation. `avg` is the sum divided by the group's size, divided before it is rounded back.
A sum of bools could mean a count or an "or"; say which: `max` is or, `min` is and, and `.to(torch.int64)` counts.
"""

from __future__ import annotations

from functools import cache

import torch

OPS = ("sum", "min", "max", "prod", "avg")
NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)
HALVES = frozenset({torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
COMPLEX = frozenset({torch.complex64, torch.complex128})


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, without the `torch.`."""
    return str(dtype).removeprefix("torch.")


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A flat contiguous tensor as the tensor to move: itself, or its bytes where a back end may lack the dtype."""
    return x if x.dtype in NATIVE else x.view(torch.uint8)


def flat(x: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """The values of any strided tensor, flat, contiguous and detached; shares memory with `x` where that is possible.

    `copy=True`: never shares memory.
    """
    if x.requires_grad:
        x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    out = x if x.is_contiguous() else x.contiguous()
    if out.dim() != 1:
        out = out.view(-1)
    if out.stride(0) != 1:  # with at most one element any stride counts as contiguous
        out = out.as_strided((out.numel(),), (1,))
    return out.clone() if copy and out.data_ptr() == x.data_ptr() else out


def check_reduction(op: str, dtype: torch.dtype, where: str) -> None:
    """Raise ValueError unless `op` is defined for `dtype` (the table above)."""
    if op not in OPS:
        raise ValueError(f"{where}: op={op!r} is unknown; use one of {', '.join(OPS)}")
    name = dtype_name(dtype)
    if dtype == torch.bool and op in ("sum", "avg"):
        raise ValueError(f"{where}: op={op!r} on bool is ambiguous; use op='max' for or, or x.to(torch.int64) to count")
    if op == "avg" and dtype in INTEGERS:
        raise ValueError(f"{where}: op='avg' on {name} would round; use op='sum', or x.to(torch.float32)")
    if dtype in COMPLEX and op not in ("sum", "avg"):
        raise ValueError(f"{where}: op={op!r} is not defined on {name}; use sum or avg")
    if dtype not in INTEGERS | COMPLEX | HALVES | {torch.bool, torch.float32, torch.float64}:
        raise ValueError(f"{where}: {name} cannot be reduced; convert it first, for example x.to(torch.float32)")


def to_wire(x: torch.Tensor, *, widen: bool, copy: bool = False) -> torch.Tensor:
    """`x` as the flat tensor that is reduced. Shares memory with `x` if it can, unless `copy`."""
    x_flat = flat(x)
    if x.dtype == torch.bool:
        out = x_flat.view(torch.uint8)
    elif x.dtype in COMPLEX:
        out = torch.view_as_real(x_flat).view(-1)
    elif x.dtype in HALVES and widen:
        out = x_flat.to(torch.float32)
    elif x.dtype == torch.int16:
        out = x_flat.to(torch.int32)
    else:
        out = x_flat
    return out.clone() if copy and out.numel() and out.data_ptr() == x.data_ptr() else out


def from_wire(wire: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], op: str, size: int) -> torch.Tensor:
    """The reduced flat tensor back in the user's dtype and shape; `avg` divides the sum here."""
    if op == "avg":
        wire = wire / size
    if dtype == torch.bool:
        out = wire.view(torch.bool)
    elif dtype in COMPLEX:
        out = torch.view_as_complex(wire.view(-1, 2))
    else:
        out = wire if wire.dtype == dtype else wire.to(dtype)
    return out if out.shape == shape else out.view(shape)
