"""A decoder-only transformer in plain PyTorch: RMSNorm, rotary positions, grouped queries, SwiGLU.

Nothing here knows of ranks. Head counts are read from the tensors, so the same code runs with all heads or a rank's
share.

Shape suffixes: B batch, S seq, E embed, H heads, K kv_heads, D head_dim, M mlp, V vocab.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.models.config import TransformerConfig
from crosscut.models.init import Init

Rope = tuple[Tensor, Tensor]


def rope_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Cosine and sine of the rotary angles, each (..., S, 1, head_dim / 2), for positions of shape (S,) or (B, S).

    Angles are computed in fp32 (fp64 for an fp64 model): in bf16 neighbouring positions would coincide.
    Source: Su et al. 2021, "RoFormer", section 3.4.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions.to(wide)[..., None] * theta**-exponents
    return angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2)


def rotate(x_BSHD: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (d, d + head_dim/2) of every head by its position's angle."""
    cos, sin = rope
    first, second = x_BSHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention. Query head h reads key/value head h // (heads / kv_heads)."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q = nn.Linear(cfg.embed, cfg.heads * cfg.head_dim, bias=cfg.bias)
        self.k = nn.Linear(cfg.embed, cfg.kv_heads * cfg.head_dim, bias=cfg.bias)
        self.v = nn.Linear(cfg.embed, cfg.kv_heads * cfg.head_dim, bias=cfg.bias)
        self.o = nn.Linear(cfg.heads * cfg.head_dim, cfg.embed, bias=cfg.bias)
        self.q_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None

    def forward(self, x_BSE: Tensor, rope: Rope) -> Tensor:
        q_BSHD = self.q(x_BSE).unflatten(-1, (-1, self.head_dim))  # -1: as many heads as the weight holds
        k_BSKD = self.k(x_BSE).unflatten(-1, (-1, self.head_dim))
        v_BSKD = self.v(x_BSE).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSKD = self.q_norm(q_BSHD), self.k_norm(k_BSKD)
        q_BSHD, k_BSKD = rotate(q_BSHD, rope), rotate(k_BSKD, rope)
        y_BHSD = F.scaled_dot_product_attention(
            q_BSHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            is_causal=True,
            enable_gqa=q_BSHD.size(2) != k_BSKD.size(2),
        )
        return self.o(y_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(cfg.embed, cfg.mlp, bias=cfg.bias)
        self.up = nn.Linear(cfg.embed, cfg.mlp, bias=cfg.bias)
        self.down = nn.Linear(cfg.mlp, cfg.embed, bias=cfg.bias)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSE)) * self.up(x_BSE))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(cfg.embed, eps=cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = nn.RMSNorm(cfg.embed, eps=cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x_BSE: Tensor, rope: Rope) -> Tensor:
        x_BSE = x_BSE + self.attn(self.attn_norm(x_BSE), rope)
        return x_BSE + self.mlp(self.mlp_norm(x_BSE))


class Transformer(nn.Module):
    """Token ids (B, S) int64 -> logits (B, S, V).

    `positions` ((S,) or (B, S) int64) is an argument because a rank may hold only part of the sequence; None counts
    from 0.
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.embed)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.embed, eps=cfg.norm_eps)
        self.head = nn.Linear(cfg.embed, cfg.vocab, bias=False)
        if cfg.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(ids_BS.size(-1), device=ids_BS.device)
        x_BSE = self.embed(ids_BS)
        rope = rope_table(positions, self.cfg.head_dim, self.cfg.rope_theta, x_BSE.dtype)
        for layer in self.layers:
            x_BSE = layer(x_BSE, rope)
        return self.head(self.norm(x_BSE))

    def init_table(self) -> dict[str, Init]:
        """How each parameter is drawn. Projections that write to the residual stream are scaled by 1/sqrt(2 layers),
        so that its variance does not grow with depth (Radford et al. 2019, GPT-2, section 2.3)."""
        table: dict[str, Init] = {}
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                table[name] = Init.ones()
            elif p.ndim == 1:
                table[name] = Init.zeros()
            elif name.endswith(("attn.o.weight", "mlp.down.weight")):
                table[name] = Init.normal(0.02 / (2 * self.cfg.layers) ** 0.5)
            else:
                table[name] = Init.normal(0.02)
        return table


def next_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are not -100, in nats a token."""
    return F.cross_entropy(logits_BSV.flatten(0, -2), labels_BS.flatten(), ignore_index=-100)
