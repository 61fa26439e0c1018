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

Long tensors take many steps. A rank fills one step ahead of what it reads, and further while its peers are late, so
that nobody waits while there is work. Few and small slots are quicker than many or large ones, for then all of them
stay in the cache that the cores share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crosscut.comm.shm.layout import BEHIND, DEPTH, DONE, POSTED, SLOT
from crosscut.comm.shm.operation import Need
from crosscut.comm.shm.signature import sign

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Steps

ALIGN = 64  # bytes: slices begin on a cache line
STREAM = 1 << 18  # bytes a step where one rank fills and another reads, so that they overlap


def barrier(channel: Channel) -> Steps:
    """Everybody has called it."""
    return staged(channel, sign("barrier"), 1, _nothing, _nothing, channel.others)


def _nothing(turn: int, where: int) -> None:
    """A step without data."""


def staged(
    channel: Channel,
    signature: int | None,
    steps: int,
    fill: Callable[[int, int], None] | None,
    read: Callable[[int, int], None] | None,
    sources: tuple[int, ...],
    held: object = None,
    lead: int = DEPTH,
) -> Steps:
    """The steps of a call. `fill(turn, address of the slot)`; `read(turn, index of the slot)` when `sources` have
    filled theirs. Turns count from 0 within the call; turn k is filled after turn k - lead was read. `held` lives as
    long as the call: the tensors whose memory fill and read know by address only. signature: None for more steps of a
    call that has begun.
    """
    if signature is not None:
        channel.begin(signature)
    first = channel.step
    channel.step = first + steps
    if fill is None:
        channel.skip(POSTED, first + steps)
    if read is None:
        channel.skip(DONE, first + steps)
    own_slot = channel.slot_address[channel.rank]
    readers, writers = channel.other_words, [channel.segments[source].words for source in sources]
    filled = steps if fill is None else 0
    taken = steps if read is None else 0
    while filled < steps or taken < steps:
        may_fill = filled < min(steps, taken + lead) and _reached(readers, DONE, first + filled - DEPTH + 1)
        # One turn ahead of what it reads, so that peers find the next slot filled; further if there is nothing to read.
        if may_fill and filled <= taken + 1:
            ahead = True
        elif taken < steps and _reached(writers, POSTED, first + taken + 1):
            ahead = False
        elif may_fill:
            ahead = True
        else:
            if taken < steps:
                yield Need(POSTED, first + taken + 1, sources)
            else:
                yield Need(DONE, first + filled - DEPTH + 1, channel.others)
            continue
        if ahead and fill is not None:
            fill(filled, own_slot + (first + filled) % DEPTH * SLOT)
            channel.post(first + filled)
            filled += 1
        elif read is not None:
            if not taken:
                channel.compare(sources)
            read(taken, (first + taken) % DEPTH)
            channel.done(first + taken)
            taken += 1


def _reached(segments: Sequence[memoryview], word: int, target: int) -> bool:
    """Whether a counter has reached a value in all of them."""
    return not any((words[word] - target) & BEHIND for words in segments)
