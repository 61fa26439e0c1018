"""PyTorch's Flight Recorder dumps (NCCL's and Gloo's) as rings, so that one autopsy reads both. No torch.

A dump is what `torch._C._distributed_c10d._dump_fr_trace()` gives and what torch writes to `<prefix><rank>` when a
collective times out: a pickled dictionary, or JSON.
Gloo's entries stay "scheduled" after completion, so who is late is told from
sequence numbers, not from states. Dumps hold neither the reduction nor the root of a call: those cannot be compared.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

from crosscut.comm.call import Call
from crosscut.comm.site import short_path
from crosscut.watch.reading import Lane, Record, Ring
from crosscut.watch.ring import RUNNING

MAJOR = "2."
_OPS = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter", "alltoall": "all_to_all"}
_ALL = re.compile(
    r"^(all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast|reduce|gather|scatter|barrier)", re.I
)
_PEER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class _Plain(pickle.Unpickler):
    """Dictionaries, lists, strings and numbers: a dump needs nothing else, and a pickle could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_dumps(folder: Path) -> dict[int, Ring]:
    """The rings of a folder of dumps, by rank: the digits at the end of a file's name. {} if there is none.

    Raises ValueError for a dump that is damaged or of another version.
    """
    files = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        found = re.search(r"(\d+)(\.json|\.pkl|\.pickle)?$", path.name)
        if path.is_file() and found and (data := _load(path)) is not None:
            files[int(found[1])] = (path, data)
    members: dict[str, set[int]] = {}
    for rank, (_, data) in files.items():
        for entry in data["entries"]:
            members.setdefault(str(entry["process_group"][0]), set()).add(rank)
    return {rank: _ring(path, rank, len(files), data, members) for rank, (path, data) in files.items()}


def _load(path: Path) -> dict[str, Any] | None:
    """A dump, None if the file is something else."""
    raw = path.read_bytes()
    try:
        data = json.loads(raw) if raw[:1] in (b"{", b" ") else _Plain(io.BytesIO(raw)).load()
    except (ValueError, EOFError, pickle.UnpicklingError, IndexError, KeyError, AttributeError):
        return None
    if not isinstance(data, dict) or "entries" not in data or "pg_config" not in data:
        return None
    if not str(data.get("version", "")).startswith(MAJOR):
        raise ValueError(f"{path}: version {data.get('version')!r} of the Flight Recorder is unknown; this reads 2.x")
    return data


def _ring(path: Path, rank: int, size: int, data: dict[str, Any], members: dict[str, set[int]]) -> Ring:
    ring = Ring(path, rank, size, ended=RUNNING)
    counts: dict[tuple[Any, ...], int] = {}
    for number, entry in enumerate(sorted(data["entries"], key=lambda one: one["record_id"]), 1):
        name, desc = (str(part) for part in entry["process_group"][:2])
        config = data["pg_config"].get(name, {})
        listed = re.findall(r"\d+", str(config.get("ranks", "")))
        ranks = tuple(map(int, listed)) if listed else tuple(sorted(members[name]))
        label = "world" if desc == "default_pg" else desc if desc and desc != "undefined" else f"group {name}"
        lane = Lane(label, ranks, int(name) if name.isdigit() else 0)
        op, peer = _op(str(entry["profiling_name"]), rank, ranks)
        seq = int(entry["collective_seq_id"])
        if peer is not None:
            counts[lane, op, peer] = seq = counts.get((lane, op, peer), 0) + 1
        sizes, dtypes = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
        shape: Any = tuple(sizes[0]) if len(sizes) == 1 else tuple(map(tuple, sizes))
        call = Call(op, label, "", "step", _site(entry["frames"]), seq, shape, str(dtypes[0]).lower(), peer=peer)
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        created = int(entry["time_created_ns"])
        ended = entry.get("time_discovered_completed_ns") or created
        ring.records.append(
            Record(number, lane, call, 0, 0, created, 0, int(ended) if done else 0, is_async=True, own_rank=rank)
        )
        if peer is None:
            ring.last_seq[lane] = seq
    ring.entered = max((int(entry["record_id"]) + 1 for entry in data["entries"]), default=0)
    return ring


def _op(profiled: str, rank: int, ranks: tuple[int, ...]) -> tuple[str, int | None]:
    """`gloo:all_reduce` or `nccl:send 0->1` as op and peer within the group."""
    name = profiled.partition(":")[2] or profiled
    pair = _PEER.match(name)
    if pair:
        one, two = int(pair[2]), int(pair[3])
        own = ranks.index(rank) if rank in ranks else rank
        return pair[1], two if one == own else one
    found = _ALL.match(name)
    return _OPS.get(name, found[1] if found else name), None


def _site(frames: list[dict[str, Any]]) -> str:
    """The innermost frame that is not torch's."""
    for frame in frames:
        if "/torch/" not in frame["filename"]:
            return f"{short_path(frame['filename'])}:{frame['line']}"
    return ""
