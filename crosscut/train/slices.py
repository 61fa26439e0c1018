"""Where the pieces of a cut tensor lie in the whole, and how to copy from pieces cut one way to pieces cut another.

A rank's piece of a tensor is given per dim by the [start, stop) ranges of the whole that it holds, in order; its local
tensor is those ranges side by side. A fused dim has several ranges. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from crosscut.layout.plan import ParamPlan, Range, Ranges


def local_shape(ranges: Ranges) -> tuple[int, ...]:
    """The shape of the local tensor."""
    return tuple(sum(stop - start for start, stop in dim) for dim in ranges)


def whole(shape: tuple[int, ...]) -> Ranges:
    """The ranges of the whole tensor."""
    return tuple(((0, size),) for size in shape)


def overlaps(saved: Ranges, wanted: Ranges) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes that both pieces hold, each as slices into the saved and into the wanted local tensor."""
    per_dim = [list(_overlaps_1d(s, w)) for s, w in zip(saved, wanted, strict=True)]
    for box in product(*per_dim):
        yield (
            tuple(slice(source, source + width) for source, _, width in box),
            tuple(slice(target, target + width) for _, target, width in box),
        )


def _overlaps_1d(saved: tuple[Range, ...], wanted: tuple[Range, ...]) -> Iterator[tuple[int, int, int]]:
    """(offset in the saved dim, offset in the wanted dim, width) of each common stretch."""
    source = 0
    for s_start, s_stop in saved:
        target = 0
        for w_start, w_stop in wanted:
            start, stop = max(s_start, w_start), min(s_stop, w_stop)
            if start < stop:
                yield source + start - s_start, target + start - w_start, stop - start
            target += w_stop - w_start
        source += s_stop - s_start


def box_size(box: tuple[slice, ...]) -> int:
    """The number of elements of a box of slices."""
    return math.prod(part.stop - part.start for part in box)


def writes(param: ParamPlan, cutting: Iterable[str], coords: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Whether the rank at `coords` is the one of those with the same piece that saves it.

    It is the one at coordinate 0 of every axis that replicates the piece, on the first of the stages that hold it.
    `cutting`: the axes that cut what is saved: the parameter's, with those of its store, or none for a scalar of it.
    """
    if coords["pp"] != param.stages[0] % sizes["pp"]:
        return False
    return all(coords[axis] == 0 for axis in sizes if axis != "pp" and axis not in cutting)
