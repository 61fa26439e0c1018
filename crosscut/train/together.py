"""Local work that all ranks finish, or none: what one rank alone meets (a full disk, a bad file) must stop all of them.

An error on one rank that the others do not hear of leaves them waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosscut.comm.context import Context


@contextmanager
def all_or_none(ctx: Context, make: Callable[[str], Exception] | None = None) -> Iterator[None]:
    """A block of local work that all ranks finish, or all raise. Collective; the block itself must not communicate.

    On failure every rank raises `make(message)` with the message of the first rank that failed. Without `make` that
    rank raises its own error, and the others a ValueError with its message.
    """
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    messages = ctx.all_gather_object(None if caught is None else _message(caught), tag="all_or_none")
    first = next((message for message in messages if message is not None), None)
    if first is None:
        return
    if make is not None:
        raise make(first) from caught
    raise caught or ValueError(first)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__
