"""The watched program itself: `python -m crosscut.watch.child SCRIPT ARGS...`, or `-m MODULE ARGS...`."""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the program as if it had been started directly, recorded."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the process that watches
    from crosscut.watch import program
    from crosscut.watch.folder import LEDGER

    run = program.install()
    words = sys.argv[1:]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    finally:
        if sys.exc_info()[0] in (None, SystemExit):
            program.finish(code)
        if not any((run / LEDGER).glob("rank-*.ring")):
            said = "never called torch.distributed.init_process_group: nothing was recorded"
            print(f"crosscut watch: {words[0]} {said}", file=sys.stderr)


if __name__ == "__main__":
    main()
