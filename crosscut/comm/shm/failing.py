"""What a rank says when its peers do not come: who is missing, who has ended, who is to blame.

Every segment has a STATE. A rank whose group breaks writes there that it has FAILED, and in CULPRIT why and because of
whom, so that its peers end as well, with an error that names the first cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crosscut.comm.errors import CommError, MismatchError, PeerError, StuckError, ranks_text
from crosscut.comm.shm.layout import ABORTED, BEHIND, CALLS, CULPRIT, FAILED, LEFT, STATE

if TYPE_CHECKING:
    from crosscut.comm.shm.channel import Channel
    from crosscut.comm.shm.operation import Need, Operation
    from crosscut.comm.shm.slots import Slots

ENDED, SLOW, MISMATCH, OTHER = range(4)  # why a rank has given up: the high half of CULPRIT


def reason_of(error: BaseException) -> int:
    """Which of the reasons an error is."""
    return MISMATCH if isinstance(error, MismatchError) else OTHER


def encode(reason: int, culprit: int) -> int:
    """The word CULPRIT."""
    return (reason << 16) | (culprit + 1)


def look(channel: Channel, waiting: Operation, expired_s: float | None) -> tuple[CommError, int, int] | None:
    """What keeps a call from ever going on: the error, the reason, the rank to blame; None if it still may.

    expired_s: its time-out, if that is over.
    """
    need = waiting.need
    if need is None:
        return None
    missing = _missing(channel, need)
    dead = 0
    for rank in missing:
        state = channel.segments[rank].words[STATE]
        ended = state == LEFT or not channel.peers[rank].alive()
        if not ended and state not in (FAILED, ABORTED):
            continue
        if rank not in _missing(channel, need):
            return None  # what it had to say was still on the way
        dead += 1
        if need.any_of and dead < len(missing):
            continue
        text, culprit = why(channel, rank)
        return PeerError(f"{waiting.text()}: {text}"), ENDED, culprit
    if expired_s is None or not missing:
        return None
    told = "; ".join(_progress_of(channel, rank, waiting) for rank in missing[:8])
    text = (
        f"{waiting.text()}: waited {expired_s:g} s for {ranks_text([channel.ranks[r] for r in missing])}: {told}; if "
        f"only slow, raise the time-out"
    )
    return StuckError(text), SLOW, missing[0]


def _missing(channel: Channel, need: Need) -> list[int]:
    return [r for r in need.sources if (channel.segments[r].words[need.word] - need.target) & BEHIND]


def _who(channel: Slots, rank: int) -> str:
    return f"rank {channel.ranks[rank]} (pid {channel.peers[rank].pid})"


def _progress_of(channel: Channel, rank: int, waiting: Operation) -> str:
    """What a rank that does not come has done so far."""
    who = _who(channel, rank)
    if waiting.steps is None:
        return f"{who} has not made the matching call"
    theirs = channel.segments[rank].words[CALLS]
    if theirs < channel.calls:
        return f"{who} has begun {theirs} calls of this group, this is call #{channel.calls}"
    return f"{who} has begun this call but does not go on with it"


def why(channel: Slots, rank: int) -> tuple[str, int]:
    """Why a rank will not come, and the rank that is to blame."""
    state = channel.segments[rank].words[STATE]
    who = _who(channel, rank)
    if state == ABORTED:
        return f"{who} has aborted the group", rank
    if state == LEFT:
        return f"{who} has destroyed the group", rank
    if state == FAILED:
        said = channel.segments[rank].words[CULPRIT]
        reason, culprit = said >> 16, (said & 0xFFFF) - 1
        if reason == ENDED:
            return f"{_who(channel, culprit)} has ended, as rank {channel.ranks[rank]} found", culprit
        if reason == SLOW:
            return f"{who} has given up waiting for {_who(channel, culprit)}", culprit
        if reason == MISMATCH:
            return f"{who} has found that the ranks make different calls", rank
        return f"{who} has failed in this group", rank
    return f"{who} has ended", rank
