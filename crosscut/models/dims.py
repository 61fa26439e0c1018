"""The dims tables of the reference models: the whole of what parallelism knows about them. No torch."""

from __future__ import annotations

from crosscut.layout.spec import Dims
from crosscut.models.config import MLPConfig, TransformerConfig

RESIDUAL = "batch seq embed -> batch seq embed"


def transformer_dims(cfg: TransformerConfig) -> Dims:
    """The table of `crosscut.models.transformer.Transformer`: rows for the parameters that `cfg` gives it."""
    table: dict[str, str | tuple[str, ...]] = {
        "embed": "batch seq -> batch seq embed",
        "embed.weight": ("vocab", "embed"),
        "layers.*.attn_norm.weight": ("embed",),
        "layers.*.attn": RESIDUAL,
        "layers.*.attn.q.weight": ("heads*head_dim", "embed"),
        "layers.*.attn.k.weight": ("kv_heads*head_dim", "embed"),
        "layers.*.attn.v.weight": ("kv_heads*head_dim", "embed"),
        "layers.*.attn.o.weight": ("embed", "heads*head_dim"),
        "layers.*.mlp_norm.weight": ("embed",),
        "layers.*.mlp": RESIDUAL,
        "layers.*.mlp.gate.weight": ("mlp", "embed"),
        "layers.*.mlp.up.weight": ("mlp", "embed"),
        "layers.*.mlp.down.weight": ("embed", "mlp"),
        "norm.weight": ("embed",),
        "head": "batch seq embed -> batch seq vocab",
        "head.weight": ("vocab", "embed"),
    }
    if cfg.bias:
        for name in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            table[f"layers.*.{name}.bias"] = table[f"layers.*.{name}.weight"][:1]  # as the weight's rows
    if cfg.qk_norm:
        table["layers.*.attn.q_norm.weight"] = ("head_dim",)
        table["layers.*.attn.k_norm.weight"] = ("head_dim",)
    return Dims(table, sizes={"heads": cfg.heads, "kv_heads": cfg.kv_heads, "head_dim": cfg.head_dim}, layers="layers")


def mlp_dims(cfg: MLPConfig) -> Dims:
    """The table of `crosscut.models.mlp.MLP` in the form that `cfg` asks for."""
    table: dict[str, str | tuple[str, ...]] = {}
    if cfg.form == "gather":  # the lectures' form: every layer is a boundary, columns and no rows
        table = {"layers.*": "batch embed -> batch embed", "layers.*.weight": ("mlp", "embed")}
        if cfg.bias:
            table["layers.*.bias"] = ("mlp",)
        return Dims(table, layers="layers")
    for i in range(cfg.layers):  # pairs: columns then rows; an odd last layer is whole
        last_alone = i == cfg.layers - 1 and i % 2 == 0
        row = ("embed", "embed") if last_alone else ("mlp", "embed") if i % 2 == 0 else ("embed", "mlp")
        table[f"layers.{i}.weight"] = row
        if cfg.bias:
            table[f"layers.{i}.bias"] = row[:1]
    return Dims(table, layers="layers")
