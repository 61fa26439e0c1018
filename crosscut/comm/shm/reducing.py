"""all_reduce, reduce_scatter and reduce. All ranks get bitwise the same, whatever the size and the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from crosscut.comm.shm import reduce
from crosscut.comm.shm.copying import copy_bytes
from crosscut.comm.shm.layout import BEHIND, DEPTH, DONE, POSTED, SLOT
from crosscut.comm.shm.operation import Need
from crosscut.comm.shm.signature import DTYPES, sign
from crosscut.comm.shm.staged import ALIGN, STREAM, staged

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Steps

Tensor = torch.Tensor
WHOLE_BYTES = 1 << 15  # up to here each rank shows everything and reduces everything in one step
PAIR_BYTES = 1 << 20  # a step of two ranks
NAMES = {getattr(torch, name): name for name in DTYPES if name}


def all_reduce(channel: Channel, x: Tensor, op: str) -> Steps:
    """`x` becomes the reduction of all ranks' `x`."""
    num_bytes = x.nbytes
    signature = sign("all_reduce", op, NAMES.get(x.dtype, "?"), 0, num_bytes)
    if num_bytes <= WHOLE_BYTES:
        return _all_reduce_whole(channel, x, op, signature)
    if channel.size <= 2:
        return _all_reduce_pairs(channel, x, op, signature)
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
    parts = channel.in_slots(x.dtype, x.numel(), step % DEPTH)
    copy_bytes(channel.slot_address[channel.rank] + step % DEPTH * SLOT, x.data_ptr(), x.nbytes)
    channel.post(step)
    target = step + 1
    for words in channel.other_words:
        while (words[POSTED] - target) & BEHIND:
            yield Need(POSTED, target, channel.others)
    channel.compare(channel.others)
    reduce.fold(op, parts, x, channel.scratch(4 * x.numel() + x.nbytes))
    channel.done(step)


def _all_reduce_pairs(channel: Channel, x: Tensor, op: str, signature: int) -> Steps:
    """Two ranks: each shows everything and reduces everything, chunk by chunk.

    Reducing everything twice moves less memory than reducing half and showing the result, 5 S through the caches
    instead of 5.5 S, and waits once a chunk instead of twice.
    """
    item, rank = x.element_size(), channel.rank
    chunks = x.split(PAIR_BYTES // item)
    scratch = channel.scratch((4 + item) * chunks[0].numel())
    address = x.data_ptr()

    def fill(turn: int, slot: int) -> None:
        copy_bytes(slot, address + turn * PAIR_BYTES, chunks[turn].nbytes)

    def read(turn: int, index: int) -> None:
        own = chunks[turn]
        parts = list(channel.in_slots(x.dtype, own.numel(), index))
        parts[rank] = own
        reduce.fold(op, parts, own, scratch)

    return staged(channel, signature, len(chunks), fill, read, channel.others, x)


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


def reduce_scatter(
    channel: Channel, out: Tensor, own: Callable[[], Tensor], pieces: Sequence[int], op: str, held: object
) -> Steps:
    """`out` becomes the reduction of all ranks' pieces for this rank.

    pieces: where this rank's pieces for each rank begin; own: gives the one for itself; held: what owns the memory.
    """
    size, rank, item, total = channel.size, channel.rank, out.element_size(), out.numel()
    signature = sign("reduce_scatter", op, NAMES.get(out.dtype, "?"), 0, out.nbytes)
    width = SLOT // size // ALIGN * ALIGN // item
    scratch = channel.scratch((4 + item) * min(width, total))
    short = (
        out.nbytes <= WHOLE_BYTES
    )  # then its own piece goes through the slot too, which is quicker than a view of it

    def fill(turn: int, slot: int) -> None:
        count = min(width, total - turn * width) * item
        for peer in range(size) if short else channel.others:
            copy_bytes(slot + peer * width * item, pieces[peer] + turn * width * item, count)

    def read(turn: int, index: int) -> None:
        count = min(width, total - turn * width)
        parts = channel.in_slots(out.dtype, count, index, rank * width)
        if short:
            reduce.fold(op, parts, out, scratch)
        else:
            begin, end = turn * width, turn * width + count
            reduce.fold(op, [*parts[:rank], own()[begin:end], *parts[rank + 1 :]], out[begin:end], scratch)

    return staged(channel, signature, max(1, -(-total // width)), fill, read, channel.others, held)


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
    signature = sign("reduce", op, NAMES.get(x.dtype, "?"), root, x.nbytes)
    if channel.rank == root:
        return staged(channel, signature, steps, None, read, channel.others)
    return staged(channel, signature, steps, fill, None, (), x)
