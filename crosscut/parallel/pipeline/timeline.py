"""A schedule on a simulated clock: does it finish, how long does it take, what does it keep, how does it look.

`simulate` is the one interpreter of action lists without processes; `bubble_fraction` and `utilisation` read its clock,
`validate` uses it to find deadlocks, `draw` prints it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from crosscut.parallel.pipeline.schedules import SENDS, Action

Sends = Literal["buffered", "rendezvous", "channels", "one_channel"]


class ScheduleError(ValueError):
    """An action list that cannot be run, or would compute something else than one device does."""


@dataclass(frozen=True)
class Span:
    """One F or B on the clock of its rank: [start, end)."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank computes what. `ranks[r]` are its spans in order; `total` is when the last rank is done."""

    ranks: tuple[tuple[Span, ...], ...]
    total: float

    @property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time it computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.ranks)


Key = tuple[int, int, int, int, int]  # sender rank, receiver rank, channel, sender's stage, micro-batch


def message_key(rank: int, action: Action) -> Key:
    """What a send and its receive have in common: equal for both ends of one message."""
    if action.peer is None:
        raise ScheduleError(f"rank {rank}: {action} has no peer")
    if action.kind in SENDS:
        return (rank, action.peer, action.channel, action.stage, action.micro)
    sender_stage = action.stage - 1 if action.channel == 0 else action.stage + 1
    return (action.peer, rank, action.channel, sender_stage, action.micro)


@dataclass
class _Rank:
    actions: Sequence[Action]
    index: int = 0
    clock: float = 0.0
    spans: list[Span] = field(default_factory=list)
    lanes: dict[int, deque[tuple[float, Action]]] = field(default_factory=dict)  # posted, not yet matched
    lane_clock: dict[int, float] = field(default_factory=dict)
    posted: int = -1  # index of the action last posted to a lane
    arrived: dict[Key, float] = field(default_factory=dict)  # messages whose data are here, and since when
    sent: dict[Key, float] = field(default_factory=dict)


def simulate(
    lists: Sequence[Sequence[Action]],
    t_f: float = 1.0,
    t_b: float = 2.0,
    t_comm: float = 0.0,
    sends: Sends = "buffered",
) -> Timeline:
    """Run the lists on a clock: F takes `t_f`, B takes `t_b`, a message takes `t_comm` (any one unit of time).

    sends says what a send waits for:
      buffered     nothing: the data are copied away (threads; Gloo with asynchronous sends)
      rendezvous   the sender stands still until the receiver takes the message (a blocking send)
      channels     the sender goes on; each rank does the messages of each channel in order, one at a time, and a
                   message moves when both ends have reached it (asynchronous NCCL, one communicator a channel)
      one_channel  the same with both channels on one communicator
    Raises ScheduleError, naming every rank's position, if the ranks wait for each other for ever.
    """
    ranks = [_Rank(list(actions)) for actions in lists]
    moved = True
    while moved:
        moved = False
        for rank in range(len(ranks)):
            while _advance(rank, ranks, t_f, t_b, t_comm, sends):
                moved = True
        if sends != "buffered":
            moved |= _match_heads(ranks, t_comm)
    stuck = [(r, state.index, state.actions[state.index]) for r, state in enumerate(ranks) if _unfinished(state)]
    if stuck:
        where = "; ".join(f"rank {r} waits at action {i}, {action}" for r, i, action in stuck)
        raise ScheduleError(f"deadlock with {sends} sends: {where}")
    return Timeline(tuple(tuple(state.spans) for state in ranks), max((state.clock for state in ranks), default=0.0))


def _unfinished(state: _Rank) -> bool:
    return state.index < len(state.actions)


