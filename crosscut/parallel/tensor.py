"""Tensor parallelism: cut weights, and the communication at the boundaries around them.

A plan (layout/plan.py) says which slice of each parameter a rank holds and what happens at the entry and exit of each
boundary module. Here the slices are taken and the boundaries get their hooks; the model's own code runs unchanged, on
narrower weights. (Column/row pairs: Shoeybi et al. 2019, "Megatron-LM"; sequence-cut boundaries: Korthikanti et al.
2022.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.comm import pairs
from crosscut.comm.context import Context
from crosscut.comm.group import Group
from crosscut.layout.plan import Action, ParamPlan, Plan, Ranges, Site
from crosscut.parallel.contract import ContractMode


def take_slice(whole: Tensor, plan: ParamPlan, ranges: Ranges) -> Tensor:
    """The part `ranges` of a whole parameter (a copy unless it is all of it)."""
    if tuple(whole.shape) != plan.shape:
        raise ValueError(f"{plan.name} has shape {tuple(whole.shape)}, its plan says {plan.shape}")
    for dim, held in enumerate(ranges):
        if held != ((0, whole.size(dim)),):
            whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in held or ((0, 0),)], dim)
    return whole


def apply_action(x: Tensor, action: Action, ctx: Context, tag: str, back_tag: str) -> Tensor:
    """Run one placement change of a boundary."""
    group = ctx.group(action.axes)
    if action.fn == "enter":
        return pairs.enter(x, group, back_tag)
    if action.fn == "leave":
        return pairs.leave(x, group, tag)
    assert action.dim is not None
    if action.fn == "gather":
        return pairs.gather(x, group, action.dim, tag, back_tag, then="cut")
    if action.fn == "gather_replicated":
        return pairs.gather(x, group, action.dim, tag, back_tag, then="replicated")
    if action.fn == "scatter_sum":
        return pairs.scatter_sum(x, group, action.dim, tag, back_tag)
    assert action.fn == "slice", action.fn
    return pairs.slice_own(x, group, action.dim)


class Boundaries:
    """The boundaries of this rank's stage, with their hooks, and the watch over the first forward through them.

    module holds the stage's modules under their names in the whole model, with the parameters that it computes with; a
    boundary that is not among them lives on another stage. A vocab-cut Embedding gets its masked look-up.
    """

    def __init__(self, module: nn.Module, plan: Plan, ctx: Context) -> None:
        modules = {name: m for name, m in module.named_modules(remove_duplicate=False) if name}
        self._columns: dict[int, str] = {}
        self._rows: dict[int, str] = {}
        axes: set[str] = set()
        for name, param in plan.params.items():
            owner = modules.get(name.rpartition(".")[0])
            if owner is None or not name.endswith("weight") or not isinstance(owner, (nn.Linear, nn.Embedding)):
                continue
            if param.axis_cuts[0] and isinstance(owner, nn.Embedding):
                cut_embedding(owner, ctx.group(param.axis_cuts[0]))
            elif isinstance(owner, nn.Linear):
                for dim, found in enumerate((self._columns, self._rows)):
                    if param.axis_cuts[dim]:
                        found[id(owner.weight)] = name
                        axes.update(param.axis_cuts[dim])
        self._label = plan.layout.mesh.label(tuple(axes))
        self._mode: ContractMode | None = None  # while a forward is watched
        self._watched = not (self._columns or self._rows)  # nothing is cut that could be misused
        for site in plan.sites:
            boundary = modules.get(site.module)
            if boundary is not None and site.stage == ctx.coords["pp"]:
                _install(boundary, site, ctx, modules, self._settle)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a forward: the first one with cut Linears is held to the contract, the rest run free."""
        if self._watched:
            yield
            return
        self._watched = True
        self._mode = ContractMode(self._columns, self._rows, self._label)
        try:
            with self._mode:
                yield
        finally:
            self._mode = None

    def _settle(self, x: Tensor) -> None:
        """An exit has made x whole."""
        if self._mode is not None:
            self._mode.settle(x)


def _install(
    boundary: nn.Module, site: Site, ctx: Context, modules: dict[str, nn.Module], settle: Callable[[Tensor], None]
) -> None:
    forward, backward = f"{site.module}/forward", f"{site.module}/backward"

    def entry(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not args:
            raise ValueError(f"{site.module} is a boundary: pass the hidden value as its first positional argument")
        x = args[0]
        for action in site.entry:
            x = apply_action(x, action, ctx, f"{forward}/entry", f"{backward}/entry")
        return (x, *args[1:]), kwargs

    # A row weight's bias is added once, after the sum: added before, every rank of the group would count it.
    with_bias: list[nn.Linear] = []
    for name in site.row_biases:
        linear = modules[name.rpartition(".")[0]]
        assert isinstance(linear, nn.Linear)
        with_bias.append(linear)
        linear.forward = _forward_without_bias.__get__(linear)  # type: ignore[method-assign]

    def leave(_: nn.Module, args: tuple, out: Any) -> Any:
        x = out[0] if isinstance(out, tuple) else out
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            raise ValueError(
                f"{site.module} is a boundary: it must return a tensor (or a tuple that begins with it), not {kind}"
            )
        settle(x)
        for action in site.exit:
            x = apply_action(x, action, ctx, f"{forward}/exit", f"{backward}/exit")
        for linear in with_bias:
            x = x + linear.bias
        return (x, *out[1:]) if isinstance(out, tuple) else x

    if site.entry:
        boundary.register_forward_pre_hook(entry, with_kwargs=True)
    if site.exit or with_bias:
        boundary.register_forward_hook(leave)


def _forward_without_bias(self: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, self.weight)


def cut_embedding(embedding: nn.Embedding, group: Group) -> None:
    """Make an Embedding cut by rows over `group` look up only its own: other ids give zeros, and the exit sums."""
    if embedding.max_norm is not None or embedding.padding_idx is not None or embedding.sparse:
        raise ValueError(
            "an Embedding cut over its rows cannot have max_norm, padding_idx or sparse gradients; do not cut vocab"
        )
    start = group.rank * embedding.weight.size(0)
    vocab = group.size * embedding.weight.size(0)

    def forward(ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(f"token ids run from {int(ids.min())} to {int(ids.max())}; the vocab is [0, {vocab})")
        local = ids - start
        foreign = (local < 0) | (local >= embedding.weight.size(0))
        rows = F.embedding(local.masked_fill(foreign, 0), embedding.weight)
        return rows.masked_fill(foreign.unsqueeze(-1), 0.0)

    embedding.forward = forward  # type: ignore[method-assign, assignment]
