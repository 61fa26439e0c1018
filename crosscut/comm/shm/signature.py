"""What was called, in 64 bits, so that ranks can compare their calls at the price of one word. No torch.

    | op 4 | reduction 4 | dtype 5 | root 11 | bytes 40 |

dtype is 0 where only bytes move, root is 0 where there is none. Sizes beyond 2^40 bytes are compared modulo that.
"""

from __future__ import annotations

OPS = (
    "?",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
REDUCTIONS = ("", "sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
DTYPES = (
    "",
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "complex32",
)
_OP = {name: index for index, name in enumerate(OPS)}
_REDUCTION = {name: index for index, name in enumerate(REDUCTIONS)}
_DTYPE = {name: index for index, name in enumerate(DTYPES)}
_BYTES = (1 << 40) - 1
_OTHER = 31


def sign(op: str, reduction: str = "", dtype: str = "", root: int = 0, num_bytes: int = 0) -> int:
    """The signature of a call."""
    kind = (_OP[op] << 60) | (_REDUCTION[reduction] << 56) | (_DTYPE.get(dtype, _OTHER) << 51)
    return kind | (root & 2047) << 40 | num_bytes & _BYTES


def text(signature: int) -> str:
    """The call in words: `broadcast(root=1) of 48 bytes`."""
    op = OPS[min(signature >> 60, len(OPS) - 1)]
    reduction = REDUCTIONS[min(signature >> 56 & 15, len(REDUCTIONS) - 1)]
    dtype = signature >> 51 & 31
    root = signature >> 40 & 2047
    inside = reduction if reduction else f"root={root}" if op in ("broadcast", "gather", "scatter") else ""
    if op == "reduce":
        inside += f", root={root}"
    call = f"{op}({inside})" if inside else op
    if op in ("barrier", "all_to_all"):
        return call
    name = DTYPES[dtype] if dtype < len(DTYPES) else "another dtype"
    return f"{call} of {signature & _BYTES} bytes" + (f" of {name}" if name else "")
