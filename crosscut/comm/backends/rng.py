"""The random state of one rank that shares its process with others.

Rank threads would draw from one stream in turn, so that what a rank draws would depend on when the others ran. The
baton keeps one state a rank and swaps it at each hand-over: torch's CPU generator, Python's `random`, and numpy's
global generator.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy
import torch


class RandomState:
    """A copy of this process's global random state."""

    def __init__(self) -> None:
        self._torch = torch.random.get_rng_state()
        self._python = random.getstate()
        self._numpy = _NumpyState()

    def save(self) -> None:
        """Take the state as it is now; called by the rank whose state was loaded last."""
        self._torch = torch.random.get_rng_state()
        self._python = random.getstate()
        self._numpy.save()

    def load(self) -> None:
        """Make it the process's state."""
        torch.random.set_rng_state(self._torch)
        random.setstate(self._python)
        self._numpy.load()


class _NumpyState:
    """numpy's global state. Reading and setting it costs 200 us, and most programs never draw from it, so a state that
    did not change is neither read nor set: the generator's memory (2500 bytes) tells. One number lives elsewhere, the
    second half of a pair of normals; with one of those stored, the state is always read and set.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = numpy.random.get_state(legacy=False)
        self._memory = _memory()

    def save(self) -> None:
        memory = _memory()
        if memory is None or memory != self._memory or self._state.get("has_gauss"):
            self._state = numpy.random.get_state(legacy=False)
            self._memory = memory
            if self._state["has_gauss"]:  # leave none behind for a rank whose memory happens to be equal
                numpy.random.set_state({**self._state, "has_gauss": 0, "gauss": 0.0})

    def load(self) -> None:
        if self._memory is None or self._state.get("has_gauss") or _memory() != self._memory:
            numpy.random.set_state(self._state)
            self._memory = _memory()


def _memory() -> bytes | None:
    """The state of numpy's global Mersenne Twister: 624 words and a position. None for any other generator."""
    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]  # missing from numpy's stubs
    if type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
