"""The short way for short calls that somebody waits for: one step, done at once if the peers come at once.

A call of a few bytes costs what its Python costs. Where the group has nothing else under way, a short all_reduce,
reduce_scatter or all_gather needs no generator and no queue: fill the slot, post, look until the peers have posted,
read. It is the same step with the same signature as in `staged.py`, so peers cannot tell the difference, and if the
peers do not come while this rank looks, the rest of the step is queued like any other call.

Each function returns False (None where it makes the result), with nothing done, where the long way must be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from crosscut.comm.shm import failing, reduce
from crosscut.comm.shm.copying import copy_bytes
from crosscut.comm.shm.layout import BEHIND, DEPTH, DONE, LEFT, POSTED, SLOT, STATE
from crosscut.comm.shm.operation import Label, Operation, named
from crosscut.comm.shm.reducing import NAMES
from crosscut.comm.shm.signature import sign
from crosscut.comm.shm.slots import MASK

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Steps

Tensor = torch.Tensor
SHORT_BYTES = 1 << 18
PLAIN = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8})
_KINDS: dict[tuple[str, str, torch.dtype | None], int] = {}  # signatures without the size


def all_reduce(channel: Channel, x: Tensor, op: str, label: Label) -> bool:
    """`x`, of any shape, becomes the reduction of all ranks' `x`."""
    num_bytes, dtype = x.nbytes, x.dtype
    if num_bytes > SHORT_BYTES or dtype not in PLAIN or x.requires_grad or not x.is_contiguous() or x.is_neg():
        return False
    with channel.station.lock:
        step = _enter(channel, ("all_reduce", op, dtype), num_bytes)
        if step < 0:
            return False
        index = step % DEPTH
        copy_bytes(channel.slot_address[channel.rank] + index * SLOT, x.data_ptr(), num_bytes)

        def read() -> None:
            reduce.fold_plain(op, channel.shaped(dtype, x.shape, index, 0), x)

        late = _meet(channel, step, read, label)
    if late is not None:
        late.wait()
    return True


def reduce_scatter(channel: Channel, out: Tensor, x: Tensor, op: str, label: Label) -> bool:
    """`out` becomes the reduction of all ranks' part for this rank; the parts of `x` stand in rank order. `out` must be
    contiguous and without gradient.
    """
    num_bytes, dtype = x.nbytes, x.dtype
    if num_bytes > SHORT_BYTES or dtype not in PLAIN or x.requires_grad or not x.is_contiguous() or x.is_neg():
        return False
    with channel.station.lock:
        step = _enter(channel, ("reduce_scatter", op, dtype), num_bytes // channel.size)
        if step < 0:
            return False
        index = step % DEPTH
        copy_bytes(channel.slot_address[channel.rank] + index * SLOT, x.data_ptr(), num_bytes)

        def read() -> None:
            reduce.fold_plain(op, channel.shaped(dtype, out.shape, index, channel.rank * out.numel()), out)

        late = _meet(channel, step, read, label)
    if late is not None:
        late.wait()
    return True


def all_gather(channel: Channel, out: Tensor, x: Tensor, label: Label) -> bool:
    """`out` becomes all ranks' `x`, one after another. `out` must be contiguous."""
    num_bytes = x.nbytes
    if num_bytes > SHORT_BYTES or not x.is_contiguous() or x.is_neg() or x.is_conj():
        return False
    with channel.station.lock:
        step = _enter(channel, ("all_gather", "", None), num_bytes)
        if step < 0:
            return False
        at = step % DEPTH * SLOT
        copy_bytes(channel.slot_address[channel.rank] + at, x.data_ptr(), num_bytes)

        def read() -> None:
            to = out.data_ptr()
            for address in channel.slot_address:
                copy_bytes(to, address + at, num_bytes)
                to += num_bytes

        late = _meet(channel, step, read, label)
    if late is not None:
        late.wait()
    return True


def _enter(channel: Channel, kind: tuple[str, str, torch.dtype | None], num_bytes: int) -> int:
    """Begin a call of one step, whose slot is free; its step, or -1 if that cannot be done at once."""
    if channel.station.active or channel.broken is not None or not num_bytes:
        return -1
    step = channel.step
    target = step - DEPTH + 1
    for words in channel.other_words:
        if words[STATE] > LEFT or (words[DONE] - target) & BEHIND:
            return -1
    signature = _KINDS.get(kind)
    if signature is None:
        name, op, dtype = kind
        signature = _KINDS[kind] = sign(name, op, "" if dtype is None else NAMES[dtype])
    channel.step = step + 1
    channel.leave_signature(signature | num_bytes)
    return step


def _meet(channel: Channel, step: int, read: Callable[[], None], label: Label) -> Operation | None:
    """Post the step, and finish it if the peers post while this rank looks; else the call, queued."""
    words, target, station = channel.words, step + 1, channel.station
    words[POSTED] = target & MASK
    channel.ring()
    others = channel.other_words
    for _ in range(station.looks):
        for other in others:
            if (other[POSTED] - target) & BEHIND:
                break
        else:
            break
    else:
        station.looked_in_vain()
        operation = Operation(channel, _rest(channel, step, read), label, channel.timeout_s)
        channel.enqueue(operation)
        return operation
    station.looks = station.max_looks
    try:
        if not channel.agree():
            channel.compare(channel.others)
        read()
    except Exception as error:
        error = named(error, label)
        channel.fail(error, failing.reason_of(error), channel.rank)
        raise error from None
    words[DONE] = target & MASK
    channel.ring()
    return None


def _rest(channel: Channel, step: int, read: Callable[[], None]) -> Steps:
    """What is left of a step after it was posted."""
    yield from channel.posted(step, channel.others)
    channel.compare(channel.others)
    read()
    channel.done(step)
