"""Can this machine run the `shm` back end? No torch."""

from __future__ import annotations

import os
import platform
import sys
from functools import lru_cache


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """None if `shm` can run here, else the reason in words."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return f"it relies on the memory order of x86-64, this is {machine}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this Python was built without memfd_create or pidfd_open"
    try:
        os.close(os.pidfd_open(os.getpid()))
        fd = os.memfd_create("crosscut-probe", os.MFD_CLOEXEC)
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        finally:
            os.close(fd)
    except OSError as error:
        return f"this system refuses what it needs (memfd_create, pidfd_open, /proc/PID/fd): {error}"
    return None


def require() -> None:
    """Raise ValueError unless `shm` can run here."""
    reason = why_not()
    if reason is not None:
        raise ValueError(f"backend='shm' cannot run here: {reason}; use backend='gloo'")
