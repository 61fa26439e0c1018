"""Saving: a checkpoint is whole or absent.

Each rank writes the pieces that it is the first to hold, by logical name and range in the whole tensor, so nothing in
the files depends on how many ranks there were (loading: checkpoint_load.py). No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from crosscut.train import durable, slices
from crosscut.train.checkpoint_index import FOLDER, INDEX, name_of, seal
from crosscut.train.rng import rng_states
from crosscut.train.together import all_or_none

if TYPE_CHECKING:
    from crosscut.parallel.distribute import DistributedModel


@dataclass(frozen=True)
class Moment:
    """Where a run is: optimizer steps done, samples consumed; `progress`: what else this rank is to remember (JSON)."""

    step: int
    samples: int
    config: str  # TOML
    progress: Mapping[str, Any]


class SaveError(RuntimeError):
    """A checkpoint could not be written; what was there before is untouched."""

    exit_code = 1


def save(run: Path, model: DistributedModel, optimizer: torch.optim.Optimizer, moment: Moment) -> Path:
    """Write `run/checkpoints/step-N/`. Collective. Killed at any point it leaves the previous checkpoints whole.

    Raises SaveError on every rank if some rank cannot write.
    """
    ctx = model.ctx
    target = run / FOLDER / name_of(moment.step)
    hidden = target.with_name(f".{target.name}.tmp")

    def failed(reason: str) -> SaveError:
        return SaveError(f"checkpoint {target} could not be written: {reason}")

    with all_or_none(ctx, failed):
        if ctx.rank == 0:
            _clear_leftovers(target.parent)
            durable.make_folder(hidden)
    with all_or_none(ctx, failed):
        _write_rank(hidden, model, optimizer, moment)
    with all_or_none(ctx, failed):
        if ctx.rank == 0:
            _write_index(hidden, model, optimizer, moment)
            _publish(hidden, target)
    return target


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for path in folder.glob(".step-*.tmp") if folder.is_dir() else ():
        durable.remove(path)


def _write_rank(folder: Path, model: DistributedModel, optimizer: torch.optim.Optimizer, moment: Moment) -> None:
    """This rank's file, and beside it what the index needs to know of it."""
    ctx = model.ctx
    tensors: dict[str, Tensor] = {}
    file = f"rank-{ctx.rank}.safetensors"
    part: dict[str, Any] = {"file": file, "parameters": {}, "state": {}, "rng": {}, "progress": dict(moment.progress)}
    for key, where, shape, ranges, tensor in _pieces(model, optimizer):
        tensors[key] = (
            tensor.detach().cpu().contiguous().clone()
        )  # a copy of its own: safetensors refuses shared memory
        entry = {"shape": shape, "dtype": _name(tensor.dtype), "slices": [{"file": file, "key": key, "ranges": ranges}]}
        place = part
        for step in where[:-1]:
            place = place.setdefault(step, {})
        place[where[-1]] = entry
    for kind, state in rng_states(ctx).items():
        tensors[f"rng/{kind}"] = state
        part["rng"][kind] = {"file": file, "key": f"rng/{kind}"}
    durable.write_file(folder / file, lambda path: save_file(tensors, path))
    part["bytes"] = (folder / file).stat().st_size
    part["sha256"] = durable.sha256(folder / file)
    durable.write_text(folder / f"rank-{ctx.rank}.json", json.dumps(part))


def _pieces(
    model: DistributedModel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...], slices.Ranges, Tensor]]:
    """(key in the file, place in the index, whole shape, ranges held, tensor) of every piece this rank writes."""
    coords, sizes = model.ctx.coords, model.layout.mesh.sizes
    for name, p in model.named_parameters():
        plan = model.plan.params[name]
        if plan.tied_to is not None:
            continue
        held, cutting = model.held_ranges(name), (*plan.cut_axes, *plan.store_axes)
        first = slices.writes(plan, cutting, coords, sizes)
        if first and (p.numel() or not plan.store_axes):  # a shard may hold no rows
            yield f"model/{name}", ("parameters", name), plan.shape, held, p
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor):
                if value is None:
                    continue
                raise SaveError(
                    f"optimizer state {key} of {name} is a {type(value).__name__}; only tensors can be saved"
                )
            scalar = value.ndim == 0 and p.ndim != 0
            if value.numel() and (slices.writes(plan, (), coords, sizes) if scalar else first):
                ranges = () if scalar else held
                yield f"{key}/{name}", ("state", name, key), () if scalar else plan.shape, ranges, value


def _write_index(folder: Path, model: DistributedModel, optimizer: torch.optim.Optimizer, moment: Moment) -> None:
    """Merge what the ranks left beside their files into one index."""
    body: dict[str, Any] = {
        "step": moment.step,
        "samples": moment.samples,
        "world_size": model.ctx.world_size,
        "mesh": model.layout.mesh.sizes,
        "layout": model.layout.to_toml(),
        "config": moment.config,
        "progress": [],
        "files": {},
        "parameters": {},
        "tied": {name: plan.tied_to for name, plan in model.plan.params.items() if plan.tied_to is not None},
        "optimizer": {"class": type(optimizer).__name__, "state": {}},
        "rng": {},
    }
    for rank in range(model.ctx.world_size):
        beside = folder / f"rank-{rank}.json"
        part = json.loads(beside.read_text(encoding="utf-8"))
        body["files"][part["file"]] = {"bytes": part["bytes"], "sha256": part["sha256"]}
        body["rng"][str(rank)] = part["rng"]
        body["progress"].append(part["progress"])
        for name, entry in part["parameters"].items():
            _merge(body["parameters"], name, entry)
        for name, entries in part["state"].items():
            for key, entry in entries.items():
                _merge(body["optimizer"]["state"].setdefault(name, {}), key, entry)
        durable.remove(beside)
    durable.write_text(folder / INDEX, seal(body))
    durable.sync_folder(folder)


def _merge(entries: dict[str, Any], name: str, entry: dict[str, Any]) -> None:
    if name in entries:
        entries[name]["slices"] += entry["slices"]
    else:
        entries[name] = entry


def _publish(hidden: Path, target: Path) -> None:
    """Give the whole new folder its name. An older one of the same step stays readable until the new one has it."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        durable.remove(old)
        durable.rename(target, old)
    durable.rename(hidden, target)
    durable.remove(old)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
