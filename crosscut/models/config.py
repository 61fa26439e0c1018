"""The sizes of the reference models. No torch: the planner and `explain` read these."""

from __future__ import annotations

from dataclasses import dataclass, fields


def _check_counts(cfg: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(cfg, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"[model] {name} = {value!r} must be a whole number of at least 1")


def _is_none(value: object) -> bool:
    return value is None


def _default(cfg: object, name: str, value: int) -> None:
    """Give a field that was left out its value; the dataclass is frozen, and this is its construction."""
    if getattr(cfg, name) is None:
        object.__setattr__(cfg, name, value)


def _check_flags(cfg: object) -> None:
    for f in fields(cfg):  # type: ignore[arg-type]
        if f.type == "bool" and not isinstance(getattr(cfg, f.name), bool):
            raise ValueError(f"[model] {f.name} = {getattr(cfg, f.name)!r} must be true or false")


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped queries, SwiGLU.

    `kv_heads` defaults to `heads`, `head_dim` to `embed // heads`. Raises ValueError for sizes that do not fit: heads
    that are no multiple of kv_heads, an odd head_dim (rotary positions turn pairs), embed that heads do not divide.
    """

    vocab: int = 256
    embed: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = None  # type: ignore[assignment]  # resolved below: always a number afterwards
    head_dim: int = None  # type: ignore[assignment]
    mlp: int = 1024
    bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _default(self, "kv_heads", self.heads)
        _check_counts(self, ("vocab", "embed", "layers", "heads", "kv_heads", "mlp"))
        if _is_none(self.head_dim) and self.embed % self.heads:
            raise ValueError(
                f"[model] embed = {self.embed} is not a multiple of heads = {self.heads}; give head_dim too"
            )
        _default(self, "head_dim", self.embed // self.heads)
        _check_counts(self, ("head_dim",))
        _check_flags(self)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"[model] heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}; change one"
            )
        if self.head_dim % 2:
            raise ValueError(f"[model] head_dim = {self.head_dim} must be even: rotary positions turn pairs of numbers")


@dataclass(frozen=True)
class MLPConfig:
    """The deep MLP: x = gelu(x @ W), layer after layer, mean-square loss.

    `form` is how it is cut over tp: "gather" cuts every layer by columns and gathers its output; "pairs" cuts layers
    alternately by columns and by rows, with one all_reduce a pair. The numbers are the same.
    """

    dim: int = 1024
    layers: int = 4
    form: str = "gather"
    bias: bool = False

    def __post_init__(self) -> None:
        _check_counts(self, ("dim", "layers"))
        _check_flags(self)
        if self.form not in ("gather", "pairs"):
            raise ValueError(f'[model] form = {self.form!r} must be "gather" or "pairs"')
