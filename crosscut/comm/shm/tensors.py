"""From torch.distributed's arguments to what the channel moves: flat contiguous tensors and names of reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.dtypes import flat
from crosscut.comm.shm import reduce
from crosscut.comm.shm.operation import Steps

Tensor = torch.Tensor
_TYPE: Any = dist.ReduceOp.RedOpType
_OPS = {  # by number: hashing torch's own costs three times as much
    _TYPE.SUM.value: "sum",
    _TYPE.AVG.value: "avg",
    _TYPE.PRODUCT.value: "prod",
    _TYPE.MIN.value: "min",
    _TYPE.MAX.value: "max",
    _TYPE.BAND.value: "band",
    _TYPE.BOR.value: "bor",
    _TYPE.BXOR.value: "bxor",
}


def listed(tensors: Any) -> list[Tensor]:
    """One tensor or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def lists(tensors: Any) -> list[Sequence[Tensor]]:
    """One list of tensors or several, as a list of lists."""
    return [tensors] if tensors and isinstance(tensors[0], Tensor) else list(tensors)


def served(tensors: Sequence[Tensor]) -> bool:
    """Whether shared memory can serve them: dense CPU tensors."""
    return all(x.layout == torch.strided and x.device.type == "cpu" for x in tensors)


def reduction(opts: Any) -> tuple[str, Any]:
    """The name of a reduction, and the factor of PREMUL_SUM (None else)."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "sum", None
    name = _OPS.get(getattr(op, "op", op).value)
    return ("sum", op.__getstate__()[1]) if name is None else (name, None)  # PREMUL_SUM is the one that is left


def check_reduction(name: str, op: str, x: Tensor) -> None:
    """Raise ValueError, with the call's name, unless the reduction is defined for the tensor's dtype."""
    try:
        reduce.check(op, x.dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def writable(x: Tensor, read: bool) -> tuple[Tensor, Callable[[], None] | None]:
    """Flat contiguous memory to write `x`'s new values to, and what puts them in place afterwards (None: they are).

    read: the memory must hold the present values.
    """
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return flat(x), None
    wire = flat(x).clone() if read else torch.empty(x.numel(), dtype=x.dtype, device="cpu")
    target = x.detach()

    def after() -> None:
        with torch.inference_mode(target.is_inference()):
            target.copy_(wire.view(target.shape))

    return wire, after


def all_writable(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], None] | None]:
    """`_writable` of several."""
    pairs = [writable(x, read=False) for x in tensors]
    steps = [after for _, after in pairs if after is not None]

    def after_all() -> None:
        for after in steps:
            after()

    return [wire for wire, _ in pairs], after_all if steps else None


def addresses(flat: Tensor, size: int, num_bytes: int) -> range:
    """Where the equal parts of a flat tensor begin, each of so many bytes, one a rank."""
    base = flat.data_ptr()
    return range(base, base + size * num_bytes, num_bytes) if num_bytes else range(size)


def then(steps: Steps, after: Callable[[], None] | None) -> Steps:
    """The steps of a call, and what is to be done when they are over."""
    return steps if after is None else _in_turn(steps, after)


def _in_turn(steps: Steps, after: Callable[[], None]) -> Steps:
    yield from steps
    after()
