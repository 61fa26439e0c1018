"""Loading: under any layout, each rank reads only what overlaps the pieces that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from crosscut.train import slices
from crosscut.train.checkpoint_index import CheckpointError, Index
from crosscut.train.rng import restore_rng
from crosscut.train.together import all_or_none

if TYPE_CHECKING:
    from crosscut.parallel.distribute import DistributedModel


def load(path: Path, model: DistributedModel, optimizer: torch.optim.Optimizer | None, seed: int) -> Index:
    """Fill the model, the optimizer's state and this rank's RNG from a checkpoint of any layout. Collective.

    Under another layout than the one that saved, RNG states start from (seed, step, rank). Raises CheckpointError on
    every rank, before anything is changed, if the checkpoint is damaged, newer, or of another model.
    """
    ctx = model.ctx
    with all_or_none(ctx):
        index = Index.open(path)
        for i, name in enumerate(index.body["files"]):
            if i % ctx.world_size == ctx.rank:  # each file is digested once
                index.check_file(name)
        index.check_parameters(model.plan.params)
    with Reader(index) as reader:
        for name, p in model.named_parameters():
            plan = model.plan.params[name]
            with torch.no_grad():
                p.copy_(reader.read("parameters", plan.tied_to or name, model.held_ranges(name)))
        model.share_updates()
        if optimizer is not None:
            _load_optimizer(reader, model, optimizer)
        restore_rng(reader, model, seed)
    return index


def read_parameters(path: Path) -> dict[str, Tensor]:
    """The whole parameters of a checkpoint by name, tied ones under each name, for a program of one process."""
    index = Index.open(path)
    for name in index.body["files"]:
        index.check_file(name)
    with Reader(index) as reader:
        entries = index.body["parameters"]
        out = {name: reader.read("parameters", name, slices.whole(tuple(e["shape"]))) for name, e in entries.items()}
    return {**out, **{name: out[main] for name, main in index.body["tied"].items()}}


class Reader:
    """Reads pieces of the tensors of a checkpoint, opening each file once. A context manager."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def file(self, name: str) -> Any:
        """The opened safetensors file `name`."""
        if name not in self._files:
            path = self.index.path / name
            self._files[name] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._files[name]

    def read(self, table: str, name: str, wanted: slices.Ranges) -> Tensor:
        """The piece `wanted` of the parameter `name` (CPU, in the dtype that was saved)."""
        return self.entry(f"{name}", self.index.body[table][name], wanted)

    def entry(self, name: str, entry: Mapping[str, Any], wanted: slices.Ranges) -> Tensor:
        """The piece `wanted` of the tensor that `entry` describes. Raises CheckpointError if a part is in no file."""
        out = torch.empty(slices.local_shape(wanted), dtype=getattr(torch, entry["dtype"]))
        missing = out.numel()
        for piece in entry["slices"]:
            saved = tuple(tuple((start, stop) for start, stop in dim) for dim in piece["ranges"])
            for source, target in slices.overlaps(saved, wanted):
                if not source:  # a 0-d tensor has nothing to slice
                    out.copy_(self.file(piece["file"]).get_tensor(piece["key"]))
                else:
                    out[target] = self.file(piece["file"]).get_slice(piece["key"])[source]
                missing -= slices.box_size(target)
        if missing:
            raise CheckpointError(f"checkpoint {self.index.path}: {missing} of the numbers of {name} are in no file")
        return out


def _load_optimizer(reader: Reader, model: DistributedModel, optimizer: torch.optim.Optimizer) -> None:
    saved = reader.index.body["optimizer"]
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"checkpoint {reader.index.path}: its optimizer is {saved['class']} and this one "
            f"{type(optimizer).__name__}; keep optimizer.name"
        )
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for name, p in model.named_parameters():
        plan = model.plan.params[name]
        state: dict[str, Tensor] = {}
        for key, entry in saved["state"].get(plan.tied_to or name, {}).items():
            scalar = not entry["shape"] and p.ndim != 0
            value = reader.entry(f"{key} of {name}", entry, () if scalar else model.held_ranges(name))
            group = groups.get(id(p), {})
            if scalar and not (group.get("capturable") or group.get("fused")):
                state[key] = value  # torch keeps a step counter on the CPU and in its own dtype
            else:
                state[key] = value.to(device=p.device, dtype=value.dtype if scalar else p.dtype)
        if state:
            optimizer.state[p] = state
