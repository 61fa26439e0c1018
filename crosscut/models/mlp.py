"""The deep MLP of the lectures: x = gelu(x @ W), layer after layer, loss = mean square of the output."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.models.config import MLPConfig
from crosscut.models.init import Init


class MLP(nn.Module):
    """(batch, dim) -> (batch, dim). The MLP is most of a transformer's compute, so it stands for one."""

    def __init__(self, cfg: MLPConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.layers = nn.ModuleList(nn.Linear(cfg.dim, cfg.dim, bias=cfg.bias) for _ in range(cfg.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x

    def init_table(self) -> dict[str, Init]:
        """Normal of variance 1/dim, so that the scale of x neither grows nor dies over the layers; biases zero."""
        return {
            name: Init.normal(self.cfg.dim**-0.5) if p.ndim == 2 else Init.zeros()
            for name, p in self.named_parameters()
        }


def mean_square(output: Tensor, labels: Tensor | None = None) -> Tensor:
    """Mean of output**2 over all elements; the labels are not used."""
    return output.square().mean()
