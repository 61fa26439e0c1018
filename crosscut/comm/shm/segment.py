"""Anonymous shared memory: `memfd_create` makes it, peers open it as /proc/PID/fd/FD.

It has no name in any file system, so nothing is left behind however a process ends: the kernel frees it with the last
process that maps it. The 64 MiB of a container's /dev/shm do not limit it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

_NAME = "crosscut-shm"
_FAILED = 2**64 - 1
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """Mapped shared memory: `words` (32-bit), `longs` (64-bit), `address` of its first byte, `data` (a uint8 tensor).

    All of it stays valid as long as anything refers to it, then the memory is unmapped. (Mapped through ctypes, since
    Python's own mmap keeps a descriptor open for each.)
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        address = _mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {num_bytes} bytes of shared memory: {os.strerror(number)}")
        memory = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(memory, _munmap, address, num_bytes).atexit = False
        view = memoryview(memory).cast("B")
        self.words = view.cast("I")
        self.longs = view.cast("Q")
        self.data = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = int(address)


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
