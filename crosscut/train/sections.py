"""The sections of a config file and the default of every key. No torch.

These defaults are the main job: with no config file, `crosscut train` trains the same model on the same text as
configs/default.toml, on one rank.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Field(gt=0)


class Section(BaseModel):
    """One table of the config. Values are taken strictly: "100" is no number, and 1 is no truth value."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """The model. `name` is "transformer", "mlp", or "FILE.py:FUNCTION" for a model of one's own."""

    name: str = "transformer"
    vocab: int = Field(256, gt=0)  # text is bytes: at least 256
    embed: int = Field(192, gt=0)
    layers: int = Field(4, gt=0)
    heads: int = Field(6, gt=0)
    kv_heads: int | None = Field(None, gt=0)  # None: as many as heads
    head_dim: int | None = Field(None, gt=0)  # None: embed / heads
    mlp: int = Field(512, gt=0)
    bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = Field(10000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)
    dim: int = Field(1024, gt=0)
    form: Literal["gather", "pairs"] = "gather"
    args: dict[str, Any] = {}  # keyword arguments of a FUNCTION of one's own


class DataSection(Section):
    """The text. `path`: "stdlib" (the running interpreter's standard library), a file, or a folder."""

    path: str = "stdlib"
    val_fraction: float = Field(0.1, gt=0, lt=1)


class TrainSection(Section):
    """How long, how much at a time, how often to look."""

    steps: int = Field(600, ge=0)
    global_batch_size: int = Field(16, gt=0)  # sequences (rows) a step, over all ranks and micro-batches
    seq_len: int = Field(128, gt=0)  # bytes a sequence
    eval_every: int = Field(200, ge=0)  # steps; 0: only at the end
    eval_batches: int = Field(32, gt=0)
    log_every: int = Field(20, gt=0)  # steps
    seed: int = Field(0, ge=0)
    deterministic: bool = False


class OptimizerSection(Section):
    """AdamW or SGD, linear warm-up, cosine decay. Norms and biases are not decayed."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(3e-3, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    warmup_steps: int = Field(50, ge=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    clip_norm: float = Field(1.0, ge=0)  # 0: the norm is measured, nothing is clipped


class RunSection(Section):
    """Where the run is kept and what it runs on."""

    dir: str | None = None  # the run folder itself; None: runs/<date>-<layout>
    save_every: int = Field(200, ge=0)  # steps; 0: only at the end
    resume: str | None = None  # a run folder, a checkpoint folder, "latest" or "auto"
    overwrite: bool = False
    backend: str | None = None  # nccl, gloo, threads; None: what fits the machine
    device: str | None = None  # cpu, cuda; None: what the back end uses
    threads: int = Field(0, ge=0)  # CPU threads a rank; 0: the cores shared out
    timeout_s: float = Field(600.0, gt=0)
    sample_bytes: int = Field(400, ge=0)  # text written with the trained model at the end
    temperature: float = Field(0.8, ge=0)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "run": RunSection,
}
LAYOUT_TABLES = ("mesh", "cuts", "store", "schedule", "recompute", "precision", "context")

MODEL_KEYS = {  # which keys of [model] a kind of model reads, besides name
    "transformer": tuple(
        "vocab embed layers heads kv_heads head_dim mlp bias qk_norm tied rope_theta norm_eps".split()
    ),
    "mlp": ("dim", "layers", "form", "bias"),
    "file": ("args",),
}
# The deep MLP is the lectures': batch 128, dim 1024, 4 layers, AdamW at 1e-3.
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "mlp": {"train.global_batch_size": 128, "train.steps": 50, "optimizer.lr": 1e-3, "optimizer.warmup_steps": 5},
}


def model_kind(name: str) -> str:
    """`transformer`, `mlp` or `file`."""
    return name if name in MODEL_KEYS and name != "file" else "file"
