"""Model, layout and batch of a command line in a few milliseconds: for commands that answer at once.

`crosscut.train.config.load_config` validates every key of every section, and the import of what it does that with takes
longer than a derivation. Here only what a plan needs is read. Whatever is not plain - an unknown key, a value that does
not fit, a model of one's own - is handed to `load_config`, so that what is right or wrong is said in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosscut.layout.layout import SECTIONS as LAYOUT_TABLES
from crosscut.layout.layout import Layout
from crosscut.layout.spec import ModelSpec
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.shapes import mlp_spec, transformer_spec
from crosscut.train import toml
from crosscut.train.layout_source import SHORT_LAYOUT_FLAGS, LayoutSource

# Copies of crosscut.train.sections, held equal by a test: importing that module is what must be avoided.
KEYS = {
    "model": "name vocab embed layers heads kv_heads head_dim mlp bias qk_norm tied rope_theta norm_eps dim form args",
    "data": "path val_fraction",
    "train": "steps global_batch_size seq_len eval_every eval_batches log_every seed deterministic",
    "optimizer": "name lr weight_decay betas eps momentum warmup_steps min_lr_ratio clip_norm",
    "run": "dir save_every resume overwrite backend device threads timeout_s sample_bytes temperature",
}
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {
        "vocab": 256, "embed": 192, "layers": 4, "heads": 6, "kv_heads": None, "head_dim": None, "mlp": 512,
        "bias": False, "qk_norm": False, "tied": False, "rope_theta": 10000.0, "norm_eps": 1e-5,
    },
    "mlp": {"dim": 1024, "layers": 4, "form": "gather", "bias": False},
}  # fmt: skip
BATCH = {"transformer": 16, "mlp": 128}  # train.global_batch_size
SEQ_LEN = 128


@dataclass(frozen=True)
class Target:
    """What a plan is derived from. batch: rows of a step; seq: tokens a row, or None."""

    spec: ModelSpec
    layout: Layout
    batch: int
    seq: int | None
    layout_origin: str


def target_of(path: str | None, overrides: Mapping[str, Any], world_size: int | None) -> Target:
    """What CONFIG and the flags say. Raises ValueError, one line, as `load_config` does."""
    try:
        quick = _quick(path, overrides, world_size)
    except ValueError:
        quick = None
    return quick if quick is not None else _whole(path, overrides, world_size)


def _whole(path: str | None, overrides: Mapping[str, Any], world_size: int | None) -> Target:
    from crosscut.train.config import load_config
    from crosscut.train.model import spec_of

    config = load_config(path, overrides, world_size=world_size)
    return Target(spec_of(config), config.layout, config.train.global_batch_size, config.seq, config.layout_origin())


def _quick(path: str | None, overrides: Mapping[str, Any], world_size: int | None) -> Target | None:
    """The target, or None where the whole config has to be looked at."""
    values: dict[str, dict[str, Any]] = {name: {} for name in KEYS}
    source = LayoutSource()
    tables = toml.read(path) if path is not None else {}
    source.take_tables({k: t for k, t in tables.items() if k in LAYOUT_TABLES}, str(path))
    for name, table in tables.items():
        if name not in LAYOUT_TABLES:
            if name not in KEYS or not isinstance(table, dict):
                return None
            values[name].update(table)
    flags = {key: value for key, value in overrides.items() if value is not None}
    if "layout" in flags:
        source.take_file(str(flags.pop("layout")))
    for key, value in flags.items():
        section, _, name = ("model.name" if key == "model" else key).partition(".")
        if key in SHORT_LAYOUT_FLAGS:
            source.take_flag(key, value)
        elif section in LAYOUT_TABLES:
            source.take_key(section, name, toml.literal(value) if isinstance(value, str) else value, f"--{key}")
        elif section == "model" or key in ("train.global_batch_size", "train.seq_len"):
            is_text = not isinstance(value, str) or name in ("name", "form")
            values[section][name] = value if is_text else toml.literal(value)
        else:
            return None
    if any(key not in KEYS[section].split() for section, held in values.items() for key in held):
        return None
    kind = values["model"].pop("name", "transformer")
    if kind not in MODELS or any(key not in MODELS[kind] for key in values["model"]):
        return None
    sizes = {**MODELS[kind], **values["model"]}
    batch = values["train"].get("global_batch_size", BATCH[kind])
    seq = values["train"].get("seq_len", SEQ_LEN) if kind == "transformer" else None
    spec = transformer_spec(TransformerConfig(**sizes)) if kind == "transformer" else mlp_spec(MLPConfig(**sizes))
    if not isinstance(batch, int) or not (seq is None or isinstance(seq, int)):
        return None
    layout = source.resolve(world_size)
    return Target(spec, layout, batch, seq, source.origins.get("mesh", "default"))
