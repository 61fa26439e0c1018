"""A tensor as N equal chunks, one a rank: how it travels in a reduce_scatter and comes out of an all_gather."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(whole: Tensor | None, chunks: Tensor) -> None:
    """Write `whole` into the (N, width) `chunks` in order, and zeros after its end. None counts as zeros."""
    if whole is None:
        chunks.zero_()
        return
    flat = whole.reshape(-1)
    full, left = _full_chunks(flat, chunks)
    chunks[:full].copy_(flat[: flat.numel() - left].view(full, chunks.size(1)))
    chunks[full:].zero_()
    if left:
        chunks[full, :left].copy_(flat[-left:])


def collect(chunks: Tensor, whole: Tensor) -> None:
    """Fill `whole` with (N, width) `chunks` in order; what they hold after its end is padding."""
    flat = whole.view(-1) if whole.is_contiguous() else torch.empty_like(whole.reshape(-1))
    full, left = _full_chunks(flat, chunks)
    flat[: flat.numel() - left].view(full, chunks.size(1)).copy_(chunks[:full])
    if left:
        flat[-left:].copy_(chunks[full, :left])
    if not whole.is_contiguous():
        whole.copy_(flat.view(whole.shape))


def _full_chunks(flat: Tensor, chunks: Tensor) -> tuple[int, int]:
    """How many chunks `flat` fills, and the numbers that are left for the next."""
    return divmod(flat.numel(), chunks.size(1)) if chunks.size(1) else (0, 0)
