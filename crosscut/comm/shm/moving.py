"""all_gather, broadcast, gather, scatter and all_to_all: the collectives that only move bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from crosscut.comm.errors import MismatchError
from crosscut.comm.shm.copying import copy_bytes
from crosscut.comm.shm.layout import DEPTH, SLOT
from crosscut.comm.shm.signature import sign
from crosscut.comm.shm.staged import ALIGN, STREAM, staged

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Steps

Tensor = torch.Tensor


def all_gather(channel: Channel, to: Sequence[int], x: Tensor, held: object) -> Steps:
    """The memory at the address `to[r]` becomes rank r's `x`; `held` is what owns that memory."""
    rank, total, address = channel.rank, x.nbytes, x.data_ptr()

    def fill(turn: int, slot: int) -> None:
        count = min(SLOT, total - turn * SLOT)
        copy_bytes(slot, address + turn * SLOT, count)
        if to[rank] != address:
            copy_bytes(to[rank] + turn * SLOT, slot, count)

    def read(turn: int, index: int) -> None:
        count = min(SLOT, total - turn * SLOT)
        for peer in channel.others:
            copy_bytes(to[peer] + turn * SLOT, channel.slot_address[peer] + index * SLOT, count)

    steps, signature = max(1, -(-total // SLOT)), sign("all_gather", num_bytes=total)
    return staged(channel, signature, steps, fill, read, channel.others, (held, x))


def broadcast(channel: Channel, x: Tensor, root: int) -> Steps:
    """`x` becomes rank `root`'s `x`."""
    total, address = x.nbytes, x.data_ptr()

    def fill(turn: int, slot: int) -> None:
        copy_bytes(slot, address + turn * STREAM, min(STREAM, total - turn * STREAM))

    def read(turn: int, index: int) -> None:
        source = channel.slot_address[root] + index * SLOT
        copy_bytes(address + turn * STREAM, source, min(STREAM, total - turn * STREAM))

    steps, signature = max(1, -(-total // STREAM)), sign("broadcast", root=root, num_bytes=total)
    if channel.rank == root:
        return staged(channel, signature, steps, fill, None, (), x)
    return staged(channel, signature, steps, None, read, (root,), x)


def gather(channel: Channel, to: Sequence[int], x: Tensor, root: int, held: object) -> Steps:
    """The memory at the address `to[r]` becomes rank r's `x`, on rank `root`; `held` is what owns that memory."""
    total, address = x.nbytes, x.data_ptr()

    def fill(turn: int, slot: int) -> None:
        copy_bytes(slot, address + turn * STREAM, min(STREAM, total - turn * STREAM))

    def read(turn: int, index: int) -> None:
        count = min(STREAM, total - turn * STREAM)
        for rank, base in enumerate(to):
            source = channel.slot_address[rank] + index * SLOT
            if rank == root:
                source = address + turn * STREAM
            if source != base + turn * STREAM:
                copy_bytes(base + turn * STREAM, source, count)

    steps, signature = max(1, -(-total // STREAM)), sign("gather", root=root, num_bytes=total)
    if channel.rank == root:
        return staged(channel, signature, steps, None, read, channel.others, (held, x))
    return staged(channel, signature, steps, fill, None, (), x)


def scatter(channel: Channel, out: Tensor, given: Sequence[int], root: int, held: object) -> Steps:
    """`out` becomes the memory at the address `given[rank]` of rank `root`; `held` is what owns that memory there."""
    rank, total, address = channel.rank, out.nbytes, out.data_ptr()
    width = min(STREAM, SLOT // channel.size // ALIGN * ALIGN)

    def fill(turn: int, slot: int) -> None:
        count = min(width, total - turn * width)
        for peer in channel.others:
            copy_bytes(slot + peer * width, given[peer] + turn * width, count)
        if given[rank] != address:
            copy_bytes(address + turn * width, given[rank] + turn * width, count)

    def read(turn: int, index: int) -> None:
        source = channel.slot_address[root] + index * SLOT + rank * width
        copy_bytes(address + turn * width, source, min(width, total - turn * width))

    steps, signature = max(1, -(-total // width)), sign("scatter", root=root, num_bytes=total)
    if rank == root:
        return staged(channel, signature, steps, fill, None, (), (out, held))
    return staged(channel, signature, steps, None, read, (root,), out)


def all_to_all(channel: Channel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Steps:
    """`outs[r]` becomes rank r's `ins[rank]`. Sizes may differ from pair to pair; the two ends of a pair must agree."""
    size, rank = channel.size, channel.rank
    table = -(-8 * size // ALIGN) * ALIGN  # bytes at the end of the first slot: how much this rank sends to each
    width = (SLOT - table) // size // ALIGN * ALIGN
    sends, receives = [x.nbytes for x in ins], [x.nbytes for x in outs]
    out_at, in_at = [x.data_ptr() for x in outs], [x.data_ptr() for x in ins]
    longs = [segment.longs for segment in channel.segments]

    def fill(turn: int, slot: int) -> None:
        for peer in channel.others:
            count = min(width, sends[peer] - turn * width)
            if count > 0:
                copy_bytes(slot + peer * width, in_at[peer] + turn * width, count)

    def read(turn: int, index: int) -> None:
        for source in channel.others:
            count = min(width, receives[source] - turn * width)
            if count > 0:
                base = channel.slot_address[source] + index * SLOT + rank * width
                copy_bytes(out_at[source] + turn * width, base, count)

    first = channel.step
    channel.step = first + 1
    channel.begin(sign("all_to_all"))
    yield from channel.room(first)
    index = first % DEPTH
    at = (channel.layout.slots_bytes + (index + 1) * SLOT - table) // 8
    for peer in range(size):
        longs[rank][at + peer] = sends[peer]
    fill(0, channel.slot_address[rank] + index * SLOT)
    channel.post(first)
    copy_bytes(out_at[rank], in_at[rank], min(sends[rank], receives[rank]))
    yield from channel.posted(first, channel.others)
    channel.compare(channel.others)
    sent = [[longs[r][at + peer] for peer in range(size)] for r in range(size)]
    for source in range(size):
        if sent[source][rank] != receives[source]:
            raise MismatchError(
                f"rank {channel.ranks[source]} sends {sent[source][rank]} bytes to rank {channel.ranks[rank]}, which "
                f"expects {receives[source]}; make the splits agree"
            )
    read(0, index)
    channel.done(first)
    more = max(0, *(-(-count // width) - 1 for row in sent for count in row))  # the largest pair's: equal on all ranks
    yield from staged(
        channel,
        None,
        more,
        lambda turn, slot: fill(turn + 1, slot),
        lambda turn, index: read(turn + 1, index),
        channel.others,
        (outs, ins),
    )
