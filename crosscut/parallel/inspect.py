"""The ModelSpec of a module: what a plan is derived from, read off its parameters (meta tensors will do)."""

from __future__ import annotations

import inspect

from torch import nn

from crosscut.layout.spec import Dims, ModelSpec, ParamSpec


def spec_from_module(module: nn.Module, dims: Dims, *, loss: str | None = None, name: str | None = None) -> ModelSpec:
    """The names, shapes, kinds and tied names of a module's parameters, in registration order, with its dims table."""
    first: dict[int, str] = {}
    params = []
    for full, p in module.named_parameters(remove_duplicate=False):
        owner = module.get_submodule(full.rpartition(".")[0])
        leaf = full.rpartition(".")[2]
        kind = "other"
        if isinstance(owner, nn.Linear) and leaf in ("weight", "bias"):
            kind = f"linear.{leaf}"
        elif isinstance(owner, nn.Embedding) and leaf == "weight":
            kind = "embedding.weight"
        params.append(
            ParamSpec(
                name=full,
                shape=tuple(p.shape),
                kind=kind,
                module=full.rpartition(".")[0],
                tied_to=first.get(id(p)),
                requires_grad=p.requires_grad,
            )
        )
        first.setdefault(id(p), full)
    return ModelSpec(
        name=name or type(module).__name__,
        params=tuple(params),
        dims=dims,
        input_dims=input_dims(dims),
        loss=loss or loss_kind(dims),
    )


def loss_kind(dims: Dims) -> str:
    """`cross_entropy` for a model with the dim vocab, else `mean` (over samples)."""
    return "cross_entropy" if any("vocab" in e.names for _, row in dims.params for e in row) else "mean"


def input_dims(dims: Dims) -> tuple[str, ...]:
    """The dims of the model's input: token ids where the table knows of a vocab or a seq, else rows of features."""
    has_seq = any("seq" in b.in_dims for _, b in dims.boundaries)
    return ("batch", "seq") if has_seq or loss_kind(dims) == "cross_entropy" else ("batch", "embed")


def accepts_positions(module: nn.Module) -> bool:
    """Whether the model's forward takes `positions`."""
    return "positions" in inspect.signature(module.forward).parameters
