"""Guards for async calls: a result read too early is NaN, an input changed too early is an error.

Between an async call and its `wait()` the tensors belong to the call. On a real network a rank that breaks this reads
or sends whatever happens to be there, sometimes; here it fails every time, naming the call.
"""

from __future__ import annotations

import torch

from crosscut.comm.call import Call
from crosscut.comm.dtypes import flat
from crosscut.comm.errors import CommError


def poison(x: torch.Tensor) -> None:
    """Fill with NaN, or with the smallest integer (True for bool)."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        x.fill_(float("nan"))
    elif x.dtype == torch.bool:
        x.fill_(True)
    else:
        x.fill_(torch.iinfo(x.dtype).min)


class Guard:
    """Watches one tensor from an async call to its wait. `writes`: the call will write it, so it is poisoned."""

    def __init__(self, x: torch.Tensor, call: Call, *, writes: bool) -> None:
        self._x = x.detach()
        self._call = call
        self._writes = writes
        if writes:
            poison(self._x)
        self._before = _bits(self._x).clone()

    def check(self) -> None:
        """Raise CommError if the tensor changed since."""
        if not torch.equal(_bits(self._x), self._before):
            role = "result" if self._writes else "input"
            raise CommError(
                f"the {role} of async {self._call.where()} was changed before wait(): "
                f"call wait() on its handle before writing to the tensor"
            )


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN equals NaN."""
    return flat(x).view(torch.uint8)
