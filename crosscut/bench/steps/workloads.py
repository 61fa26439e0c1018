"""What is trained in the benchmark of steps: models, batches, and how each is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crosscut.layout.layout import Layout
from crosscut.layout.spec import Dims
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.dims import mlp_dims, transformer_dims
from crosscut.models.mlp import MLP, mean_square
from crosscut.models.transformer import Transformer, next_token_loss

PARALLELS = ("ddp", "fsdp", "tp", "pp")


@dataclass(frozen=True)
class Workload:
    """A model with its batch. `micro_batches`: for pipelines."""

    name: str
    text: str
    build: Callable[[], nn.Module]
    dims: Dims
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[], tuple[Tensor, Tensor]]  # the global batch: inputs and labels
    micro_batches: int

    def layout(self, parallel: str, world_size: int) -> Layout:
        """How crosscut cuts it."""
        if parallel == "pp":
            return Layout.of(f"pp={world_size}", schedule="1f1b", micro_batches=self.micro_batches)
        axis = "tp" if parallel == "tp" else "dp"
        return Layout.of(f"{axis}={world_size}", zero=3 if parallel == "fsdp" else 0)


def _transformer(name: str, rows: int, tokens: int, micro_batches: int) -> Workload:
    cfg = TransformerConfig(vocab=256, embed=256, layers=4, heads=8, mlp=1024)

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(cfg.vocab, (rows, tokens + 1), generator=torch.Generator().manual_seed(rows))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    text = f"transformer, 4 layers, width 256, 8 heads, mlp 1024, vocab 256, batch {rows} x {tokens}"
    return Workload(name, text, lambda: Transformer(cfg), transformer_dims(cfg), next_token_loss, batch, micro_batches)


def _mlp() -> Workload:
    cfg = MLPConfig(dim=1024, layers=4)

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(128, cfg.dim, generator=torch.Generator().manual_seed(1))
        return x, x

    return Workload("mlp", "MLP, 4 layers of 1024, batch 128", lambda: MLP(cfg), mlp_dims(cfg), mean_square, batch, 4)


WORKLOADS = {
    w.name: w for w in (_mlp(), _transformer("transformer", 16, 256, 4), _transformer("transformer-small", 2, 64, 2))
}
