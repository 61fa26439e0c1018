"""What a checkpoint holds: the index, checked. No torch.

A checkpoint is a folder `checkpoints/step-N/` with one safetensors file a rank and `index.json`. It was written under a
hidden name and renamed when whole, so a folder with this name is whole or was damaged later: the index carries a digest
of itself and of every file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.layout.plan import ParamPlan
from crosscut.train import durable

SCHEMA = "crosscut.checkpoint"
FORMAT_VERSION = 1
INDEX = "index.json"
FOLDER = "checkpoints"
_STEP = re.compile(r"step-(\d+)")


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names it and says why."""


def name_of(step: int) -> str:
    """The folder's name."""
    return f"step-{step}"


def saved_steps(run: Path) -> dict[int, Path]:
    """The checkpoints of a run folder by step, rising. One that was being replaced when the run was killed counts."""
    folder = run / FOLDER
    found: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _STEP.fullmatch(path.name.removeprefix(".").removesuffix(".old")):
            hidden = path.name.startswith(".")
            if hidden and not path.name.endswith(".old"):
                continue
            if not hidden or int(match[1]) not in found:
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest(run: Path) -> Path | None:
    """The checkpoint of the highest step in a run folder, None if it has none."""
    steps = saved_steps(run)
    return steps[max(steps)] if steps else None


def seal(body: Mapping[str, Any]) -> str:
    """The index as the text of `index.json`: `schema` and `format_version` first, its own digest last."""
    head = {"schema": SCHEMA, "format_version": FORMAT_VERSION, **body}
    return json.dumps({**head, "sha256": _digest(head)}) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Index:
    """An opened checkpoint: its folder and the index's content.

    `body` has `step`, `samples` (the position in the data), `world_size`, `mesh`, `layout` and `config` (TOML),
    `files` {name: {bytes, sha256}}, `parameters` {name: entry}, `tied` {name: name}, `optimizer` {class, state: {name:
    {key: entry}}}, `rng` {rank: {kind: {file, key}}} and `progress` (a list, one of each rank). An entry is {shape,
    dtype, slices: [{file, key, ranges}]}, where `ranges` holds per dim the [start, stop) pairs of the whole that the
    slice has, in order.
    """

    path: Path
    body: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Index:
        """Read and check the index. Raises CheckpointError for what is no whole checkpoint, or of a newer version."""
        file = path / INDEX
        try:
            body = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            reason = f"it has no {INDEX}" if path.is_dir() else "no such folder"
            raise CheckpointError(f"checkpoint {path}: {reason}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path}: {INDEX} is damaged ({str(error).splitlines()[0]})") from None
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            raise CheckpointError(f"checkpoint {path}: {INDEX} is not the index of a checkpoint")
        version = body.get("format_version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path}: format_version {version} is newer than {FORMAT_VERSION}, which this crosscut "
                "reads; update crosscut"
            )
        digest = body.pop("sha256", None)
        if digest != _digest(body):
            raise CheckpointError(f"checkpoint {path}: {INDEX} is damaged (its content does not match its digest)")
        return cls(path, body)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.body["step"])

    @property
    def samples(self) -> int:
        """Samples consumed: the position in the data."""
        return int(self.body["samples"])

    def check_parameters(self, params: Mapping[str, ParamPlan]) -> None:
        """Raise CheckpointError unless it is of a model with these parameters."""
        saved = {name: tuple(entry["shape"]) for name, entry in self.body["parameters"].items()}
        ours = {name: plan.shape for name, plan in params.items() if plan.tied_to is None}
        where = f"checkpoint {self.path}: it is of another model:"
        if missing := [name for name in ours if name not in saved]:
            raise CheckpointError(f"{where} {missing[0]} is not in it ({len(missing)} such)")
        if extra := [name for name in saved if name not in ours]:
            raise CheckpointError(f"{where} this one has no {extra[0]} ({len(extra)} such)")
        for name, shape in ours.items():
            if saved[name] != shape:
                raise CheckpointError(f"{where} {name} is {saved[name]} there and {shape} here")

    def check_file(self, name: str, *, content: bool = True) -> None:
        """Raise CheckpointError unless the file is there, of its size, and (`content`) unchanged."""
        file, expected = self.path / name, self.body["files"][name]
        if not file.is_file():
            raise CheckpointError(f"checkpoint {self.path}: {name} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"checkpoint {self.path}: {name} is damaged ({size:,} bytes, {expected['bytes']:,} were written)"
            )
        if content and durable.sha256(file) != expected["sha256"]:
            raise CheckpointError(f"checkpoint {self.path}: {name} is damaged (its content does not match its digest)")
