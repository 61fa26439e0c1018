"""all_reduce, reduce_scatter and reduce. All ranks get bitwise the same, whatever the size and the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from crosscut.comm.shm import reduce
from crosscut.comm.shm.copying import copy_bytes
from crosscut.comm.shm.layout import SLOT
from crosscut.comm.shm.signature import DTYPES, sign
from crosscut.comm.shm.staged import ALIGN, STREAM, staged

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Steps

Tensor = torch.Tensor
WHOLE_BYTES = 1 << 18  # of all peers: up to here each rank of more than two shows and reduces everything
LAG = 2  # steps between those that show a round's slices and its result
NAMES = {getattr(torch, name): name for name in DTYPES if name}


def all_reduce(channel: Channel, x: Tensor, op: str) -> Steps:
    """`x` becomes the reduction of all ranks' `x`."""
    signature = sign("all_reduce", op, NAMES.get(x.dtype, "?"), 0, x.nbytes)
    whole = channel.size == 2 or x.nbytes * (channel.size - 1) <= WHOLE_BYTES
    return (_all_reduce_whole if whole else _all_reduce_slices)(channel, x, op, signature)


def _all_reduce_whole(channel: Channel, x: Tensor, op: str, signature: int) -> Steps:
    """Everybody shows everything and reduces everything, slot by slot.

    For two ranks that moves less memory than reducing half and showing the result, and it waits once a slot, not twice.
    """
    item, rank = x.element_size(), channel.rank
    chunks = x.split(SLOT // item)
    scratch = channel.scratch((4 + item) * chunks[0].numel())
    address = x.data_ptr()

    def fill(turn: int, slot: int) -> None:
        copy_bytes(slot, address + turn * SLOT, chunks[turn].nbytes)

    def read(turn: int, index: int) -> None:
        own = chunks[turn]
        parts = list(channel.in_slots(x.dtype, own.numel(), index))
        parts[rank] = own
        reduce.fold(op, parts, own, scratch)

    return staged(channel, signature, len(chunks), fill, read, channel.others, x)


def _all_reduce_slices(channel: Channel, x: Tensor, op: str, signature: int) -> Steps:
    """Rounds of `size` slices; rank r reduces slice r of every round and shows it in the slot of LAG steps later."""
    size, rank, item, total = channel.size, channel.rank, x.element_size(), x.numel()
    most = SLOT // size // ALIGN * ALIGN // item
    rounds = -(-total // (size * most))
    width = min(most, -(-total // (size * rounds) * item // ALIGN) * ALIGN // item)
    slots, scratch = channel.slots(x.dtype), channel.scratch(4 * width + width * item)
    address, per_slot = x.data_ptr(), SLOT // item

    def place(round_: int, owner: int) -> tuple[int, int]:
        begin = min(total, (round_ * size + owner) * width)
        return begin, min(total, begin + width)

    def fill(turn: int, slot: int) -> None:
        for owner in range(size):
            begin, end = place(turn - LAG if owner == rank else turn, owner)
            if begin >= 0 and end > begin:
                copy_bytes(slot + owner * width * item, address + begin * item, (end - begin) * item)

    def read(turn: int, index: int) -> None:
        base = index * per_slot
        begin, end = place(turn, rank)
        if end > begin:
            own, at = x[begin:end], base + rank * width
            parts = [own if r == rank else slots[r][at : at + end - begin] for r in range(size)]
            reduce.fold(op, parts, own, scratch)
        for peer in channel.others if turn >= LAG else ():
            begin, end = place(turn - LAG, peer)
            source = channel.slot_address[peer] + (base + peer * width) * item
            copy_bytes(address + begin * item, source, (end - begin) * item)

    return staged(channel, signature, rounds + LAG, fill, read, channel.others, x, LAG)


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

    def fill(turn: int, slot: int) -> None:
        count = min(width, total - turn * width) * item
        for peer in channel.others:
            copy_bytes(slot + peer * width * item, pieces[peer] + turn * width * item, count)

    def read(turn: int, index: int) -> None:
        begin, end = turn * width, min(total, turn * width + width)
        parts = channel.in_slots(out.dtype, end - begin, index, rank * width)
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
