"""Small plain Python values between the ranks of a group, pickled."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from crosscut.comm.group import Group


def all_gather_object(group: Group, value: Any, *, tag: str = "objects") -> list[Any]:
    """Every rank's `value`, in rank order (kind "control"). For small plain things among one's own ranks."""
    if group.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(group.device)
    # Sizes are int64: a count of bytes does not fit 32 bits in general.
    sizes = torch.zeros(group.size, dtype=torch.int64, device=group.device)
    sizes[group.rank] = data.numel()
    group.all_reduce(sizes, tag=f"{tag}/sizes", kind="control")
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=group.device)
    padded[: data.numel()] = data
    rows = group.all_gather(padded, tag=tag, kind="control").view(group.size, -1).cpu()
    return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]
