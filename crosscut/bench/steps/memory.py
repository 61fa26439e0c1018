"""The largest number of bytes of tensors alive during a step, from the allocator's own events."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

Step = Callable[[], object]
_MARK = "crosscut.last_step"


def peak_bytes(make: Callable[[], Step]) -> int:
    """Make a step function, run it twice, and return the most bytes that were allocated at once during the second run.

    Everything is counted from before `make`: parameters, optimizer state, buckets, activations. Shared memory segments
    and what other threads allocate are not.
    """
    gc.collect()  # what is freed later must have been allocated later
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():  # where the profiler says that it starts and stops
        profile.start()
    step = make()
    step()
    with torch.profiler.record_function(_MARK):
        step()
    with _silent_stderr():
        profile.stop()
    # torch's own table of events keeps only what was allocated outside any operator: these are all of them.
    result: Any = profile.profiler
    events = result.kineto_results.events()
    began = next(event.start_ns() for event in events if event.name() == _MARK)
    live = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= began:
            most = max(most, live)
    return most


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Nothing reaches file descriptor 2: libraries write there past Python."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
