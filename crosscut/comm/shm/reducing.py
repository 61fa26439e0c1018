"""all_reduce, reduce_scatter and reduce. All ranks get bitwise the same, whatever the size and the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from crosscut.comm.shm import reduce
from crosscut.comm.shm.copying import copy_bytes
from crosscut.comm.shm.layout import BEHIND, DEPTH, DONE, POSTED, SLOT
from crosscut.comm.shm.operation import Need
from crosscut.comm.shm.signature import DTYPES, sign
from crosscut.comm.shm.staged import ALIGN, STREAM, keeping, staged

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Steps

Tensor = torch.Tensor
WHOLE_BYTES = 1 << 15  # up to here, among more than two ranks, each reduces everything itself
_NAMES = {getattr(torch, name): name for name in DTYPES if name}


def all_reduce(channel: Channel, x: Tensor, op: str) -> Steps:
    """`x` becomes the reduction of all ranks' `x`."""
    num_bytes = x.nbytes
    signature = sign("all_reduce", op, _NAMES.get(x.dtype, "?"), 0, num_bytes)
    if num_bytes <= WHOLE_BYTES or (channel.size == 2 and num_bytes <= SLOT):
        return _all_reduce_whole(channel, x, op, signature)
    return _all_reduce_slices(channel, x, op, signature)


def _all_reduce_whole(channel: Channel, x: Tensor, op: str, signature: int) -> Steps:
    """One step: everybody shows everything, everybody reduces everything."""
    step = channel.step
    channel.step = step + 1
    channel.begin(signature)
    target = step - DEPTH + 1
    for words in channel.other_words:
        while (words[DONE] - target) & BEHIND:
            yield Need(DONE, target, channel.others)
    parts = channel.slot_heads(x.dtype, x.numel(), step)
    copy_bytes(channel.slot_address[channel.rank] + step % DEPTH * SLOT, x.data_ptr(), x.nbytes)
    channel.post(step)
    target = step + 1
    for words in channel.other_words:
        while (words[POSTED] - target) & BEHIND:
            yield Need(POSTED, target, channel.others)
    channel.compare(channel.others)
    reduce.fold(op, parts, x, channel.scratch(4 * x.numel() + x.nbytes))
    channel.done(step)


def _all_reduce_slices(channel: Channel, x: Tensor, op: str, signature: int) -> Steps:
    """Rounds of `size` slices; rank r reduces slice r of every round and shows it in the slot of two steps later."""
    size, rank, item, total = channel.size, channel.rank, x.element_size(), x.numel()
    most = SLOT // size // ALIGN * ALIGN // item
    rounds = -(-total // (size * most))
    width = min(most, -(-total // (size * rounds) * item // ALIGN) * ALIGN // item)
    lag = 2
    first = channel.step
    channel.step = first + rounds + lag
    channel.begin(signature)
    slots = channel.slots(x.dtype)
    scratch = channel.scratch(4 * width + width * item)
    address, per_slot = x.data_ptr(), SLOT // item

    def place(round_: int, owner: int) -> tuple[int, int]:
        begin = min(total, (round_ * size + owner) * width)
        return begin, min(total, begin + width)

    for step in range(rounds + lag + 1):
        if step < rounds + lag:
            yield from channel.room(first + step)
            slot = channel.slot_address[rank] + (first + step) % DEPTH * SLOT
            if step >= lag:
                begin, end = place(step - lag, rank)
                copy_bytes(slot + rank * width * item, address + begin * item, (end - begin) * item)
            if step < rounds:
                for peer in channel.others:
                    begin, end = place(step, peer)
                    copy_bytes(slot + peer * width * item, address + begin * item, (end - begin) * item)
            channel.post(first + step)
        if step:
            past = step - 1
            yield from channel.posted(first + past, channel.others)
            if not past:
                channel.compare(channel.others)
            base = (first + past) % DEPTH * per_slot
            if past < rounds:
                begin, end = place(past, rank)
                own, at = x[begin:end], base + rank * width
                parts = [own if r == rank else slots[r][at : at + end - begin] for r in range(size)]
                reduce.fold(op, parts, own, scratch)
            if past >= lag:
                for peer in channel.others:
                    begin, end = place(past - lag, peer)
                    source = channel.slot_address[peer] + (base + peer * width) * item
                    copy_bytes(address + begin * item, source, (end - begin) * item)
            channel.done(first + past)


def reduce_scatter(channel: Channel, out: Tensor, pieces: Sequence[Tensor], op: str) -> Steps:
    """`out` becomes the reduction of all ranks' `pieces[rank]`."""
    size, rank, item, total = channel.size, channel.rank, out.element_size(), out.numel()
    signature = sign("reduce_scatter", op, _NAMES.get(out.dtype, "?"), 0, out.nbytes)
    width = SLOT // size // ALIGN * ALIGN // item
    slots = channel.slots(out.dtype)
    scratch = channel.scratch(4 * min(width, total) + min(width, total) * item)
    addresses = [piece.data_ptr() for piece in pieces]

    def fill(turn: int, slot: int) -> None:
        begin, end = turn * width, min(total, turn * width + width)
        for peer in channel.others:
            copy_bytes(slot + peer * width * item, addresses[peer] + begin * item, (end - begin) * item)

    def read(turn: int, index: int) -> None:
        begin, end = turn * width, min(total, turn * width + width)
        at = index * (SLOT // item) + rank * width
        parts = [pieces[r][begin:end] if r == rank else slots[r][at : at + end - begin] for r in range(size)]
        reduce.fold(op, parts, out[begin:end], scratch)

    return staged(channel, signature, max(1, -(-total // width)), fill, read, channel.others)


def reduce_to(channel: Channel, x: Tensor, root: int, op: str) -> Steps:
    """`x` becomes, on rank `root` only, the reduction of all ranks' `x`."""
    item, total, address = x.element_size(), x.numel(), x.data_ptr()
    width = STREAM // item
    slots = channel.slots(x.dtype)
    scratch = channel.scratch(4 * min(width, total) + min(width, total) * item)

    def fill(turn: int, slot: int) -> None:
        copy_bytes(slot, address + turn * width * item, min(width, total - turn * width) * item)

    def read(turn: int, index: int) -> None:
        own, at = x[turn * width : turn * width + width], index * (SLOT // item)
        parts = [own if r == root else slots[r][at : at + own.numel()] for r in range(channel.size)]
        reduce.fold(op, parts, own, scratch)

    steps = max(1, -(-total // width))
    signature = sign("reduce", op, _NAMES.get(x.dtype, "?"), root, x.nbytes)
    if channel.rank == root:
        return staged(channel, signature, steps, None, read, channel.others)
    return keeping(x, staged(channel, signature, steps, fill, None, ()))
