"""Which rows of a global batch a rank computes on.

The global batch is divided into micro-batches first and each of them over the batch axes, so that the order of the data
never depends on the layout: micro-batch m holds the same samples whatever dp is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from crosscut.comm.context import Context
    from crosscut.layout.layout import Layout

IGNORE = -100  # torch's own default ignore_index: such labels are not tokens of the loss


@dataclass(frozen=True)
class MicroBatch:
    """This rank's rows of one micro-batch: inputs (b, ...), labels (b, ...), positions (S,) or (b, S), or None."""

    inputs: Tensor
    labels: Tensor
    positions: Tensor | None = None

    @property
    def num_terms(self) -> int:
        """How many terms the mean of the loss has here: valid tokens for integer labels, else rows."""
        if self.labels.is_floating_point() or self.labels.ndim == 0:
            return self.inputs.size(0)
        return int((self.labels != IGNORE).sum())


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch, a MicroBatch for each micro-batch of the schedule."""

    micro: tuple[MicroBatch, ...]


def local_batch(
    inputs: Tensor, labels: Tensor | None, layout: Layout, ctx: Context, positions: Tensor | None = None
) -> Batch:
    """Cut a global batch (dim 0 = rows, the same on every rank) for this rank; copies it to the rank's device.

    inputs (B, ...), labels (B, ...) or None (a loss without labels). positions: (S,), (B, S), or None; for token ids
    (integer inputs of two dims) None counts from 0. Raises ValueError if B does not divide.
    """
    if ctx.mesh != layout.mesh:
        ctx.set_mesh(layout.mesh)
    labels = inputs if labels is None else labels
    if labels.size(0) != inputs.size(0):
        raise ValueError(f"labels have {labels.size(0)} rows and inputs {inputs.size(0)}; they must agree")
    if positions is None and inputs.ndim == 2 and not inputs.is_floating_point():
        positions = torch.arange(inputs.size(1))
    index, count = 0, 1
    for axis in layout.batch_axes:  # outermost first
        size = layout.mesh.size(axis)
        index, count = index * size + ctx.coords[axis], count * size
    rows, num_micro = inputs.size(0), layout.micro_batches
    if rows % (num_micro * count):
        raise ValueError(
            f"a global batch of {rows} rows cannot be cut into micro_batches={num_micro} x "
            f"{'+'.join(layout.batch_axes) or 'dp'}={count}; use a multiple of {num_micro * count}"
        )
    width = rows // (num_micro * count)

    def cut(x: Tensor, micro: int) -> Tensor:
        start = (micro * count + index) * width
        return x[start : start + width].to(ctx.device)

    return Batch(
        tuple(
            MicroBatch(
                cut(inputs, m),
                cut(labels, m),
                None if positions is None else positions.to(ctx.device) if positions.ndim == 1 else cut(positions, m),
            )
            for m in range(num_micro)
        )
    )


def batches(data: Iterable[tuple[Tensor, Tensor | None]], layout: Layout, ctx: Context) -> Iterator[Batch]:
    """Cut each global (inputs, labels) of `data` for this rank. Every rank iterates over the same global batches."""
    for inputs, labels in data:
        yield local_batch(inputs, labels, layout, ctx)
