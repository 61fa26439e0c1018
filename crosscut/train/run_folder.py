"""The run folder: where it is, whether a run may use it, and what it goes on from. No torch.

`runs/<date>-<layout>/` holds layout.toml, config.toml, metrics.jsonl, summary.json, ledger/ and checkpoints/;
`runs/latest` names the newest run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.train import durable, toml
from crosscut.train.checkpoint_index import FOLDER, INDEX, Index, newest, saved_steps
from crosscut.train.config import Config

RUNS = Path("runs")
LATEST = "latest"
FORMAT_VERSION = 1
CONFIG, LAYOUT, METRICS, SUMMARY, LEDGER = "config.toml", "layout.toml", "metrics.jsonl", "summary.json", "ledger"
_BEFORE = (LEDGER, "autopsy.json", "autopsy.txt")  # what a run leaves that has not come to its first step
_OWN = (CONFIG, LAYOUT, METRICS, SUMMARY, FOLDER, "report.html", *_BEFORE)
_NOT_INHERITED = ("dir", "resume", "overwrite")  # of [run]: they say what that one call did


@dataclass(frozen=True)
class Start:
    """Which folder a run writes to, and the checkpoint it goes on from (None: from the beginning)."""

    folder: Path
    checkpoint: Path | None = None

    @property
    def goes_on_in_place(self) -> bool:
        """Whether the checkpoint is one of this very folder."""
        return self.checkpoint is not None and run_of(self.checkpoint).resolve() == self.folder.resolve()


def find_checkpoint(resume: str, run_dir: str | None) -> Path | None:
    """The checkpoint that `--resume` names: a run folder, a checkpoint folder, "latest", or "auto".

    None for "auto" where there is nothing to go on from. Raises ValueError where there should be something.
    """
    if resume in ("auto", LATEST):
        run = Path(run_dir) if run_dir is not None else latest_run(RUNS)
        if run is not None and (found := newest(run)) is not None:
            return found
        if resume == "auto":
            return None
        where = f"{run} has no checkpoint" if run is not None else f"there is no run in {RUNS}/"
        raise ValueError(f"--resume latest: {where}; --resume auto starts afresh then")
    path = Path(resume)
    if (path / INDEX).exists():
        return path
    if not path.is_dir():
        raise ValueError(f"--resume {resume}: no such run folder (or latest, or auto)")
    found = newest(path)
    if found is None:
        raise ValueError(f"--resume {resume}: no checkpoint in it")
    return found


def run_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint folder."""
    return checkpoint.parent.parent


def saved_config(run: Path) -> Path | None:
    """The config file of a run folder, None if it has none."""
    path = run / CONFIG
    return path if path.is_file() else None


def inherited(path: Path) -> dict[str, Any]:
    """The tables of a run's config file, without what belonged to that one call."""
    tables = toml.read(path)
    tables["run"] = {key: value for key, value in tables.get("run", {}).items() if key not in _NOT_INHERITED}
    return tables


def start_of(config: Config, checkpoint: Path | None, now: float | None = None) -> Start:
    """Where the run goes: run.dir; else the folder it goes on from; else runs/<date>-<layout>."""
    if config.run.dir is not None:
        return Start(Path(config.run.dir), checkpoint)
    if checkpoint is not None:
        return Start(run_of(checkpoint), checkpoint)
    stamp = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(now))
    return Start(RUNS / f"{stamp}-{short_name(config)}")


def short_name(config: Config) -> str:
    """The layout in a folder's name: `dp2-tp2`."""
    return config.layout.mesh.describe().replace("=", "").replace(",", "-")


def check_folder(start: Start, overwrite: bool) -> None:
    """Raise ValueError if the run may not write there."""
    folder = start.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run.dir = {str(folder)!r} is a file; give a folder")
    if start.goes_on_in_place or not folder.is_dir() or all(path.name in _BEFORE for path in folder.iterdir()):
        parent = next(place for place in (folder, *folder.resolve().parents) if place.exists())
        if not parent.is_dir():
            raise ValueError(f"run.dir = {str(folder)!r}: {parent} is a file; give a folder")
        if start.goes_on_in_place and (folder / SUMMARY).exists():
            read_summary(folder)  # refuses one of a newer version
        if not os.access(parent, os.W_OK):
            raise ValueError(f"run.dir = {str(folder)!r}: {parent} is not writable")
        return
    if not overwrite:
        raise ValueError(f"run folder {folder} exists: --resume {folder} goes on with it, --overwrite replaces it")
    strange = sorted(path.name for path in folder.iterdir() if path.name not in _OWN)
    if strange:
        raise ValueError(f"run folder {folder} holds {strange[0]}, which no run wrote: it is not overwritten")


