"""Sleep until a word in shared memory changes: the futex system call through ctypes (man 2 futex).

`wait` lets other Python threads run (ctypes.CDLL drops the GIL around the call); `wake` keeps the GIL, since giving it
away can cost milliseconds and waking takes a microsecond.
"""

from __future__ import annotations

import ctypes
import threading

_SYS_FUTEX = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # the words are shared between processes, so not the private variants
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_wait = ctypes.CDLL(None).syscall
_wait.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
]
_wait.restype = ctypes.c_long
_wake = ctypes.PyDLL(None).syscall
_wake.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
_wake.restype = ctypes.c_long

_barrier = threading.Lock()


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, at most `timeout_s`; may return early for no reason."""
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _wait(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`."""
    _wake(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY)


def fence() -> None:
    """Order the stores before against the loads after.

    x86-64 may run a load before an earlier store of another word is visible: "I posted; does anybody sleep?" against "I
    sleep; did anybody post?" could then both be answered no. Taking a free lock is an atomic instruction, which waits
    for the stores. (Should another thread hold it just now, sleepers find out by their time-out.)
    """
    if _barrier.acquire(False):
        _barrier.release()
