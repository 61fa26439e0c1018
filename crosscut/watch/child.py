"""The watched program itself: `python -m crosscut.watch.child SCRIPT ARGS...`, or `-m MODULE ARGS...`."""

from __future__ import annotations

import ctypes
import io
import os
import runpy
import signal
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Frames that stand around the program, and around its calls.
_OURS = (
    runpy.run_module.__code__.co_filename,
    _PACKAGE + "watch" + os.sep,
    os.path.join(_PACKAGE, "comm", "intercept"),
)


def main() -> None:
    """Run the program as if it had been started directly, recorded."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the process that watches
    from crosscut.watch import program

    program.install()
    words = sys.argv[1:]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            _run_script(words[0])
    except SystemExit as stop:
        program.finish(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
        raise
    except BaseException:
        hook = sys.excepthook  # the program may have put its own in place
        sys.excepthook = lambda kind, error, trace: hook(kind, *_own(error, trace))
        raise
    program.finish(0)


def _run_script(path: str) -> None:
    """What `python PATH` does. (`runpy.run_path` puts this module back in the place of the program's before its exit
    handlers have run.)
    """
    file = os.path.abspath(path)
    module = ModuleType("__main__")
    vars(module).update(__file__=file, __cached__=None, __annotations__={}, __builtins__=__builtins__)
    module.__loader__ = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = module
    sys.path[0] = os.path.dirname(os.path.realpath(file))
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, vars(module))


def _own(error: BaseException, trace: TracebackType | None) -> tuple[BaseException, TracebackType | None]:
    """The error without the frames of the watch: its traceback is that of `python SCRIPT`."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(trace)
        trace = trace.tb_next
    first = None
    for one in reversed(kept):
        one.tb_next, first = first, one
    return error.with_traceback(first), first


if __name__ == "__main__":
    main()
