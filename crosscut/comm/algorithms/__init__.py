"""Collectives written out over send and receive: the algorithms behind a `Group`'s calls, to read, to run, to compare.

`ALGORITHMS[op][name]` are functions that take a group and otherwise the arguments of the `Group` method `op`;
`COSTS[op][name](n, size, alpha, beta)` their alpha-beta cost in seconds. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ALGORITHMS": "registry",
    "COSTS": "registry",
    "explain_steps": "trace",
    "run": "registry",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
