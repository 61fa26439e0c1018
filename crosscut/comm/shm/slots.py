"""The steps that all ranks of a group count together, and the memory they use for them.

Each collective is a number of *steps*, the same on every rank. In step k a rank waits until slot k % DEPTH is free (all
peers DONE with step k - DEPTH), fills it, says so (POSTED = k + 1), waits for the peers it reads from, reads their
slots, says so (DONE = k + 1):

    rank 0   fill 0 | post | fill 1 | post | read 0 | done | fill 2 | post | read 1 | ...
    rank 1   fill 0 | post | fill 1 | post | read 0 | done | ...
                                             ^ waits only if its peers are more than a step behind

Every call also leaves a signature. A rank that waits for its peers' slots compares theirs with its own, and with those
of earlier calls that it had no reason to wait for, so that ranks that call different things learn it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from crosscut.comm.errors import MismatchError, PeerError
from crosscut.comm.shm import failing, futex, signature
from crosscut.comm.shm import station as stations
from crosscut.comm.shm.layout import (
    ANYTHING,
    ASLEEP,
    BEHIND,
    CALLS,
    DEPTH,
    DONE,
    LEFT,
    NEED,
    NEED_SOURCE,
    NEED_TARGET,
    POSTED,
    SIGNATURES,
    SLOT,
    STATE,
    SegmentLayout,
)
from crosscut.comm.shm.operation import Need, Steps
from crosscut.comm.shm.rendezvous import meet

MASK = 0xFFFFFFFF


class Slots:
    """One rank's counters and slots in a group, and its view of the others'. Made by all ranks together; raises what
    `rendezvous.meet` raises.

    store: where the ranks find each other; ranks: their global ranks; name: of the group, for messages.
    """

    def __init__(self, store: Any, rank: int, ranks: Iterable[int], name: str, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.name = name
        self.station = stations.station()
        self.layout = SegmentLayout.of(self.size)
        meeting = meet(store, rank, self.size, timeout_s, self.station.page, self.station.peers)
        self.segments = meeting.segments
        self.peers = meeting.peers
        self.key = meeting.key
        self.words = self.segments[rank].words
        self.others = tuple(r for r in range(self.size) if r != rank)
        self.other_words = [self.segments[r].words for r in self.others]
        self.other_longs = [self.segments[r].longs for r in self.others]
        self._longs = self.segments[rank].longs
        self._signatures = self.layout.signatures_bytes // 8
        self.slot_address = [segment.address + self.layout.slots_bytes for segment in self.segments]
        self.step = 0  # the next step
        self.calls = 0  # collectives begun
        self.moves = 0  # grows whenever something moves
        self._bells = [(r, self.peers[r]) for r in self.others]
        self._unread: list[tuple[int, int]] = []  # calls whose signatures were not compared yet
        self._typed: dict[torch.dtype, list[torch.Tensor]] = {}
        self._views: dict[tuple[torch.dtype, int, int, int], list[torch.Tensor]] = {}
        self._shaped: dict[tuple[torch.dtype, torch.Size, int, int], list[torch.Tensor]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    # -- steps --------------------------------------------------------------------------------------------------------

    def room(self, step: int) -> Steps:
        """Wait until this step's slot may be filled."""
        target = step - DEPTH + 1
        for words in self.other_words:
            while (words[DONE] - target) & BEHIND:
                yield Need(DONE, target, self.others)

    def post(self, step: int) -> None:
        """This step's slot is filled."""
        self.words[POSTED] = (step + 1) & MASK
        self.moves += 1
        self.ring()

    def posted(self, step: int, sources: tuple[int, ...]) -> Steps:
        """Wait until those ranks have filled this step's slot."""
        target = step + 1
        for source in sources:
            words = self.segments[source].words
            while (words[POSTED] - target) & BEHIND:
                yield Need(POSTED, target, sources)

    def done(self, step: int) -> None:
        """This rank reads no slot of this step, or an earlier one, any more."""
        self.words[DONE] = (step + 1) & MASK
        self.moves += 1
        self.ring()

    def skip(self, word: int, count: int) -> None:
        """Step over slots that this rank leaves empty (POSTED) or does not read (DONE)."""
        self.words[word] = count & MASK
        self.ring()

    def begin(self, sign: int) -> int:
        """Leave the signature of a call; returns the call's number. Raises PeerError if a peer has given up."""
        for rank, words in zip(self.others, self.other_words, strict=True):
            if words[STATE] > LEFT:
                raise PeerError(failing.why(self, rank)[0])
        return self.leave_signature(sign)

    def leave_signature(self, sign: int) -> int:
        """The same without a look at the peers."""
        call = self.calls
        self.calls = call + 1
        self._longs[self._signatures + call % SIGNATURES] = sign
        self.words[CALLS] = self.calls & MASK
        self._unread.append((call, sign))
        return call

    def agree(self) -> bool:
        """Whether, with only the present call to compare, all ranks have called the same: the usual case, quickly."""
        if len(self._unread) != 1:
            return False
        call, sign = self._unread[0]
        at = self._signatures + call % SIGNATURES
        for longs in self.other_longs:
            if longs[at] != sign:
                return False
        self._unread.clear()
        return True

    def compare(self, sources: tuple[int, ...]) -> None:
        """Raise MismatchError if one of those ranks, whose slots of the present call are filled, called otherwise."""
        unread, base = self._unread, self._signatures
        everybody = len(sources) == len(self.others)
        for source in sources:
            longs = self.segments[source].longs
            for call, sign in unread if everybody else unread[-1:]:
                theirs = longs[base + call % SIGNATURES]
                if theirs != sign and call > self.calls - SIGNATURES + 2 * DEPTH:
                    raise MismatchError(
                        f"call #{call + 1} over {self.name}: rank {self.ranks[source]} called "
                        f"{signature.text(theirs)}, rank {self.ranks[self.rank]} called {signature.text(sign)}; make "
                        f"the same calls in the same order on every rank"
                    )
        if everybody:
            unread.clear()
        elif len(unread) > SIGNATURES:
            del unread[: SIGNATURES // 2]

    # -- bells --------------------------------------------------------------------------------------------------------

    def ring(self, everybody: bool = False) -> None:
        """Wake the peers that sleep, if what they wait for may just have been written."""
        futex.fence()
        for rank, peer in self._bells:
            asleep = peer.words[ASLEEP]
            if asleep and (asleep == ANYTHING or everybody or self._gets_what_it_needs(rank)):
                peer.ring()

    def _gets_what_it_needs(self, rank: int) -> bool:
        """Whether all counters that the sleeping rank waits for in this group are there."""
        words = self.segments[rank].words
        word, target, source = words[NEED], words[NEED_TARGET], words[NEED_SOURCE]
        if not word:
            return False
        if source:
            return not (self.segments[source - 1].words[word] - target) & BEHIND
        return not any((one.words[word] - target) & BEHIND for r, one in enumerate(self.segments) if r != rank)

    def write_need(self, need: Need | None) -> bool:
        """Before this process sleeps, for this alone: write what it waits for. False if that cannot be written."""
        if need is None or len(need.sources) not in (1, len(self.others)):
            return False
        self.words[NEED_TARGET] = need.target & MASK
        self.words[NEED_SOURCE] = need.sources[0] + 1 if len(need.sources) == 1 else 0
        self.words[NEED] = need.word
        return True

    def forget_need(self) -> None:
        """It is awake."""
        self.words[NEED] = 0

    # -- memory -------------------------------------------------------------------------------------------------------

    def slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """All slots of every rank, one flat tensor of `dtype` a rank."""
        found = self._typed.get(dtype)
        if found is None:
            begin = self.layout.slots_bytes
            found = [segment.data[begin : begin + DEPTH * SLOT].view(dtype) for segment in self.segments]
            self._typed[dtype] = found
        return found

    def in_slots(self, dtype: torch.dtype, count: int, index: int, offset: int = 0) -> list[torch.Tensor]:
        """`count` elements of every rank's slot, from `offset` on. Kept, since equal calls come again and again."""
        key = dtype, count, index, offset
        found = self._views.get(key)
        if found is None:
            begin = index * (SLOT // dtype.itemsize) + offset
            found = [slots[begin : begin + count] for slots in self.slots(dtype)]
            if len(self._views) > 512:
                self._views.clear()
            self._views[key] = found
        return found

    def shaped(self, dtype: torch.dtype, shape: torch.Size, index: int, offset: int) -> list[torch.Tensor]:
        """The same in a shape."""
        key = dtype, shape, index, offset
        found = self._shaped.get(key)
        if found is None:
            found = [view.view(shape) for view in self.in_slots(dtype, shape.numel(), index, offset)]
            if len(self._shaped) > 512:
                self._shaped.clear()
            self._shaped[key] = found
        return found

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Private memory for the duration of one reduction."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._scratch

    def release(self) -> None:
        """Let go of all memory, though a user may still hold the group."""
        self.segments, self.peers, self.other_words, self._bells = [], [], [], []
        self._typed, self._views, self._shaped, self.slot_address = {}, {}, {}, []
        self.other_longs = []
        self.words = memoryview(bytearray(4096)).cast("I")
        self._longs = memoryview(bytearray(4096)).cast("Q")
