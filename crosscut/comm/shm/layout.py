"""Where things lie in the shared memory of a rank. Pure arithmetic, no torch.

Each rank has one *segment* a group; it alone writes there, with one exception (the doorbell, below), so no word ever
has two writers. The words are 32-bit, and counters are compared modulo 2^32. A line is a cache line, so that a rank
that writes one counter does not disturb the readers of another.

    segment of rank r                                    written by r, read by all
    +--------------------------------------------------+
    | STATE CULPRIT CALLS NEED        one line          |  open, left, failed (because of whom); calls begun; see below
    | POSTED                          one line          |  steps whose slot r has filled
    | DONE                            one line          |  steps after which r reads no older slot
    | SEEN[p]                                           |  rendezvous: the key of peer p's segment, as r sees it
    | signature of each recent call   8 bytes each      |  what was called: op, dtype, root, bytes
    | SENT[p]   TAKEN[p]              two lines a peer   |  messages: parts sent to p, parts taken from p
    | header[p][part]                 32 bytes each     |  messages: size, tag
    +--------------------------------------------------+
    | slot 0 | slot 1 | ... DEPTH slots of SLOT bytes    |  collectives: step k uses slot k % DEPTH
    | parts to peer 0 | parts to peer 1 | ...            |  messages: PARTS parts of PART bytes for each peer
    +--------------------------------------------------+

Memory that is never touched costs nothing (the kernel gives pages on first use), so sizes are generous.

Each process also has one *page* for all its groups: KEY and ASLEEP, its doorbell. Before it sleeps it writes ANYTHING
there; whoever posts something writes 0 and wakes it. All others write the same 0, so those writers cannot disagree.
A process that waits for one counter of one group writes EXACTLY, and in NEED which counter, of whom, must reach what:
then only the last of those it waits for wakes it, not each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

LINE = 16  # words
STATE, CULPRIT, CALLS, NEED, NEED_TARGET, NEED_SOURCE = range(6)  # words of the first line
POSTED = LINE
DONE = 2 * LINE
SEEN = 3 * LINE
OPEN, LEFT, FAILED, ABORTED = 1, 2, 3, 4  # values of STATE

SIGNATURES = 64  # calls remembered; more than DEPTH, since ranks may be that many calls apart
DEPTH = 4
SLOT = 1 << 19  # bytes; all slots of all ranks stay in a shared cache, where a peer finds them
PARTS = 8
PART = 1 << 18  # bytes
HEADER = 8  # words

PAGE_KEY, ASLEEP = 0, LINE
ANYTHING, EXACTLY = 1, 2  # values of ASLEEP
PAGE_BYTES = 4096
BEHIND = 0x80000000  # (counter - target) & BEHIND: the counter has not reached the target


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets of a group of `size` ranks: in words, except those that end in _bytes."""

    size: int
    signatures_bytes: int
    sent: int
    taken: int
    headers: int
    slots_bytes: int
    parts_bytes: int
    total_bytes: int

    @staticmethod
    def of(size: int) -> SegmentLayout:
        """The layout for a group of `size` ranks."""
        signatures = _up(SEEN + 2 * size, LINE)
        sent = signatures + 2 * SIGNATURES
        taken = sent + size * LINE
        headers = taken + size * LINE
        slots_bytes = _up(4 * (headers + size * PARTS * HEADER), 4096)
        parts_bytes = slots_bytes + DEPTH * SLOT
        return SegmentLayout(
            size, 4 * signatures, sent, taken, headers, slots_bytes, parts_bytes, parts_bytes + size * PARTS * PART
        )

    def header(self, peer: int, part: int) -> int:
        """The first word of the header of a part to `peer`."""
        return self.headers + (peer * PARTS + part) * HEADER

    def part_bytes(self, peer: int, part: int) -> int:
        """Where a part to `peer` lies."""
        return self.parts_bytes + (peer * PARTS + part) * PART
