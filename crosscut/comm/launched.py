"""Was this process started as one rank of a world (torchrun and its like)? Read from the environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """What the launcher said."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launched(environ: Mapping[str, str] | None = None) -> Launched | None:
    """This process's place in a world that a launcher started, or None. Raises ValueError if it is said in part."""
    environ = os.environ if environ is None else environ
    if "RANK" not in environ:
        return None
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ValueError(
                f"RANK={environ['RANK']} is set but {name} is not: start all ranks with torchrun, or unset RANK to let "
                f"crosscut start them"
            )
    rank, world_size = _whole(environ, "RANK"), _whole(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} does not lie within WORLD_SIZE={world_size}; it must be 0 to {world_size - 1}")
    local_rank = _whole(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    local = _whole(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size
    return Launched(rank, world_size, local_rank, local)


def _whole(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} in the environment is not a whole number") from None
