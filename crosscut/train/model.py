"""The model a config names: its spec without torch where it is a reference model, and how to build it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.layout.plan import Plan
from crosscut.layout.spec import Dims, ModelSpec
from crosscut.models.config import MLPConfig
from crosscut.models.shapes import mlp_spec, transformer_spec
from crosscut.train.config import Config, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """What `distribute` needs to know of a model. `dims` is its table, `loss_fn(output, labels)` gives the mean."""

    build: Callable[[], nn.Module]
    dims: Dims
    loss_fn: Callable[[Tensor, Tensor], Tensor]


def spec_of(config: Config) -> ModelSpec:
    """Names, shapes and dims of the config's model. Without torch, except for a model of one's own (built on meta)."""
    if config.kind == "file":
        from crosscut.parallel.inspect import spec_from_module

        recipe = recipe_of(config)
        return spec_from_module(_on_meta(recipe.build), recipe.dims)
    cfg = config.model_config()
    return mlp_spec(cfg) if isinstance(cfg, MLPConfig) else transformer_spec(cfg)


def plan_of(config: Config) -> Plan:
    """The derivation of the config's model under its layout. Raises LayoutError where they do not fit."""
    from crosscut.layout.rules import derive

    return derive(spec_of(config), config.layout, batch=config.train.global_batch_size, seq=config.seq)


def recipe_of(config: Config) -> Recipe:
    """How to build the config's model (imports torch). Raises ConfigError if a file of one's own cannot serve."""
    from crosscut.models import mlp, transformer

    if config.kind == "file":
        return _recipe_from_file(config.model.name, config.model.args, transformer.next_token_loss)
    cfg, dims = config.model_config(), spec_of(config).dims
    if isinstance(cfg, MLPConfig):
        return Recipe(lambda: mlp.MLP(cfg), dims, mlp.mean_square)
    return Recipe(lambda: transformer.Transformer(cfg), dims, transformer.next_token_loss)


def _recipe_from_file(name: str, args: dict[str, Any], default_loss: Callable[..., Any]) -> Recipe:
    """`FILE.py:FUNCTION`: FUNCTION(**args) builds the model; DIMS in the same file is its table (none: data parallel
    only), loss_fn its loss (none: next-token cross-entropy)."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"model.name = {name!r}: there is no file {path}")
    module_name = f"crosscut_model_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"model.name = {name!r}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    build = getattr(module, function, None)
    if not callable(build):
        raise ConfigError(f"model.name = {name!r}: {path} has no function {function}")
    dims = getattr(module, "DIMS", Dims())
    if not isinstance(dims, Dims):
        raise ConfigError(f"model.name = {name!r}: DIMS in {path} is a {type(dims).__name__}, not a crosscut.Dims")
    try:
        inspect.signature(build).bind(**args)
    except TypeError as error:
        raise ConfigError(f"model.name = {name!r}: {function} cannot be called with model.args: {error}") from None

    def built() -> nn.Module:
        from torch import nn

        model = build(**args)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.name = {name!r}: {function} gave a {type(model).__name__}, not a torch.nn.Module")
        return model

    return Recipe(built, dims, getattr(module, "loss_fn", default_loss))


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The model without numbers, or with them where its constructor needs them."""
    from crosscut.parallel.materialize import on_meta

    model = on_meta(build)
    return build() if model is None else model
