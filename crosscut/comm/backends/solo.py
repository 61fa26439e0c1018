"""A world of one rank: nobody to talk to, so no process and no network."""

from __future__ import annotations

import torch


class SoloWorld:
    """A `World` of `crosscut.comm.backends.base` with one rank, in the calling process."""

    rank = 0
    size = 1

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device

    def group(self, partition: tuple[tuple[int, ...], ...], channel: int = 0) -> None:
        """A group of one rank has no transport."""

    def claim(self, module: torch.nn.Module) -> None:
        """No other rank could use it."""

    def close(self, failed: bool) -> None:
        """Nothing to destroy."""
