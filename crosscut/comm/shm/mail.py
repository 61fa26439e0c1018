"""Send and receive: messages cut into parts, one ring of parts for each ordered pair of ranks.

    sender: wait until the ring has room (SENT - the receiver's TAKEN < PARTS), fill a part, SENT += 1
    receiver: while the sender's SENT > TAKEN: take a part, TAKEN += 1

The first part of a message carries its size and tag in the part's header. Small messages therefore leave without their
receiver (up to PARTS of them); large ones need it. A receive takes the first message, in the order sent, from its
source (or from any) with its tag. A message that is in the way of one that somebody waits for is moved to private
memory, so sends and receives may be issued and waited for in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from crosscut.comm.errors import MismatchError
from crosscut.comm.shm.copying import copy_bytes
from crosscut.comm.shm.layout import BEHIND, LINE, PART, PARTS
from crosscut.comm.shm.operation import Label, Need, Operation

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel

_MASK = 0xFFFFFFFF
ANY = -1


class _Message:
    """A message under way, out of or into private memory."""

    __slots__ = ("address", "keep", "moved", "num_bytes", "operation", "source", "tag")

    def __init__(self, x: torch.Tensor, tag: int, operation: Operation | None, source: int) -> None:
        self.keep = x
        self.address = x.data_ptr()
        self.num_bytes = x.nbytes
        self.tag = tag
        self.moved = 0
        self.operation = operation
        self.source = source


class Mail:
    """The messages of one rank in one group. Everything is called with the station's lock held."""

    def __init__(self, channel: Channel) -> None:
        size = channel.size
        self.pending = 0
        self._channel = channel
        self._out: list[deque[_Message]] = [deque() for _ in range(size)]
        self._sent = [0] * size
        self._taken = [0] * size
        self._posted: list[_Message] = []  # receives, in the order issued, that have no message yet
        self._incoming: list[_Message | None] = [None] * size  # the message whose parts are arriving from each rank
        self._kept: list[deque[_Message]] = [
            deque() for _ in range(size)
        ]  # messages that were in the way, whole or not

    # -- issue --------------------------------------------------------------------------------------------------------

    def send(self, x: torch.Tensor, peer: int, tag: int, label: Label, timeout_s: float) -> Operation:
        """Queue a flat contiguous tensor for `peer`."""
        operation = Operation(self._channel, None, label, timeout_s)
        self._out[peer].append(_Message(x, tag, operation, peer))
        self._issued()
        return operation

    def recv(self, x: torch.Tensor, source: int, tag: int, label: Label, timeout_s: float) -> Operation:
        """Queue a receive from `source`, or from ANY, into a flat contiguous tensor."""
        operation = Operation(self._channel, None, label, timeout_s)
        receive = _Message(x, tag, operation, source)
        for rank in range(len(self._kept)) if source == ANY else (source,):
            for kept in self._kept[rank]:
                if kept.tag == tag and kept.operation is None:
                    self._claim(kept, receive, rank)
                    return operation
        self._posted.append(receive)
        self._issued()
        return operation

    def _issued(self) -> None:
        self.pending += 1
        self._channel.activate()
        self._channel.advance()

    def _claim(self, kept: _Message, receive: _Message, rank: int) -> None:
        """Give a receive the message that was moved out of the way before: now, or when its last part is there."""
        kept.operation = receive.operation
        kept.source = rank
        self._fits(receive, kept.num_bytes, rank)
        assert receive.operation is not None
        receive.operation.source = rank
        if kept.moved < kept.num_bytes or self._incoming[rank] is kept:
            # The rest goes straight to where it belongs.
            copy_bytes(receive.address, kept.address, kept.moved)
            receive.moved = kept.moved
            receive.source = rank
            self._kept[rank].remove(kept)
            self._incoming[rank] = receive
            self._issued()
            return
        copy_bytes(receive.address, kept.address, kept.num_bytes)
        self._kept[rank].remove(kept)
        self._channel.finish(receive.operation)

    # -- progress -----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Move what can be moved."""
        moved = False
        for peer, queue in enumerate(self._out):
            while queue and self._push(peer, queue[0]):
                moved = True
        for rank in range(len(self._incoming)):
            while (self._incoming[rank] is not None or self._posted) and self._take(rank):
                moved = True
        if moved:
            self._channel.moves += 1
            self._channel.ring()

    def _push(self, peer: int, message: _Message) -> bool:
        """Fill one part for `peer`; False if the ring has no room."""
        channel, layout = self._channel, self._channel.layout
        sent = self._sent[peer]
        word, target = layout.taken + channel.rank * LINE, sent - PARTS + 1
        assert message.operation is not None
        if (channel.segments[peer].words[word] - target) & BEHIND:
            message.operation.need = Need(word, target, (peer,))
            return False
        part = sent % PARTS
        if not message.moved:
            header = layout.header(peer, part) // 2
            longs = channel.segments[channel.rank].longs
            longs[header], longs[header + 1] = message.num_bytes, message.tag & 0xFFFFFFFFFFFFFFFF
        count = min(PART, message.num_bytes - message.moved)
        base = channel.segments[channel.rank].address + layout.part_bytes(peer, part)
        copy_bytes(base, message.address + message.moved, count)
        message.moved += count
        self._sent[peer] = sent + 1
        channel.words[layout.sent + peer * LINE] = (sent + 1) & _MASK
        if message.moved == message.num_bytes:
            self._out[peer].popleft()
            self.pending -= 1
            channel.finish(message.operation)
        return True

    def _take(self, rank: int) -> bool:
        """Take one part from `rank`; False if there is none, or none that anybody waits for."""
        channel, layout = self._channel, self._channel.layout
        taken, theirs = self._taken[rank], channel.segments[rank]
        word = layout.sent + channel.rank * LINE
        message = self._incoming[rank]
        if (theirs.words[word] - (taken + 1)) & BEHIND:
            self._await(rank, word, taken + 1)
            return False
        part = taken % PARTS
        if message is None:
            header = layout.header(channel.rank, part) // 2
            num_bytes, tag = theirs.longs[header], theirs.longs[header + 1]
            message = self._match(rank, num_bytes, tag)
            if message is None:
                return False
            self._incoming[rank] = message
        count = min(PART, message.num_bytes - message.moved)
        copy_bytes(message.address + message.moved, theirs.address + layout.part_bytes(channel.rank, part), count)
        message.moved += count
        self._taken[rank] = taken + 1
        channel.words[layout.taken + rank * LINE] = (taken + 1) & _MASK
        if message.moved == message.num_bytes:
            self._incoming[rank] = None
            if message.operation is not None:
                self.pending -= 1
                channel.finish(message.operation)
        return True

    def _match(self, rank: int, num_bytes: int, tag: int) -> _Message | None:
        """Where the next message from `rank` goes; None: nobody waits for it or for one behind it."""
        awaited = False
        for receive in self._posted:
            if receive.source in (rank, ANY):
                awaited = True
                if receive.tag & 0xFFFFFFFFFFFFFFFF == tag:
                    self._fits(receive, num_bytes, rank)
                    self._posted.remove(receive)
                    assert receive.operation is not None
                    receive.operation.source = receive.source = rank
                    return receive
        if not awaited:
            return None
        kept = _Message(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), tag, None, rank)
        self._kept[rank].append(kept)
        return kept

    def _fits(self, receive: _Message, num_bytes: int, rank: int) -> None:
        if receive.num_bytes != num_bytes:
            channel = self._channel
            assert receive.operation is not None
            raise MismatchError(
                f"{receive.operation.text()}: rank {channel.ranks[rank]} sends {num_bytes} bytes, this receive is for "
                f"{receive.num_bytes}; make them equal"
            )

    def _await(self, rank: int, word: int, target: int) -> None:
        """Note, for messages about time-outs, what the receives from `rank` wait for."""
        message = self._incoming[rank]
        if message is not None and message.operation is not None:
            message.operation.need = Need(word, target, (rank,))
        for receive in self._posted:
            if receive.operation is not None and receive.source == rank:
                receive.operation.need = Need(word, target, (rank,))
            elif receive.operation is not None and receive.source == ANY:
                receive.operation.need = Need(word, target, self._channel.others, any_of=True)

    # -- the end ------------------------------------------------------------------------------------------------------

    def sends(self) -> list[Operation]:
        """The sends under way."""
        return [m.operation for queue in self._out for m in queue if m.operation is not None]

    def clear(self) -> Iterator[Operation]:
        """Drop everything under way; returns the calls that are cut off."""
        messages = (
            [m for queue in self._out for m in queue] + self._posted + [m for m in self._incoming if m is not None]
        )
        for queue in self._out:
            queue.clear()
        self._posted.clear()
        self._incoming = [None] * len(self._incoming)
        self.pending = 0
        return iter([m.operation for m in messages if m.operation is not None])
