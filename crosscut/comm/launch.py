"""`spawn`: run one function on every rank of a world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DEFAULT_TIMEOUT_S = 600.0
BACKENDS = ("threads", "gloo", "nccl")


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(ctx, *args, **kwargs)` on every rank; returns one value a rank, in rank order."""
    from crosscut.comm.thread_launch import run_threads

    assert backend == "threads"
    assert world_size is not None
    return run_threads(fn, args, kwargs, world_size, timeout_s, 'backend="threads" was asked for')
