"""The sections of a config file and the default of every key. No torch.

With no config file, `crosscut train` trains a small transformer on one rank with these; the main job, sized for two
cores and a few minutes, is configs/default.toml.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crosscut.train.keys import key


@dataclass(frozen=True)
class ModelSection:
    """The model. `name` is "transformer", "mlp", or "FILE.py:FUNCTION" for a model of one's own."""

    name: str = "transformer"
    vocab: int = key(256, least=1)  # text is bytes: at least 256
    embed: int = key(192, least=1)
    layers: int = key(4, least=1)
    heads: int = key(6, least=1)
    kv_heads: int | None = key(None, least=1)  # None: as many as heads
    head_dim: int | None = key(None, least=1)  # None: embed / heads
    mlp: int = key(512, least=1)
    bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = key(10000.0, above=0)
    norm_eps: float = key(1e-5, above=0)
    dim: int = key(1024, least=1)
    form: str = key("gather", choices=("gather", "pairs"))
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of a FUNCTION of one's own


@dataclass(frozen=True)
class DataSection:
    """The text. `path`: "stdlib" (the running interpreter's standard library), a file, or a folder."""

    path: str = "stdlib"
    val_fraction: float = key(0.1, above=0, below=1)


@dataclass(frozen=True)
class TrainSection:
    """How long, how much at a time, how often to look."""

    steps: int = key(600, least=0)
    global_batch_size: int = key(16, least=1)  # sequences (rows) a step, over all ranks and micro-batches
    seq_len: int = key(128, least=1)  # bytes a sequence
    eval_every: int = key(200, least=0)  # steps; 0: only at the end
    eval_batches: int = key(32, least=1)
    log_every: int = key(20, least=1)  # steps
    seed: int = key(0, least=0)
    deterministic: bool = False


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW or SGD, linear warm-up, cosine decay. Norms and biases are not decayed."""

    name: str = key("adamw", choices=("adamw", "sgd"))
    lr: float = key(3e-3, above=0)
    weight_decay: float = key(0.1, least=0)
    betas: tuple[float, float] = key((0.9, 0.95), least=0, below=1)
    eps: float = key(1e-8, above=0)
    momentum: float = key(0.9, least=0, below=1)
    warmup_steps: int = key(50, least=0)
    min_lr_ratio: float = key(0.1, least=0, most=1)
    clip_norm: float = key(1.0, least=0)  # 0: the norm is measured, nothing is clipped


@dataclass(frozen=True)
class RunSection:
    """Where the run is kept and what it runs on."""

    dir: str | None = None  # the run folder itself; None: runs/<date>-<layout>
    save_every: int = key(200, least=0)  # steps; 0: only at the end
    resume: str | None = None  # a run folder, a checkpoint folder, "latest" or "auto"
    overwrite: bool = False
    backend: str | None = None  # nccl, shm, gloo, threads; None: what fits the machine
    device: str | None = None  # cpu, cuda; None: what the back end uses
    threads: int = key(0, least=0)  # CPU threads a rank; 0: the cores shared out
    timeout_s: float = key(900.0, above=0)  # of a call, where nobody watches
    hang_timeout_s: float | None = key(None, above=0)  # without progress; None: 60 s on CPUs, 300 s on GPUs
    set_up_timeout_s: float = key(600.0, above=0)  # the same while models are built and data are read
    section_timeout_s: float = key(600.0, above=0)  # the same in an evaluation, a save, a sample
    sample_bytes: int = key(400, least=0)  # text written with the trained model at the end
    temperature: float = key(0.8, least=0)


SECTIONS: dict[str, type] = {
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
