"""What needs the whole of a sharded module: looking at its parameters, saving and loading them, the gradient norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.parallel import clip
from crosscut.parallel.standalone.data_parallel import WRAP
from crosscut.parallel.standalone.fully_shard import _Wrap
from crosscut.parallel.standalone.ranks import owner
from crosscut.parallel.standalone.units import SHARDED


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


def _wraps(module: nn.Module, what: str) -> list[_Wrap]:
    found = [m.__dict__[WRAP] for m in module.modules() if isinstance(m.__dict__.get(WRAP), _Wrap)]
    if not found:
        raise ValueError(f"{what}: {type(module).__name__} is not under fully_shard; wrap it first")
    return found
