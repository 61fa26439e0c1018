"""What needs the whole of a sharded module: its parameters and its optimizer's state, to look at, save and load; the
gradient norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.parallel import clip
from crosscut.parallel.chunks import collect
from crosscut.parallel.shard import Piece, rows_of
from crosscut.parallel.standalone.data_parallel import WRAP
from crosscut.parallel.standalone.fully_shard import _Wrap
from crosscut.parallel.standalone.ranks import owner
from crosscut.parallel.standalone.units import SHARDED, AverageUnit


@contextlib.contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """Within it the parameters of a module under fully_shard are whole, under their own names and in the module's own
    dtype: to be looked at, changed, or evaluated with. What is in them at the end is kept. Collective; every rank makes
    the same changes. They take no gradients.
    """
    wraps = _wraps(module, "full_parameters")
    for wrap in wraps:
        wrap.release()
        wrap.full = True
        for unit in wrap.units:
            unit.put_full()
    try:
        yield
    finally:
        for wrap in wraps:
            wrap.full = False
            for unit in wrap.units:
                unit.take_full()


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` of the whole module, as if never wrapped. Collective; the same on every rank."""
    with full_parameters(module):
        own = {p.data_ptr() for p in module.parameters() if owner(p) is None}  # nobody else's: no copy is needed
        state = module.state_dict()
        return {k: v.clone() if isinstance(v, Tensor) and v.data_ptr() not in own else v for k, v in state.items()}


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """`module.load_state_dict` of a whole state, the same on every rank. Collective."""
    with full_parameters(module):
        return module.load_state_dict(state, strict=strict)


@torch.no_grad()
def full_optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` as it would be over the whole parameters of a module under fully_shard. Collective; the
    same on every rank. It knows no number of ranks: an optimizer of the unwrapped module loads it too.
    """
    pieces, out = _pieces(module, "full_optimizer_state_dict"), optimizer.state_dict()
    for index, p in enumerate(_params(optimizer)):
        if index in out["state"] and id(p) in pieces:
            unit, piece = pieces[id(p)]
            state = out["state"][index]
            out["state"][index] = {key: _whole(unit, piece, value) for key, value in state.items()}
    return out


@torch.no_grad()
def load_full_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """`optimizer.load_state_dict` of a whole state: each rank takes its rows."""
    pieces, params = _pieces(module, "load_full_optimizer_state_dict"), _params(optimizer)
    given = len([index for group in state["param_groups"] for index in group["params"]])
    if given != len(params):
        raise ValueError(
            f"load_full_optimizer_state_dict: the state is of {given} parameters, this optimizer has {len(params)}; "
            f"make it over the same parameters"
        )
    cut = {}
    for index, found in state["state"].items():
        unit, piece = pieces.get(id(params[index]), (None, None))
        cut[index] = {
            key: rows_of(value, unit.group).clone()
            if unit and piece and isinstance(value, Tensor) and value.dim() and value.shape == piece.whole.shape
            else value
            for key, value in found.items()
        }
    optimizer.load_state_dict({**state, "state": cut})


def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a module under fully_shard so that their norm over the whole module is at most max_norm.

    Returns the norm before, 0-d, the same on every rank: each number is counted once, by the rank that holds it.
    (torch.nn.utils.clip_grad_norm_ would take the norm of this rank's shards.) Collective.
    """
    wraps = _wraps(module, "clip_grad_norm_")
    for name, p in module.named_parameters():
        if owner(p) != SHARDED:
            raise ValueError(f"clip_grad_norm_: {name!r} is not under fully_shard; wrap the whole module")
    group, params = wraps[0].group, list(module.parameters())
    counted = [p.grad for p in params if p.grad is not None and (p.dim() > 0 or group.rank == 0)]
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
    norm = clip.global_norm(counted, group, norm_type, dtype, "step")
    clip.scale_gradients(params, norm, max_norm)
    return norm


def _pieces(module: nn.Module, what: str) -> dict[int, tuple[AverageUnit, Piece]]:
    """Where each shard belongs, by its id."""
    return {id(p.shard): (u, p) for wrap in _wraps(module, what) for u in wrap.units for p in u.pieces}


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """In the order in which a state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _whole(unit: AverageUnit, piece: Piece, value: Any) -> Any:
    """A piece of state of the whole parameter: gathered where it is one number for each of the shard's."""
    if not isinstance(value, Tensor) or value.shape != piece.shard.shape:
        return value.clone() if isinstance(value, Tensor) else value
    row = value.new_zeros(piece.width)
    row[: value.numel()] = value.reshape(-1)
    rows = unit.group.all_gather(row, tag="optimizer/state", kind="control")
    whole = value.new_empty(piece.whole.shape)
    collect(rows.view(unit.group.size, piece.width), whole)
    return whole


def _wraps(module: nn.Module, what: str) -> list[_Wrap]:
    found = [m.__dict__[WRAP] for m in module.modules() if isinstance(m.__dict__.get(WRAP), _Wrap)]
    if not found:
        raise ValueError(f"{what}: {type(module).__name__} is not under fully_shard; wrap it first")
    return found
