"""The parameters of the reference models without building them: names, shapes and kinds in registration order."""

from __future__ import annotations

from crosscut.layout.spec import ModelSpec, ParamSpec
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.dims import mlp_dims, transformer_dims


def transformer_spec(cfg: TransformerConfig) -> ModelSpec:
    """`crosscut.models.transformer.Transformer(cfg)` as a derivation sees it."""
    params = [ParamSpec("embed.weight", (cfg.vocab, cfg.embed), "embedding.weight", "embed")]
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    for i in range(cfg.layers):
        block = f"layers.{i}"
        params.append(_norm(f"{block}.attn_norm", cfg.embed))
        for name, rows, columns in (
            ("q", queries, cfg.embed),
            ("k", keys, cfg.embed),
            ("v", keys, cfg.embed),
            ("o", cfg.embed, queries),
        ):
            params += _linear(f"{block}.attn.{name}", rows, columns, cfg.bias)
        if cfg.qk_norm:
            params += [_norm(f"{block}.attn.{name}", cfg.head_dim) for name in ("q_norm", "k_norm")]
        params.append(_norm(f"{block}.mlp_norm", cfg.embed))
        params += _linear(f"{block}.mlp.gate", cfg.mlp, cfg.embed, cfg.bias)
        params += _linear(f"{block}.mlp.up", cfg.mlp, cfg.embed, cfg.bias)
        params += _linear(f"{block}.mlp.down", cfg.embed, cfg.mlp, cfg.bias)
    params.append(_norm("norm", cfg.embed))
    tied_to = "embed.weight" if cfg.tied else None
    params.append(ParamSpec("head.weight", (cfg.vocab, cfg.embed), "linear.weight", "head", tied_to))
    return ModelSpec("transformer", tuple(params), transformer_dims(cfg), ("batch", "seq"), "cross_entropy")


def mlp_spec(cfg: MLPConfig) -> ModelSpec:
    """`crosscut.models.mlp.MLP(cfg)` as a derivation sees it."""
    params = [p for i in range(cfg.layers) for p in _linear(f"layers.{i}", cfg.dim, cfg.dim, cfg.bias)]
    return ModelSpec("mlp", tuple(params), mlp_dims(cfg), ("batch", "embed"), "mean")


def _linear(module: str, rows: int, columns: int, bias: bool) -> list[ParamSpec]:
    """The weight (rows = outputs, columns = inputs) and, if any, the bias of an nn.Linear."""
    out = [ParamSpec(f"{module}.weight", (rows, columns), "linear.weight", module)]
    return out + [ParamSpec(f"{module}.bias", (rows,), "linear.bias", module)] if bias else out


def _norm(module: str, size: int) -> ParamSpec:
    return ParamSpec(f"{module}.weight", (size,), "other", module)
