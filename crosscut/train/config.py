"""One config from four sources, each value with where it came from. No torch.

Flag > --layout FILE > config file > default. A config file holds the sections of `crosscut.train.sections` and may hold
the tables of a layout ([mesh], [cuts], ...), so that it carries its layout. `--layout FILE` replaces the file's layout
tables as a whole: a layout is one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.layout.errors import nearest
from crosscut.layout.layout import Layout
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.train import toml
from crosscut.train.keys import default_of, keys_of, made, mistake, takes_numbers, takes_text
from crosscut.train.layout_source import SHORT_LAYOUT_FLAGS, LayoutSource
from crosscut.train.sections import (
    LAYOUT_TABLES,
    MODEL_DEFAULTS,
    MODEL_KEYS,
    SECTIONS,
    DataSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    TrainSection,
    model_kind,
)

DEFAULT = "default"
SHORT_FLAGS = {  # a flag without a section -> the key it sets
    "model": "model.name",
    "steps": "train.steps",
    "seed": "train.seed",
    "deterministic": "train.deterministic",
    "backend": "run.backend",
    "device": "run.device",
    "resume": "run.resume",
    "overwrite": "run.overwrite",
}


class ConfigError(ValueError):
    """A key or value of the config is wrong; the message is one line that says where it stands and what would do."""


@dataclass(frozen=True)
class Config:
    """Everything `crosscut train` needs to know. `origins` maps `section.key` to where the value came from."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection
    run: RunSection
    layout: Layout
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def kind(self) -> str:
        """`transformer`, `mlp` or `file` (a model of one's own)."""
        return model_kind(self.model.name)

    def model_config(self) -> TransformerConfig | MLPConfig:
        """The reference model's config. Raises ConfigError for a model of one's own and for sizes that do not fit."""
        m = self.model
        if self.kind == "mlp":
            return MLPConfig(dim=m.dim, layers=m.layers, form=m.form, bias=m.bias)
        if self.kind != "transformer":
            raise ConfigError(f"model.name = {m.name!r} has no built-in config")
        return TransformerConfig(**{key: getattr(m, key) for key in MODEL_KEYS["transformer"]})

    @property
    def seq(self) -> int | None:
        """Tokens a row, None for a model that takes no sequences."""
        return None if self.kind == "mlp" else self.train.seq_len

    def layout_origin(self) -> str:
        """Where the mesh came from, in a word or two."""
        return self.origins.get("mesh", DEFAULT)

    def to_toml(self, comments: bool = True) -> str:
        """The whole config as a config file; with `comments`, each value's origin beside it. Reads back equal."""
        lines: list[str] = []
        for name in SECTIONS:
            section = getattr(self, name)
            lines.append(f"[{name}]")
            for key in keys_of(SECTIONS[name]):
                if name == "model" and key != "name" and key not in MODEL_KEYS[self.kind]:
                    continue
                value = getattr(section, key)
                text = f"{key} = {toml.dump(value)}" if value is not None else f"# {key} is not set"
                lines.append(_with_comment(text, self.origins.get(f"{name}.{key}", DEFAULT), comments))
            lines.append("")
        for line in self.layout.to_toml().strip().splitlines():
            table = line.strip().strip("[]")
            if line.startswith("[") and comments:
                line = _with_comment(line, self.origins.get(table, DEFAULT), comments)
            lines.append(line)
        return "\n".join(lines) + "\n"


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    tables: Mapping[str, Any] | None = None,
) -> Config:
    """The config of a command line: the file at `path` (or `tables`, already read from it), changed by `overrides`.

    `overrides` maps `section.key` (from `--section.key value`), or the name of a short flag without its dashes (`mesh`,
    `layout`, `zero`, `sp`, `schedule`, `micro_batches`, `model`, `steps`, ...), to a value; a string is read as on the
    right of a TOML `=`. None values are left out. Raises ConfigError, LayoutError or ValueError, always one line.
    """
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    origins: dict[str, str] = {}
    layout = LayoutSource()
    if path is not None:
        _take_tables(toml.read(path) if tables is None else tables, str(path), values, origins, layout)
    if "layout" in flags:
        layout.take_file(str(flags.pop("layout")))
    for name in [key for key in flags if key in SHORT_LAYOUT_FLAGS]:
        layout.take_flag(name, flags.pop(name))
    for key, value in flags.items():
        _take_flag(key, value, values, origins, layout)
    model = values["model"].get("name", default_of(ModelSection, "name"))
    kind = _checked_kind(model, values, origins)
    for key, value in MODEL_DEFAULTS.get(kind, {}).items():
        section, _, name = key.partition(".")
        values[section].setdefault(name, value)
    sections = {name: _validate(name, cls, values[name], origins) for name, cls in SECTIONS.items()}
    config = Config(
        **sections,
        layout=layout.resolve(world_size),
        origins={**origins, **layout.origins},
    )
    if kind != "file":
        config.model_config()  # sizes that do not fit are refused here, before anything is made
    return config


