"""The processes one talks to: their doorbells, and whether they live. One `Peer` a process, shared by all groups."""

from __future__ import annotations

import os
import select
import weakref

from crosscut.comm.shm import futex
from crosscut.comm.shm.layout import ASLEEP, PAGE_BYTES, PAGE_KEY
from crosscut.comm.shm.segment import Segment, create, open_peer


class Page:
    """This process's doorbell: where peers see that it sleeps, and ring."""

    def __init__(self) -> None:
        self.segment, self.fd = create(PAGE_BYTES)
        self.words = self.segment.words
        self.address = self.segment.address + 4 * ASLEEP
        self.key = int.from_bytes(os.urandom(4), "little") | 1
        self.pid = os.getpid()
        self.words[PAGE_KEY] = self.key

    def close(self) -> None:
        """The last group is gone: nobody will open it, or ring."""
        os.close(self.fd)
        self.words = memoryview(bytearray(PAGE_BYTES)).cast("I")
        del self.segment


class Peer:
    """Another process of the world (or this one): `pid`, `words` of its page, `bell` (the address of ASLEEP)."""

    def __init__(self, pid: int, page: Segment) -> None:
        self.pid = pid
        self.words = page.words
        self.bell = page.address + 4 * ASLEEP
        self._page = page
        self._pidfd = os.pidfd_open(pid)

    def alive(self) -> bool:
        """Whether the process runs; false at once when it ends, however it ends (its parent need not have waited)."""
        poll = select.poll()  # its own each time: two threads may not poll one
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def ring(self) -> None:
        """Wake the process if it sleeps. What it sleeps for must have been written, and fenced, before."""
        if self.words[ASLEEP]:
            self.words[ASLEEP] = 0
            futex.wake(self.bell)

    def __del__(self) -> None:
        if hasattr(self, "_pidfd"):
            os.close(self._pidfd)


class Peers:
    """The peers of this process, found again by every group that has them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[int, int], Peer] = weakref.WeakValueDictionary()

    def get(self, pid: int, page_fd: int, page_key: int) -> Peer | None:
        """The peer with that page; None if there is none (any more)."""
        peer = self._known.get((pid, page_key))
        if peer is None:
            page = open_peer(pid, page_fd, PAGE_BYTES)
            if page is None or page.words[PAGE_KEY] != page_key:
                return None
            try:
                peer = Peer(pid, page)
            except ProcessLookupError:
                return None
            self._known[pid, page_key] = peer
        return peer
