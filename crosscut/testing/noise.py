"""How far correct runs are apart below fp64: the one-device step with its sums in other orders, against fp64.

Parallel code adds the same numbers in other orders: over micro-batches and data ranks (rows), over tensor ranks (the
inner dim of a product, in forward and for the gradient of the input). So the reference is run with its rows in other
orders and pieces, and with every Linear's inner products split and added up piece by piece. The largest distance of
these runs from the fp64 run is the noise of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from crosscut.testing.parity import Builder, GlobalBatch, LossFn, OneDevice, single_device
from crosscut.testing.verdict import Key, Trace, noise_bounds

ORDERS = ((1, 1), (2, 1), (1, 2), (2, 3), (4, 2), (8, 4))  # (pieces of rows, pieces of each inner product)


class SplitSums(TorchFunctionMode):
    """Computes every F.linear as tensor ranks do: the weight's rows in `pieces`, whose gradients of the input are added
    up, and for each of them a sum of `pieces` products over parts of the inner dim."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or self.pieces == 1:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = [self._product(input, part) for part in weight.chunk(self.pieces)]
        out = torch.cat(rows, -1)
        return out if bias is None else out + bias

    def _product(self, input: Tensor, weight: Tensor) -> Tensor:
        parts = zip(input.chunk(self.pieces, -1), weight.chunk(self.pieces, -1), strict=True)
        first, *rest = [x @ w.T for x, w in parts]
        for part in rest:
            first = first + part
        return first


def noisy_reference(
    build: Builder, batches: Sequence[GlobalBatch], loss_fn: LossFn, dtype: torch.dtype, **options: Any
) -> tuple[Trace, dict[Key, float]]:
    """(the fp64 reference, the bound of each tensor for a run in `dtype`). All that is compared is fp32 at least, also
    where the module computes in bf16: one rounding is one of that."""
    ref = single_device(build, batches, loss_fn, **options)
    runs = [reordered(build, batches, loss_fn, dtype, i, *order, **options) for i, order in enumerate(ORDERS)]
    return ref, noise_bounds(ref, runs, torch.finfo(torch.promote_types(dtype, torch.float32)).eps)


def reordered(
    build: Builder, batches: Sequence[GlobalBatch], loss_fn: LossFn, dtype: torch.dtype, order: int, pieces: int,
    split: int, **options: Any,
) -> Trace:  # fmt: skip
    """The one-device steps in `dtype`: rows in the random order number `order` and added up in `pieces`, each inner
    product in `split`."""
    run = OneDevice(build, loss_fn, dtype=dtype, **options)
    for batch in batches:
        rows = torch.randperm(batch[0].size(0), generator=torch.Generator().manual_seed(order))
        with SplitSums(split):
            run.step(batch, rows.chunk(min(pieces, len(rows))))
    return run.trace
