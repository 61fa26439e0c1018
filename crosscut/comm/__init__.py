"""How ranks talk: groups, the ledger, contexts, launching. Importing this package does not import torch."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "CommError": "errors",
    "Context": "context",
    "DeadlockError": "errors",
    "Group": "group",
    "Handle": "handle",
    "Ledger": "ledger",
    "MismatchError": "errors",
    "PeerError": "errors",
    "RankError": "errors",
    "StuckError": "errors",
    "spawn": "launch",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
