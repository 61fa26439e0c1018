"""Initial weights that know nothing of the layout.

A parameter is drawn in blocks of rows. Each block has its own generator, keyed by (seed, name, index of the block), so
a rank draws only the blocks that it holds rows of, and every layout gets the same numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_PER_BLOCK = 64  # part of the definition: another value draws other weights
Range = tuple[int, int]


@dataclass(frozen=True)
class Init:
    """How one parameter starts: `normal` with a standard deviation, `ones` or `zeros`."""

    kind: str
    std: float = 0.0

    @classmethod
    def normal(cls, std: float) -> Init:
        return cls("normal", std)

    @classmethod
    def ones(cls) -> Init:
        return cls("ones")

    @classmethod
    def zeros(cls) -> Init:
        return cls("zeros")


def block_generator(seed: int, name: str, block: int) -> torch.Generator:
    """The CPU generator of one block of rows. Keyed by a digest: Python's hash() differs from process to process."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # 63 bits: what manual_seed takes


def draw(name: str, shape: tuple[int, ...], ranges: tuple[tuple[Range, ...], ...], init: Init, seed: int) -> Tensor:
    """The slice of parameter `name` (whole shape `shape`) given by `ranges` (per dim, the [start, stop) held), in fp32.

    Numbers are drawn in fp32 on the CPU whatever the model's dtype or device, so those do not change them either.
    """
    local = tuple(sum(stop - start for start, stop in dim) for dim in ranges)
    if init.kind == "ones":
        return torch.ones(local)
    if init.kind == "zeros":
        return torch.zeros(local)
    if init.kind != "normal":
        raise ValueError(f"init kind {init.kind!r} of {name} is unknown; use normal, ones or zeros")
    if not shape:  # a 0-d parameter is one row of one number
        return torch.randn((), generator=block_generator(seed, name, 0)) * init.std
    pieces = []
    for start, stop in ranges[0]:
        for block in range(start // ROWS_PER_BLOCK, -(-stop // ROWS_PER_BLOCK)):
            first = block * ROWS_PER_BLOCK
            rows = min(ROWS_PER_BLOCK, shape[0] - first)
            whole = torch.randn((rows, *shape[1:]), generator=block_generator(seed, name, block))
            held = whole[max(start - first, 0) : stop - first]
            for dim, parts in enumerate(ranges[1:], start=1):
                held = (
                    torch.cat([held.narrow(dim, a, b - a) for a, b in parts], dim)
                    if len(parts) > 1
                    else held.narrow(dim, parts[0][0], parts[0][1] - parts[0][0])
                )
            pieces.append(held)
    return torch.cat(pieces).mul_(init.std) if pieces else torch.empty(local)
