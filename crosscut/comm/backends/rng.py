"""The random state of one rank that shares its process with others.

Rank threads would draw from one stream in turn, so that what a rank draws would depend on when the others ran. The
baton keeps one state a rank and swaps it at each hand-over: torch's CPU generator, Python's `random`, and numpy's
global generator if the program has imported numpy.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """A copy of this process's global random state."""

    def __init__(self) -> None:
        self.save()

    def save(self) -> None:
        """Take the state as it is now."""
        self._torch = torch.random.get_rng_state()
        self._python = random.getstate()
        numpy = _numpy()
        self._numpy: Any = None if numpy is None else numpy.random.get_state()

    def load(self) -> None:
        """Make it the process's state."""
        torch.random.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy = _numpy()
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)


def _numpy() -> Any:
    """numpy if the program uses it; importing it here would cost time for nothing."""
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "random") else None
