"""Data that differs by rank and by position, and what collectives must make of it, by plain definition."""

import torch

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]


def make(rank, shape, dtype):
    """Value `rank*100+i` at position i where the dtype holds it; small and patterned where it does not."""
    count = 1
    for extent in shape:
        count *= extent
    i = torch.arange(count)
    if dtype == torch.bool:
        values = (i + rank) % 3 == 0
    elif dtype in (torch.int8, torch.uint8):
        values = (rank * 7 + i * 3) % 40
    elif dtype in COMPLEX:
        values = torch.complex((rank * 100 + i).double(), (i - rank).double())
    else:
        values = rank * 100 + i
    return values.to(dtype).view(shape)


def small(rank, shape, dtype):
    """For products: powers of two near 1, exact in every order and dtype (bool: mostly true)."""
    if dtype == torch.bool:
        return (make(rank, shape, torch.int64) + 1) % 5 != 0
    exponents = make(rank, shape, torch.int64) % 3
    return (2**exponents if dtype in INTEGERS else 2.0 ** (exponents - 1)).to(dtype)


def strided(x):
    """The same values in memory that is not contiguous (0-d: unchanged)."""
    if x.dim() == 0:
        return x.clone()
    wide = torch.empty(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype).fill_(1)
    view = wide[..., ::2].copy_(x)
    return view


def reduce(op, values):
    """The reduction by definition: in a wider dtype, in rank order, rounded once."""
    dtype = values[0].dtype
    if dtype == torch.bool:
        stack = torch.stack(values)
        return {"max": stack.any(0), "min": stack.all(0), "prod": stack.all(0)}[op]
    wide = torch.int64 if dtype in INTEGERS else dtype if dtype in COMPLEX else torch.float64
    out = values[0].to(wide)
    for x in values[1:]:
        if op in ("sum", "avg"):
            out = out + x.to(wide)
        elif op == "prod":
            out = out * x.to(wide)
        else:
            out = (torch.minimum if op == "min" else torch.maximum)(out, x.to(wide))
    if op == "avg":
        accumulate = torch.float32 if dtype in (torch.float16, torch.bfloat16, torch.float32) else wide
        out = out.to(accumulate) / len(values)
    return out.to(dtype)


def ops_for(dtype):
    """The reductions that are defined for a dtype."""
    if dtype == torch.bool:
        return ["min", "max", "prod"]
    if dtype in COMPLEX:
        return ["sum", "avg"]
    return ["sum", "min", "max", "prod"] + (["avg"] if dtype in FLOATS else [])


def same(found, expected):
    """Bitwise equal, with the right dtype and shape."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.equal(found, expected), (found, expected)
