"""What ranks put into a measured call, and what must come out: each number depends on its rank and its place.

Numbers are small and whole, so that every dtype adds them without rounding, in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from crosscut.bench.definitions import CUT

Tensor = torch.Tensor
Piece = tuple[Sequence[int], int, int]  # the sum over these ranks of their numbers from `offset` on, `length` of them
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_CHUNK = 1 << 20
_EXACT = 120  # int8 holds sums up to 127, bfloat16 whole numbers up to 256


def pattern(rank: int, n: int, start: int, stop: int) -> Tensor:
    """Numbers `start` to `stop` of a rank's data, as int64."""
    place = torch.arange(start, stop)
    return (place + place // 31 + 5 * (place // 4096) + 13 * rank) % max(2, _EXACT // n)


def fill(x: Tensor, rank: int, n: int) -> None:
    """Make the flat `x` the first numbers of a rank's data."""
    for start in range(0, x.numel(), _CHUNK):
        stop = min(start + _CHUNK, x.numel())
        x[start:stop] = pattern(rank, n, start, stop).to(x.dtype)


def expected(op: str, rank: int, n: int, count: int) -> list[Piece] | None:
    """The result of `op` on a rank, by definition, if S has `count` numbers; None where a rank gets nothing."""
    everyone = range(n)
    width = count // n if op in CUT else count
    if op == "all_reduce" or (op == "reduce" and rank == 0):
        return [(everyone, 0, count)]
    if op == "broadcast":
        return [([0], 0, count)]
    if op == "all_gather" or (op == "gather" and rank == 0):
        return [([other], 0, width) for other in everyone]
    if op == "reduce_scatter":
        return [(everyone, rank * width, width)]
    if op == "scatter":
        return [([0], rank * width, width)]
    if op == "all_to_all":
        return [([other], rank * width, width) for other in everyone]
    if op == "send_recv":
        return [([(rank - 1) % n], 0, count)]
    return None


def is_correct(result: Any, op: str, rank: int, n: int, count: int) -> bool:
    """Compare a call's result (a tensor, or a list of parts) with the definition, to the bit."""
    pieces = expected(op, rank, n, count)
    if pieces is None:
        return True
    parts = [part.reshape(-1) for part in (result if isinstance(result, (list, tuple)) else [result])]
    if sum(part.numel() for part in parts) != sum(length for _, _, length in pieces):
        return False
    if len(parts) == 1 and len(pieces) > 1:
        parts = list(parts[0].split([length for _, _, length in pieces]))
    for part, (ranks, offset, length) in zip(parts, pieces, strict=True):
        for start in range(0, length, _CHUNK):
            stop = min(start + _CHUNK, length)
            total = sum(pattern(one, n, offset + start, offset + stop) for one in ranks)
            assert isinstance(total, Tensor)
            if not torch.equal(part[start:stop].cpu(), total.to(part.dtype)):
                return False
    return True
