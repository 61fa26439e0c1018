"""`capture`: write what a step of any training program computed, so that `crosscut parity compare` can judge it.

    from crosscut.testing import capture
    ...
    optimizer.step()
    capture(model, optimizer, "run/", loss=loss)     # here: gradients are still there, parameters are updated
    optimizer.zero_grad()

Works in any torch.distributed program, and without one. Which part of a parameter a rank holds is read from DTensor
placements (FSDP2, tensor parallel), from a `crosscut.DistributedModel` and from `crosscut.fully_shard`; a plain tensor
counts as replicated (DDP) unless `names` says otherwise. Each step is one folder of safetensors files and an index,
whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from crosscut.testing.factors import Ranges
from crosscut.testing.held import Names, Record, computes, coordinates, records_of

if TYPE_CHECKING:
    from crosscut.comm.context import Context

FORMAT_VERSION = 1
INDEX = "index.json"
# optimizer (one a rank) -> (rank, folder) -> (steps taken, steps to take)
_calls: WeakKeyDictionary[Any, dict[tuple[int, str], tuple[int, int]]] = WeakKeyDictionary()


def capture(
    model: Any,
    optimizer: torch.optim.Optimizer,
    folder: str | os.PathLike[str],
    loss: Any = None,
    *,
    grad_norm: Any = None,
    steps: int = 3,
    names: Names | None = None,
    ctx: Context | None = None,
) -> bool:
    """Write loss, gradients and updated parameters of this step to `folder`; called on every rank between
    `optimizer.step()` and `optimizer.zero_grad()`. Only the first `steps` calls write; later ones return False at once.

    loss: this rank's loss, or (loss, num_tokens) where ranks may hold unequal numbers of tokens. grad_norm: what
    clipping returned. names: for shards that are plain tensors, name -> (name in the whole model, slice or a tuple of
    slices, one a dim, with start and stop). ctx: a `crosscut.Context`, where ranks are not those of torch.distributed.

    A folder that holds an older capture is replaced. Raises ValueError, on every rank, for a folder with something else
    in it or with the captures of another optimizer that has steps to come, a slice that does not fit its tensor, a disk
    that is full, and FSDP1's flat parameters.
    """
    _check(model, optimizer, folder, steps, names)
    root = Path(folder).absolute()
    ranks = _Ranks(ctx or getattr(model, "ctx", None))
    key, done = (ranks.rank, str(root)), _calls.setdefault(optimizer, {})
    step = done.get(key, (0, steps))[0]
    if step >= steps:
        return False
    done[key] = step + 1, steps
    hidden = ranks.unfinished = root / f".step-{step}.tmp"
    records: list[Record] = []
    meta: dict[str, Any] = {}
    # A ShardedOptimizer averages by itself, and leaves `.grad` as it was.
    reduced: Mapping[Tensor, Tensor] = getattr(optimizer, "averaged_gradients", dict)()

    def look() -> dict[str, Any]:
        if any(o is not optimizer and key in d and d[key][0] < d[key][1] for o, d in _calls.items()):
            raise ValueError(
                f"{root} takes another optimizer's captures in this program; give each a folder of its own"
            )
        if ranks.rank == 0:
            _prepare(root, hidden, fresh=step == 0)
        records.extend(records_of(model, names, reduced))
        return {"calls": step, **_meta(records, model, optimizer, loss, grad_norm, ranks)}

    metas = ranks.together(look)
    if any(m["calls"] != metas[0]["calls"] for m in metas):
        raise ValueError(f"capture: ranks are at their calls {[m['calls'] for m in metas]}; call it on all or on none")
    owners = _owners(metas)
    meta = _index(metas, owners, step)

    def write() -> None:
        from safetensors.torch import save_file

        own = {
            f"{kind}/{name}": local.detach().cpu().contiguous().clone()
            for (kind, name, _, ranges, local), m in zip(records, metas[ranks.rank]["tensors"], strict=True)
            if owners[kind, name, ranges, m[5]] == ranks.rank
        }
        save_file(own, hidden / f"rank-{ranks.rank}.safetensors")

    ranks.together(write)

    def publish() -> None:
        if ranks.rank == 0:
            meta["files"] = {p.name: p.stat().st_size for p in sorted(hidden.glob("*.safetensors"))}
            (hidden / INDEX).write_text(json.dumps(meta), encoding="utf-8")
            os.replace(hidden, root / f"step-{step}")

    ranks.together(publish)
    return True


def _check(model: Any, optimizer: Any, folder: Any, steps: int, names: Any) -> None:
    """Raise ValueError for arguments of another kind."""
    module = nn.Module if not hasattr(model, "held_ranges") else object  # a DistributedModel
    wanted = (model, module), (optimizer, torch.optim.Optimizer), (folder, str | os.PathLike)
    for (given, kind), what in zip(wanted, ("model", "optimizer", "folder"), strict=True):
        if not isinstance(given, kind):
            raise ValueError(f"capture: the {what} is a {type(given).__name__}; call capture(model, optimizer, folder)")
    if steps < 1:
        raise ValueError(f"capture: steps={steps} writes nothing; use 1 or more")
    if names is not None and not (
        isinstance(names, Mapping) and all(isinstance(v, tuple) and len(v) == 2 for v in names.values())
    ):
        raise ValueError(f"capture: names={names!r:.60} must map a name to (name in the whole model, slice or slices)")


class _Ranks:
    """The ranks of the program: those of a Context, of torch.distributed, or one."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.unfinished: Path | None = None  # what goes if the work fails
        distributed = ctx is None and dist.is_available() and dist.is_initialized()
        self.rank = ctx.rank if ctx is not None else dist.get_rank() if distributed else 0
        self.size = ctx.world_size if ctx is not None else dist.get_world_size() if distributed else 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        if self.ctx is not None:
            return self.ctx.all_gather_object(value, tag="capture")
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Local work of every rank; what each returned. If it fails on one, every rank raises."""
        mine: tuple[str | None, Any] = (None, None)
        try:
            mine = (None, work())
        except Exception as error:  # whatever it is: the other ranks wait
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.filename:
                said = f"{error.strerror}: {error.filename}"
            elif isinstance(error, SafetensorError):
                said = f"{self.unfinished}: {error}"
            mine = (str(error) if isinstance(error, ValueError) else said, None)
        both = self.gather(mine)
        for rank, (said, _) in enumerate(both):
            if said is not None:
                if self.rank == 0 and self.unfinished is not None:
                    shutil.rmtree(self.unfinished, ignore_errors=True)
                raise ValueError(f"capture: {said}" + (f" (rank {rank})" if self.size > 1 else ""))
        return [value for _, value in both]


def _prepare(root: Path, hidden: Path, fresh: bool) -> None:
    """An empty hidden folder for this step; at the first step what an older capture left goes."""
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file; give a folder")
    if fresh and root.is_dir():
        other = [p.name for p in root.iterdir() if not p.name.lstrip(".").startswith("step-")]
        if other:
            raise ValueError(f"{root} holds {sorted(other)[0]!r}, which is no capture; give a folder of its own")
        for path in root.iterdir():
            shutil.rmtree(path)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)


# ---- the index ------------------------------------------------------------------------------------------------------


def _meta(records: Sequence[Record], model: Any, optimizer: Any, loss: Any, grad_norm: Any, ranks: _Ranks) -> dict:
    value, tokens = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    lrs = sorted({float(g["lr"]) for g in optimizer.param_groups if "lr" in g})
    plain = optimizer.param_groups[0]
    return {
        "tensors": [(k, n, s, r, str(x.dtype).removeprefix("torch."), digest(x)) for k, n, s, r, x in records],
        "loss": None if value is None else _number(value),
        "tokens": None if tokens is None else _count(tokens),
        "grad_norm": None if grad_norm is None else _number(grad_norm),
        "place": coordinates(model, ranks.rank, ranks.size),
        "computes": computes(model),
        "optimizer": {
            "class": type(getattr(optimizer, "inner", optimizer)).__name__,
            "lr": lrs,
            **{k: plain[k] for k in ("momentum", "weight_decay", "nesterov") if k in plain},
        },
    }


def _number(x: Any) -> float:
    """A float of a number, a tensor or a DTensor of one number."""
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    try:
        return float(x.detach()) if isinstance(x, Tensor) else float(x)
    except (TypeError, ValueError, RuntimeError):
        shown = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{shown:.60} is no number; loss is one number or (loss, num_tokens)") from None


def _count(tokens: Any) -> int:
    if (count := int(tokens)) < 0:
        raise ValueError(f"loss=(loss, num_tokens): num_tokens is {count}")
    return count


def digest(x: Tensor) -> str:
    """A digest of a tensor's bytes: ranks that hold the same numbers need to write them once."""
    flat = x.detach().cpu().contiguous().reshape(-1).clone()  # numpy makes memory that it sees impossible to resize
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def _owners(metas: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, Ranges, str], int]:
    """Which rank writes a piece: the first that holds it."""
    owners: dict[tuple[str, str, Ranges, str], int] = {}
    for rank, meta in enumerate(metas):
        for kind, name, _, ranges, _, key in meta["tensors"]:
            owners.setdefault((kind, name, ranges, key), rank)
    return owners


