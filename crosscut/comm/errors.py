"""Errors of the communication layer. No torch.

What a user passes wrongly is a `ValueError` raised before any data moves. The classes here are for what goes wrong
between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping


class CommError(RuntimeError):
    """Communication between ranks failed."""


class MismatchError(CommError):
    """Ranks of one group made different calls at the same place of the group's order of calls."""


class DeadlockError(CommError):
    """No rank can go on: each waits for a call that another will not make."""


class StuckError(CommError):
    """A rank kept the others waiting for longer than the time-out; the message shows its stack."""


class PeerError(CommError):
    """This rank was stopped because another one failed. Secondary: a launcher folds it and shows the first error."""


class RankError(RuntimeError):
    """One rank failed, and with it the world: the first real error, its rank named, the other ranks folded.

    `rank`, `world_size`; `original` is the rank's exception where it could be carried over (None for a process that
    died), `traceback_text` its traceback; `folded` maps the other failed ranks to one line each. If the rank raised a
    ValueError then this is one too, so that a caller may treat a user's mistake alike in and out of a world.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        world_size: int,
        original: BaseException | None = None,
        traceback_text: str = "",
        folded: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.world_size = world_size
        self.original = original
        self.traceback_text = traceback_text
        self.folded = dict(folded or {})


class RankValueError(RankError, ValueError):
    """A `RankError` whose first error was a ValueError."""


def one_line(error: BaseException | str, limit: int = 500) -> str:
    """`ValueError: what it says`, on one line of at most `limit` characters."""
    if isinstance(error, str):
        text = error
    else:
        text = type(error).__name__ + (f": {error}" if str(error) else "")
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """`rank 3`, `ranks 0,2,3`, or a shortened list for large worlds."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ",".join(map(str, ranks[:8])) + (f",... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"ranks {shown}"


def rank_error(
    error: BaseException | str,
    *,
    rank: int,
    world_size: int,
    stopped: list[int],
    seconds: float,
    traceback_text: str = "",
    folded: Mapping[int, str] | None = None,
    is_value_error: bool | None = None,
) -> RankError:
    """The error a launcher raises for a failed world. `error` is an exception, or a sentence about the rank."""
    said = f"rank {rank} of {world_size} " + (error if isinstance(error, str) else f"raised {one_line(error)}")
    if stopped:
        said += f"; stopped {ranks_text(stopped)} after {seconds:.1f} s"
    if is_value_error is None:
        is_value_error = isinstance(error, ValueError)
    cls = RankValueError if is_value_error else RankError
    original = None if isinstance(error, str) else error
    return cls(said, rank=rank, world_size=world_size, original=original, traceback_text=traceback_text, folded=folded)
