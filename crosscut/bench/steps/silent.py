"""A world whose collectives can be switched off: what a step costs without communication, all else being equal.

The groups are real until `silence`, since making a model takes agreement; from then on every call returns at once and
leaves its output as it was allocated. The numbers are then wrong and the work is the same.
"""

from __future__ import annotations

from typing import Any

import torch

from crosscut.comm.backends.base import Backend, World

_CALLS = (
    "all_reduce broadcast reduce all_gather reduce_scatter gather scatter all_to_all send recv exchange barrier"
).split()


class _Done:
    """A call that has ended."""

    def wait(self) -> None:
        """At once."""

    def done(self) -> bool:
        return True


_DONE = _Done()


def _nothing(*args: Any) -> _Done:
    return _DONE


class _Quiet:
    """A back end for one group; after `silence` its calls do nothing."""

    short = None

    def __init__(self, real: Backend) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def silence(self) -> None:
        for name in _CALLS:
            setattr(self, name, _nothing)


class SilentWorld:
    """A `World` over another one. Call `silence` on every rank, after the models are made."""

    def __init__(self, real: World) -> None:
        self._real = real
        self._made: list[_Quiet] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def group(self, partition: tuple[tuple[int, ...], ...], channel: int = 0) -> Any:
        """The real group, which can be silenced."""
        real = self._real.group(partition, channel)
        if real is None:
            return None
        self._made.append(_Quiet(real))
        return self._made[-1]

    def silence(self) -> None:
        """From now on nothing is sent. What arrives is whatever the memory held: no denormals, which are slow."""
        torch.set_flush_denormal(True)
        for group in self._made:
            group.silence()
