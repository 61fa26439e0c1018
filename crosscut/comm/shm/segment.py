"""Anonymous shared memory: `memfd_create` makes it, peers open it as /proc/PID/fd/FD.

It has no name in any file system, so nothing is left behind however a process ends: the kernel frees it with the last
process that maps it. The 64 MiB of a container's /dev/shm do not limit it.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

_NAME = "crosscut-shm"


class Segment:
    """Mapped shared memory: `words` (32-bit), `longs` (64-bit), `address` of its first byte, `data` (a uint8 tensor).

    All of it stays valid as long as anything refers to it.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._map = mmap.mmap(fd, num_bytes)
        view = memoryview(self._map)
        self.words = view.cast("I")
        self.longs = view.cast("Q")
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def create(num_bytes: int) -> tuple[Segment, int]:
    """A new zeroed segment and its descriptor, to be closed once every peer has opened it."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        return Segment(fd, num_bytes), fd
    except BaseException:
        os.close(fd)
        raise


def open_peer(pid: int, fd: int, num_bytes: int) -> Segment | None:
    """The segment that process `pid` has under descriptor `fd`; None if there is no such thing (any more).

    Raises PermissionError if this user may not look into that process.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        here = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        return Segment(here, num_bytes) if os.fstat(here).st_size == num_bytes else None
    finally:
        os.close(here)
