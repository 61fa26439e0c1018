"""Proof that a layout, or anybody's training program, computes the step of one device.

Names are imported on first use: pytest loads this package for everybody who has crosscut installed.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "assert_parity": "crosscut.testing.parity",
    "capture": "crosscut.testing.capturing",
    "compare_captures": "crosscut.testing.compare",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'crosscut.testing' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