def _take_tables(
    tables: Mapping[str, Any],
    path: str,
    values: dict[str, dict[str, Any]],
    origins: dict[str, str],
    layout: LayoutSource,
) -> None:
    layout_tables = {}
    for name, table in tables.items():
        if name in LAYOUT_TABLES:
            layout_tables[name] = table
            continue
        if name not in SECTIONS:
            raise ConfigError(f"{path}: unknown section [{name}]{nearest(name, (*SECTIONS, *LAYOUT_TABLES))}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} = {table!r} is a value; [{name}] is a section")
        for key, value in table.items():
            _check_key(name, key, path)
            values[name][key] = value
            origins[f"{name}.{key}"] = path
    layout.take_tables(layout_tables, path)


def _take_flag(
    key: str, value: Any, values: dict[str, dict[str, Any]], origins: dict[str, str], layout: LayoutSource
) -> None:
    flag = "--" + key.replace("_", "-") if "." not in key else "--" + key
    key = SHORT_FLAGS.get(key, key)
    section, dot, name = key.partition(".")
    if section in LAYOUT_TABLES and dot:
        layout.take_key(section, name, toml.literal(value) if isinstance(value, str) else value, flag)
        return
    if section not in SECTIONS or not dot:
        raise ConfigError(f"{flag}: unknown section {section!r}{nearest(section, (*SECTIONS, *LAYOUT_TABLES))}")
    _check_key(section, name, flag)
    values[section][name] = _from_text(SECTIONS[section], name, value)
    origins[key] = flag


def _check_key(section: str, key: str, source: str) -> None:
    known = keys_of(SECTIONS[section])
    if key in known:
        return
    elsewhere = [f"{name}.{key}" for name, cls in SECTIONS.items() if key in keys_of(cls)]
    hint = f"; it is {elsewhere[0]}" if elsewhere else nearest(key, known)
    raise ConfigError(f"{source}: unknown key {section}.{key}{hint}")


def _from_text(cls: type, key: str, value: Any) -> Any:
    """The value of a flag's text: as it stands where the key takes strings, else read as TOML."""
    if not isinstance(value, str):
        return value
    if takes_text(cls, key):
        return value
    if takes_numbers(cls, key) and not value.strip().startswith("["):
        value = f"[{value}]"  # --optimizer.betas 0.9,0.95
    return toml.literal(value)


def _checked_kind(model: Any, values: Mapping[str, Mapping[str, Any]], origins: Mapping[str, str]) -> str:
    """The kind of model, once its name is known to be one and no key beside it belongs to another kind.

    A key from a weaker source than the name is left alone: `crosscut train configs/default.toml --model mlp` is no
    mistake although that file gives heads.
    """
    if not isinstance(model, str):
        raise ConfigError(f"model.name = {model!r} must be a string")
    kind = model_kind(model)
    if kind == "file" and ".py:" not in model:
        names = [name for name in MODEL_KEYS if name != "file"]
        raise ConfigError(f"model.name = {model!r} is unknown{nearest(model, names)} (or FILE.py:FUNCTION)")
    if kind == "file" and not model.rpartition(":")[2].isidentifier():
        raise ConfigError(f"model.name = {model!r}: what follows the colon must be the name of a function")
    named_by_flag = origins.get("model.name", DEFAULT).startswith("--")
    for key in values["model"]:
        by_flag = origins[f"model.{key}"].startswith("--")
        if key != "name" and key not in MODEL_KEYS[kind] and (by_flag or not named_by_flag):
            others = [name for name, keys in MODEL_KEYS.items() if key in keys]
            raise ConfigError(
                f"{origins[f'model.{key}']}: model.{key} is a key of {' and '.join(others)}; model.name is {model!r}"
            )
    return kind


def _validate(name: str, cls: type, values: Mapping[str, Any], origins: Mapping[str, str]) -> Any:
    for key, value in values.items():
        if (said := mistake(cls, key, value)) is not None:
            origin = origins.get(f"{name}.{key}", DEFAULT)
            raise ConfigError(f"{name}.{key} = {value!r} (from {origin}): {said}")
    return made(cls, values)


def _with_comment(text: str, comment: str, wanted: bool) -> str:
    return f"{text:<40} # {comment}" if wanted else text
