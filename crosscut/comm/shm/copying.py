"""Copy bytes between addresses, without a tensor for either end."""

from __future__ import annotations

import ctypes
from typing import Any

_ARGUMENTS: Any = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_short = ctypes.PyDLL(None).memcpy  # keeps the GIL: giving it away costs more than a short copy
_short.argtypes, _short.restype = _ARGUMENTS, None
_long = ctypes.CDLL(None).memcpy  # lets other Python threads run meanwhile
_long.argtypes, _long.restype = _ARGUMENTS, None
_SHORT_BYTES = 1 << 16


def copy_bytes(to: int, source: int, num_bytes: int) -> None:
    """Copy; the two ranges do not overlap."""
    if num_bytes:
        (_short if num_bytes <= _SHORT_BYTES else _long)(to, source, num_bytes)
