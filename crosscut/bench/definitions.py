"""What is reported: S, algbw and busbw, as nccl-tests defines them (its doc/PERFORMANCE.md). No torch.

S is the whole array, in bytes, whichever rank holds which part of it; t the time of the slowest rank.

    algbw = S / t
    busbw = algbw * f      f makes operations and numbers of ranks comparable: the rate of the busiest link if the
                           algorithm sends as little as it can

A rank of the best all_reduce sends 2(n-1)/n S: to reduce, n-1 pieces of S/n, and as many to gather them again.
"""

from __future__ import annotations

from collections.abc import Callable

# op -> (what S is, f in words, f)
_DEFINITIONS: dict[str, tuple[str, str, Callable[[int], float]]] = {
    "all_reduce": ("the tensor", "2(n-1)/n", lambda n: 2 * (n - 1) / n),
    "all_gather": ("the whole output", "(n-1)/n", lambda n: (n - 1) / n),
    "reduce_scatter": ("one rank's whole input", "(n-1)/n", lambda n: (n - 1) / n),
    "broadcast": ("the tensor", "1", lambda n: 1.0),
    "reduce": ("the tensor", "1", lambda n: 1.0),
    "gather": ("all parts", "(n-1)/n", lambda n: (n - 1) / n),
    "scatter": ("all parts", "(n-1)/n", lambda n: (n - 1) / n),
    "all_to_all": ("one rank's whole input", "(n-1)/n", lambda n: (n - 1) / n),
    "send_recv": ("what each rank sends to the next", "1", lambda n: 1.0),
}
OPS = tuple(_DEFINITIONS)
CUT = frozenset({"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"})  # S is n equal parts
DTYPES = {  # name -> bytes of one number
    "fp64": 8,
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


def factor(op: str, n: int) -> float:
    """busbw / algbw on n ranks."""
    return _DEFINITIONS[op][2](n)


def algbw_gbs(num_bytes: int, time_s: float) -> float:
    """S / t in GB/s (10^9)."""
    return num_bytes / time_s / 1e9


def busbw_gbs(op: str, n: int, num_bytes: int, time_s: float) -> float:
    """S / t * f in GB/s."""
    return algbw_gbs(num_bytes, time_s) * factor(op, n)


def sent_per_rank_gbs(n: int, num_bytes: int, time_s: float) -> float:
    """An all_reduce seen from what is sent: all ranks together send 2 S (n-1); divided by n and by t. It is busbw."""
    sent_bytes = 2 * num_bytes * (n - 1)
    return sent_bytes / (n * time_s) / 1e9


def elements(op: str, n: int, num_bytes: int, itemsize: int) -> int:
    """Numbers in S: at least one, and for operations on n equal parts a multiple of n (rounded up)."""
    count = max(1, -(-num_bytes // itemsize))
    return -(-count // n) * n if op in CUT else count


def explain(ops: list[str]) -> list[str]:
    """The definitions, a line each, for those operations."""
    lines = ["algbw = S / t, busbw = algbw * f, in GB/s (10^9 bytes); t: median of the slowest rank's times"]
    kinds: dict[tuple[str, str], list[str]] = {}
    for op in ops:
        kinds.setdefault(_DEFINITIONS[op][:2], []).append(op)
    lines += [f"{', '.join(names)}: S is {what}, f = {words}" for (what, words), names in kinds.items()]
    return lines