def _advance(rank: int, ranks: list[_Rank], t_f: float, t_b: float, t_comm: float, sends: Sends) -> bool:
    """Do this rank's next action if it need not wait; say whether it was done."""
    state = ranks[rank]
    if not _unfinished(state):
        return False
    action = state.actions[state.index]
    if action.is_compute:
        end = state.clock + (t_f if action.kind == "F" else t_b)
        state.spans.append(Span(action, state.clock, end))
        state.clock = end
        state.index += 1
        return True
    key = message_key(rank, action)
    if sends == "buffered":
        if action.kind in SENDS:
            ranks[key[1]].arrived[key] = state.clock + t_comm
            state.index += 1
            return True
    elif state.posted < state.index:
        lane = 0 if sends != "channels" else action.channel
        state.lanes.setdefault(lane, deque()).append((state.clock, action))
        state.posted = state.index
    if action.kind in SENDS:
        if sends == "rendezvous":
            if key not in state.sent:
                return False
            state.clock = max(state.clock, state.sent[key])
        state.index += 1
        return True
    if key not in state.arrived:
        return False
    state.clock = max(state.clock, state.arrived[key])
    state.index += 1
    return True


def _match_heads(ranks: list[_Rank], t_comm: float) -> bool:
    """Move the messages whose two ends both stand at the head of their rank's lane."""
    moved = False
    for rank, state in enumerate(ranks):
        for lane, queue in state.lanes.items():
            if not queue or queue[0][1].kind not in SENDS:
                continue
            posted, action = queue[0]
            key = message_key(rank, action)
            other = ranks[key[1]]
            theirs = other.lanes.get(lane)
            if not theirs or theirs[0][1].kind in SENDS or message_key(key[1], theirs[0][1]) != key:
                continue
            start = max(posted, theirs[0][0], state.lane_clock.get(lane, 0.0), other.lane_clock.get(lane, 0.0))
            queue.popleft()
            theirs.popleft()
            state.sent[key] = other.arrived[key] = start + t_comm
            state.lane_clock[lane] = other.lane_clock[lane] = start + t_comm
            moved = True
    return moved


def utilisation(lists: Sequence[Sequence[Action]], t_f: float = 1.0, t_b: float = 2.0) -> float:
    """Busy time over all time, of all ranks together: m/(m+p-1) for `forward_only`, gpipe and 1f1b."""
    timeline = simulate(lists, t_f, t_b)
    return sum(timeline.busy) / (timeline.total * len(lists))


def bubble_fraction(lists: Sequence[Sequence[Action]], t_f: float = 1.0, t_b: float = 2.0) -> float:
    """Idle time over ideal time, (total - ideal) / ideal: (p-1)/m for gpipe and 1f1b (Narayanan et al. 2021, 2.2).

    Ideal is the time that the busiest rank computes. Not to be mixed up with idle over total, which is 1 - utilisation.
    """
    timeline = simulate(lists, t_f, t_b)
    ideal = max(timeline.busy)
    return (timeline.total - ideal) / ideal


def peak_in_flight(lists: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Per rank, the most (stage, micro-batch) pairs whose forward is done and backward is not: what it must keep."""
    peaks = []
    for actions in lists:
        now = peak = 0
        for action in actions:
            now += {"F": 1, "B": -1}.get(action.kind, 0)
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


def grid(lists: Sequence[Sequence[Action]], t_f: int = 1, t_b: int = 2) -> list[list[Action | None]]:
    """The timeline as one row a rank and one cell a unit of time: the action computed then, or None when idle."""
    timeline = simulate(lists, t_f, t_b)
    rows: list[list[Action | None]] = [[None] * int(timeline.total) for _ in timeline.ranks]
    for row, spans in zip(rows, timeline.ranks, strict=True):
        for span in spans:
            for t in range(int(span.start), int(span.end)):
                row[t] = span.action
    return rows


def draw(lists: Sequence[Sequence[Action]], t_f: int = 1, t_b: int = 2) -> str:
    """The timeline as plain text, a line a rank: `F0` is the forward of micro-batch 0, `.` an idle unit of time."""
    width = 1 + max((len(str(a.micro)) for actions in lists for a in actions), default=1)
    several = len({a.stage for actions in lists for a in actions}) > len(lists)
    lines = []
    for rank, row in enumerate(grid(lists, t_f, t_b)):
        cells = []
        for action in row:
            text = "." if action is None else f"{action.kind}{action.micro}"
            if action is not None and several:
                text += f"/{action.stage}"
            cells.append(text.ljust(width + (2 if several else 0)))
        lines.append(f"rank {rank}  " + " ".join(cells).rstrip())
    return "\n".join(lines)