def _index(metas: Sequence[Mapping[str, Any]], owners: Mapping[Any, int], step: int) -> dict[str, Any]:
    """Everything about the step but the numbers. Pieces of a tensor: ranges, the file, the ranks that hold it."""
    tensors: dict[str, dict[str, Any]] = {"gradient": {}, "parameter": {}}
    for rank, meta in enumerate(metas):
        for kind, name, shape, ranges, dtype, key in meta["tensors"]:
            stops = [max((b for _, b in dim), default=0) for dim in ranges]
            entry = tensors[kind].setdefault(name, {"shape": list(shape or stops), "dtype": dtype, "pieces": []})
            if len(entry["shape"]) != len(stops):
                raise ValueError(f"capture: {name} has {len(stops)} dims on rank {rank}, but not on all ranks")
            entry["shape"] = [max(pair) for pair in zip(entry["shape"], shape or stops, strict=True)]
            where = {"ranges": ranges, "file": f"rank-{owners[kind, name, ranges, key]}.safetensors"}
            piece = next((p for p in entry["pieces"] if {k: p[k] for k in where} == where), None)
            if piece is None:
                entry["pieces"].append({**where, "key": f"{kind}/{name}", "ranks": [rank]})
            else:
                piece["ranks"].append(rank)
    return {
        "schema": "crosscut.capture",
        "format_version": FORMAT_VERSION,
        "step": step,
        "world_size": len(metas),
        "losses": [[m["loss"], m["tokens"]] for m in metas],
        "grad_norms": [m["grad_norm"] for m in metas],
        "places": [m["place"] for m in metas],
        "optimizer": metas[0]["optimizer"],
        "computes": sorted({dtype for m in metas for dtype in m["computes"]}),
        "tensors": tensors,
    }
