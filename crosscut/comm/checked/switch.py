"""Is checked mode on? One rule: what the caller says, else CROSSCUT_CHECK, else it is on with threads. No torch."""

from __future__ import annotations

import os

VARIABLE = "CROSSCUT_CHECK"


def why_checked(check: bool | None, backend: str | None) -> str:
    """Why the calls of ranks are compared, in words; "" if they are not.

    Raises ValueError for a CROSSCUT_CHECK that is neither 0 nor 1, and for `check=False` with threads, which have every
    call at hand and always compare.
    """
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={said!r} in the environment is neither 0 nor 1; unset it, or use 1")
    if backend == "threads":
        if check is False:
            raise ValueError("check=False with backend='threads', which always compares calls; leave check out")
        return "ranks that are threads always are"
    if check is not None:
        return "check was asked for" if check else ""
    return f"{VARIABLE}=1" if said == "1" else ""
