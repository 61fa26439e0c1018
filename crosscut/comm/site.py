"""Where in the user's code a call was made. No torch."""

from __future__ import annotations

import os
import sys
from functools import cache, lru_cache
from types import FrameType

_COMM = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"


_ours: dict[str, bool] = {}  # a dict, since every call looks a few names up


def _is_ours(filename: str) -> bool:
    """Frames to skip: this package's communication code, torch's, and contextlib's."""
    ours = filename.startswith(_COMM) or _TORCH in filename or filename.endswith(("contextlib.py", "<string>"))
    if len(_ours) < 4096:
        _ours[filename] = ours
    return ours


@lru_cache(maxsize=4096)
def short_path(filename: str) -> str:
    """The path from the working directory if it is below it, else its last two components."""
    here = os.getcwd() + os.sep
    if filename.startswith(here):
        return filename[len(here) :]
    return os.sep.join(filename.split(os.sep)[-2:])


def call_site() -> str:
    """`file:line` of the nearest caller outside the communication code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not (_ours[filename] if filename in _ours else _is_ours(filename)):
            break
        frame = frame.f_back
    if frame is None:
        return "?"
    return _site(frame.f_code.co_filename, frame.f_lineno)


@cache
def _site(filename: str, line: int) -> str:
    return f"{short_path(filename)}:{line}"
