"""Model, layout and batch of a command line: what a plan is derived from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosscut.layout.layout import Layout
from crosscut.layout.spec import ModelSpec
from crosscut.train.config import load_config
from crosscut.train.model import spec_of


@dataclass(frozen=True)
class Target:
    """What a plan is derived from. batch: rows of a step; seq: tokens a row, or None."""

    spec: ModelSpec
    layout: Layout
    batch: int
    seq: int | None
    layout_origin: str


def target_of(path: str | None, overrides: Mapping[str, Any], world_size: int | None) -> Target:
    """What CONFIG and the flags say. Raises ValueError, one line, as `load_config` does."""
    config = load_config(path, overrides, world_size=world_size)
    return Target(spec_of(config), config.layout, config.train.global_batch_size, config.seq, config.layout_origin())
