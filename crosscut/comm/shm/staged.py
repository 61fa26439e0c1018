"""The skeleton that the collectives share: fill a slot, post it, read the peers' slots, one step after another.

Every collective is a generator that yields when it must wait for a peer. What a step's slot holds:

| call | a rank fills its slot with | and reads |
|---|---|---|
| all_reduce, short | its whole tensor | everybody's; each reduces everything itself |
| all_reduce, long | the peers' slices of this round; its reduced slice of two rounds before | the same of everybody |
| reduce_scatter | the peers' slices | everybody's piece for it |
| all_gather | its tensor | everybody's |
| broadcast | the tensor, at the root | the root's |
| reduce, gather | its tensor, but at the root | at the root: everybody's |
| scatter | the peers' parts, at the root | the root's part for it |
| all_to_all | the counts of bytes to each, and the peers' pieces | everybody's piece for it |

Long tensors take many steps; the next step is filled before the last is read, so that nobody waits while there is work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from crosscut.comm.shm.layout import DEPTH, SLOT
from crosscut.comm.shm.signature import sign

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Steps

ALIGN = 64  # bytes: slices begin on a cache line
STREAM = 1 << 18  # bytes a step where one rank fills and another reads, so that they overlap


def barrier(channel: Channel) -> Steps:
    """Everybody has called it."""
    return staged(channel, sign("barrier"), 1, None, lambda turn, index: None, channel.others)


def staged(
    channel: Channel,
    signature: int,
    steps: int,
    fill: Callable[[int, int], None] | None,
    read: Callable[[int, int], None] | None,
    sources: tuple[int, ...],
) -> Steps:
    """The steps of a call. `fill(turn, address of the slot)`; `read(turn, index of the slot)` when `sources` have
    filled theirs. Turns count from 0 within the call.
    """
    first = channel.step
    channel.step = first + steps
    channel.begin(signature)
    for turn in range(steps + 1):
        if turn < steps:
            step = first + turn
            yield from channel.room(step)
            if fill is not None:
                fill(turn, channel.slot_address[channel.rank] + step % DEPTH * SLOT)
            channel.post(step)
            if read is None:
                channel.done(step)
        if turn and read is not None:
            step = first + turn - 1
            yield from channel.posted(step, sources)
            if turn == 1:
                channel.compare(sources)
            read(turn - 1, step % DEPTH)
            channel.done(step)


def keeping(held: object, steps: Steps) -> Steps:
    """The same steps; `held` lives as long as they run, since they know its memory by address only."""
    yield from steps
    del held
