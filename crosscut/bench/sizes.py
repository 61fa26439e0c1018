"""Sizes in bytes, as people write them: `8`, `4KiB`, `100MB`. No torch."""

from __future__ import annotations

import difflib
import re

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes. Powers of ten and of two are told apart by the unit: MB is 10^6, MiB is 2^20. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"size {text.strip()!r} is not a number of bytes; write 8, 4KiB or 100MB")
    number, unit = match.groups()
    known = {name.lower(): name for name in UNITS}
    if unit and unit.lower() not in known:
        near = difflib.get_close_matches(unit.lower(), known, 1, cutoff=0.5)
        hint = f"did you mean {number}{known[near[0]]}?" if near else f"use one of {', '.join(UNITS)}"
        raise ValueError(f"size {text.strip()!r}: unknown unit {unit!r}; {hint}")
    size = float(number) * UNITS[known[unit.lower() or "b"]]
    if size < 1 or size != int(size):
        raise ValueError(f"size {text.strip()!r} is not a whole number of bytes, 1 or more")
    return int(size)


def size_text(size: int) -> str:
    """The shortest exact way to write a size, with at most three digits where there is one: 4 KiB, 100 MB, 12 B."""
    for units in (("GB", "MB", "kB"), ("GiB", "MiB", "KiB")):
        for unit in units:
            if size >= UNITS[unit] and size % UNITS[unit] == 0:
                return f"{size // UNITS[unit]} {unit}"
    return f"{size:,} B"
