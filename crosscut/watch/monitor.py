"""The monitor: a light process of its own that watches a run folder and ends the job when it hangs. No torch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from crosscut.watch.folder import path_of
from crosscut.watch.program import SET_UP_LIMIT
from crosscut.watch.watchdog import Watchdog, end_ranks


def main(words: list[str]) -> int:
    """`RUN HANG_TIMEOUT PID`: watch until the process PID and all ranks have ended; 3 if they had to be ended."""
    run, timeout_s, parent = Path(words[0]), float(words[1]), int(words[2])
    set_up_s = float(os.environ.get(SET_UP_LIMIT, 0))
    dog = Watchdog(run, timeout_s or None, since=time.time() - 30, set_up_s=set_up_s or None)

    def stop() -> bool:
        return dog.over() or not (Path(f"/proc/{parent}").exists() or dog.alive())

    found = dog.watch(stop)
    rings = dog.rings()
    if found is not None:
        print("\n".join(["crosscut watch:", *found.lines(), f"run: {run}"]), file=sys.stderr, flush=True)
        end_ranks(run, rings)
    for rank in rings:
        path_of(run, rank, "stop").unlink(missing_ok=True)
    return 0 if found is None else 3


if __name__ == "__main__":
    os.nice(5)  # the ranks come first
    sys.exit(main(sys.argv[1:]))
