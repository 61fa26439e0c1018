"""Random numbers of a rank (dropout): of the model's first weights and of the data they decide nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crosscut.train.data import generator

if TYPE_CHECKING:
    from crosscut.comm.context import Context
    from crosscut.parallel.distribute import DistributedModel
    from crosscut.train.checkpoint_load import Reader


def rng_states(ctx: Context) -> dict[str, Tensor]:
    """The states of this rank's generators by kind, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if ctx.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ctx.device)
    return states


def restore_rng(reader: Reader, model: DistributedModel, seed: int) -> None:
    """Go on with this rank's random numbers; under another layout than the one that saved, start `seed_rank`'s."""
    ctx, body = model.ctx, reader.index.body
    own = body["rng"].get(str(ctx.rank), {})
    if body["layout"] != model.layout.to_toml() or set(own) != set(rng_states(ctx)):
        seed_rank(seed, reader.index.step, ctx.rank)
        return
    for kind, place in own.items():
        state = reader.file(place["file"]).get_tensor(place["key"])
        if kind == "cuda":
            torch.cuda.set_rng_state(state, ctx.device)
        else:
            torch.set_rng_state(state)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Start this rank's random numbers from (seed, step, rank)."""
    torch.manual_seed(generator(seed, "rng", step, rank).initial_seed())
