"""A group's ranks find each other's segments, through the store that torch hands to every back end.

Each rank publishes where its segment is: `host pid fd key page_fd page_key`. Each opens its peers' and writes, in its
own segment, the key of every segment it has mapped (SEEN). A rank is through when all peers have seen *its* key: then
nobody needs its descriptor any more. A store may still hold what an earlier world in the same processes has published:
such a record names a segment that is gone, or that never shows our key, so records are read again until all agree.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from crosscut.comm.errors import PeerError, StuckError, ranks_text
from crosscut.comm.shm.layout import OPEN, SEEN, STATE, SegmentLayout
from crosscut.comm.shm.peers import Page, Peer, Peers
from crosscut.comm.shm.segment import Segment, create, open_peer

_POLL_S = 0.0005
_REREAD_S = 0.02


@dataclass
class Meeting:
    """The segments and processes of a group, in rank order; one's own among them."""

    segments: list[Segment]
    peers: list[Peer]
    key: int  # the same on all ranks, and of no earlier meeting


def meet(store: Any, rank: int, size: int, timeout_s: float, page: Page, known: Peers) -> Meeting:
    """Collective over the group. Raises StuckError naming the ranks that do not come, PeerError naming one that died,
    ValueError if one is on another machine.
    """
    layout = SegmentLayout.of(size)
    own, fd = create(layout.total_bytes)
    try:
        key = int.from_bytes(os.urandom(8), "little") | 1
        own.longs[SEEN // 2 + rank] = key
        own.words[STATE] = OPEN
        host = _host()
        store.set(f"crosscut-shm/{rank}", f"{host} {os.getpid()} {fd} {key} {page.fd} {page.key}")
        segments: list[Segment | None] = [own if r == rank else None for r in range(size)]
        peers: list[Peer | None] = [known.get(page.pid, page.fd, page.key) if r == rank else None for r in range(size)]
        records = [""] * size
        waiting = [r for r in range(size) if r != rank]
        deadline, reread = time.monotonic() + timeout_s, 0.0
        while waiting:
            now = time.monotonic()
            if now >= reread:
                reread = now + _REREAD_S
                for r in waiting:
                    if store.check([f"crosscut-shm/{r}"]):
                        record = store.get(f"crosscut-shm/{r}").decode()
                        if record != records[r] or segments[r] is None:
                            records[r] = record
                            segments[r], peers[r] = _open(record, host, r, layout.total_bytes, known)
                            own.longs[SEEN // 2 + r] = 0 if segments[r] is None else int(record.split()[3])
                if any(segments[r] is None for r in waiting):
                    reread = 0.0
            waiting = [r for r in waiting if not _sees(segments[r], rank, key)]
            if waiting and now > deadline:
                raise StuckError(
                    f"shm: waited {timeout_s:g} s for {ranks_text(waiting)} of {size} to join the group; start every "
                    f"rank, or raise the time-out"
                )
            for r in waiting:
                peer = peers[r]
                if peer is not None and not peer.alive() and not _sees(segments[r], rank, key):
                    if store.get(f"crosscut-shm/{r}").decode() == records[r]:
                        raise PeerError(f"shm: rank {r} (pid {peer.pid}) ended while the group was made")
                    reread = 0.0
            if waiting:
                time.sleep(_POLL_S)
    finally:
        os.close(fd)
    found = [segment for segment in segments if segment is not None]
    return Meeting(found, [peer for peer in peers if peer is not None], found[0].longs[SEEN // 2])


def _sees(segment: Segment | None, rank: int, key: int) -> bool:
    return segment is not None and segment.longs[SEEN // 2 + rank] == key


def _open(record: str, host: str, rank: int, num_bytes: int, known: Peers) -> tuple[Segment | None, Peer | None]:
    """Map what a record names; (None, None) if it is stale."""
    theirs, *numbers = record.split()
    if theirs != host:
        raise ValueError(
            f"backend='shm': rank {rank} runs on another machine or in another container; use backend='gloo'"
        )
    pid, fd, key, page_fd, page_key = map(int, numbers)
    try:
        peer = known.get(pid, page_fd, page_key)
        segment = open_peer(pid, fd, num_bytes) if peer is not None else None
    except PermissionError as error:
        raise ValueError(
            f"backend='shm': this user may not open the memory of rank {rank} (pid {pid}): {error.strerror}; run all "
            f"ranks as one user, or use backend='gloo'"
        ) from None
    if segment is None or segment.longs[SEEN // 2 + rank] != key:
        return None, None
    return segment, peer


def _host() -> str:
    """What two processes that can see each other's /proc have in common."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