def ready(folder: Path) -> Callable[[], None]:
    """Make room for the ledgers of a run that sets up. The returned function takes back what was made here, as long as
    the run has not come to its first step.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    for name in _BEFORE[1:]:
        (folder / name).unlink(missing_ok=True)
    (folder / LEDGER).mkdir(parents=True, exist_ok=True)

    def undo() -> None:
        if made and all(path.name in _BEFORE for path in folder.iterdir()):
            durable.remove(folder)
            for path in made[1:]:
                path.rmdir()

    return undo


def create(start: Start, config: Config) -> None:
    """Make the folder, or ready it for going on: later checkpoints and metrics are set aside. One rank calls this."""
    folder = start.folder
    if start.goes_on_in_place and start.checkpoint is not None:
        step = Index.open(start.checkpoint).step
        for later, path in saved_steps(folder).items():
            if later > step:  # of a future that will not happen: kept, but no longer the newest
                durable.rename(path, _free_name(path.with_name(f"{path.name.strip('.')}.abandoned")))
        _cut_metrics(folder / METRICS, step)
    else:
        for name in _OWN:
            if name not in _BEFORE:  # which is of this run: `ready`
                durable.remove(folder / name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).touch()
        for path in (folder / LEDGER).glob("rank-*.json"):
            path.unlink()
    (folder / LEDGER).mkdir(exist_ok=True)
    (folder / CONFIG).write_text(config.to_toml(), encoding="utf-8")
    (folder / LAYOUT).write_text(config.layout.to_toml(), encoding="utf-8")
    write_summary(folder, {"status": "running"})
    point_latest(folder)


def _free_name(path: Path) -> Path:
    number = 2
    free = path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _cut_metrics(path: Path, step: int) -> None:
    """Keep the metrics of steps up to `step`."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if _is_metric(line) and json.loads(line)["step"] <= step]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    partial.replace(path)


def _is_metric(line: str) -> bool:
    """Whether the line is whole: the last one of a killed run may not be."""
    return line.startswith("{") and line.endswith("}")


def write_summary(folder: Path, body: Mapping[str, Any]) -> None:
    """Write summary.json, whole or not at all; numbers that JSON cannot hold (nan, inf) become null."""
    text = json.dumps({"schema": "crosscut.run", "format_version": FORMAT_VERSION, **_finite(dict(body))}, indent=2)
    partial = folder / (SUMMARY + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(folder / SUMMARY)


def read_summary(folder: Path) -> dict[str, Any]:
    """The content of summary.json. Raises ValueError if it is missing, damaged or of a newer version."""
    path = folder / SUMMARY
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no {SUMMARY}; it is no run folder") from None
    except ValueError:
        raise ValueError(f"{path}: damaged") from None
    if body.get("format_version", 0) > FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {body['format_version']} is newer than {FORMAT_VERSION}; update crosscut"
        )
    return dict(body)


def mark(folder: Path, status: str) -> None:
    """Change the status in summary.json: "interrupted", "failed"."""
    if (folder / SUMMARY).exists():
        body = read_summary(folder)
        write_summary(folder, {**body, "status": status})


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def point_latest(folder: Path) -> None:
    """Let `latest` beside the run folder name it: a symbolic link, or where there are none a file with the name."""
    link = folder.parent / LATEST
    if folder.name == LATEST or (link.is_dir() and not link.is_symlink()):
        return
    partial = folder.parent / f".{LATEST}.partial"
    durable.remove(partial)
    try:
        partial.symlink_to(folder.name, target_is_directory=True)
    except OSError:
        partial.write_text(folder.name, encoding="utf-8")
    os.replace(partial, link)


def latest_run(root: Path) -> Path | None:
    """The run folder that `root/latest` names, None if there is none."""
    link = root / LATEST
    if link.is_file():
        run = root / link.read_text(encoding="utf-8").strip()
        return run if run.is_dir() else None
    return root / os.readlink(link) if link.is_symlink() and link.is_dir() else None
