"""Small models, data and meshes for the parity tests. Data depends on position and row; nothing is filled with a
constant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.dims import mlp_dims, transformer_dims
from crosscut.models.mlp import MLP
from crosscut.models.transformer import Transformer

# Sizes that 1, 2, 3, 4, 6 and 8 divide where an axis may take them all.
SMALL = {"vocab": 48, "embed": 24, "layers": 4, "heads": 4, "head_dim": 6, "mlp": 48}
VARIANTS = {
    "plain": SMALL,
    "tied": {**SMALL, "tied": True},
    "gqa": {**SMALL, "heads": 8, "kv_heads": 4, "head_dim": 4, "qk_norm": True},
    "bias": {**SMALL, "bias": True},
    "all": {**SMALL, "heads": 8, "kv_heads": 4, "head_dim": 4, "qk_norm": True, "bias": True, "tied": True},
    "threes": {**SMALL, "heads": 6, "kv_heads": 6, "head_dim": 4, "layers": 6, "bias": True, "tied": True},
    "eights": {**SMALL, "heads": 8, "head_dim": 4, "layers": 8, "vocab": 64},
}


def transformer(variant: str):  # type: ignore[no-untyped-def]
    """(builder, dims table) of a variant."""
    cfg = TransformerConfig(**VARIANTS[variant])
    return partial(Transformer, cfg), transformer_dims(cfg)


def mlp(form: str, layers: int = 4, dim: int = 24, bias: bool = True):  # type: ignore[no-untyped-def]
    cfg = MLPConfig(dim=dim, layers=layers, form=form, bias=bias)
    return partial(MLP, cfg), mlp_dims(cfg)


def token_batches(rows: int, seq: int, vocab: int, steps: int = 3, ignore: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Random ids; some labels are ignored, unevenly over rows: the first row has none left."""
    generator = torch.Generator().manual_seed(7)
    out = []
    for _ in range(steps):
        ids = torch.randint(vocab, (rows, seq + 1), generator=generator)
        labels = ids[:, 1:].clone()
        if ignore:
            labels[torch.rand(rows, seq, generator=generator) < 0.2] = -100
            if rows > 1:
                labels[0] = -100
        out.append((ids[:, :-1], labels))
    return out


def feature_batches(rows: int, dim: int, steps: int = 3) -> list[tuple[Tensor, None]]:
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randn(rows, dim, generator=generator) + torch.arange(rows)[:, None] / rows, None) for _ in range(steps)
    ]


def factorisations(world_size: int) -> Iterator[tuple[int, int, int]]:
    """Every (pp, dp, tp) whose product is world_size."""
    for pp in range(1, world_size + 1):
        for dp in range(1, world_size // pp + 1):
            if world_size % (pp * dp) == 0:
                yield pp, dp, world_size // (pp * dp)
