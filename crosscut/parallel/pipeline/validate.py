"""Checks any lists of pipeline actions before a process runs them.

The checks go from the single action to the whole: fields; each stage's forwards and backwards; every value made before
it is used or sent; every message with one send and one receive, in the same order at both ends; and a simulated run
that must reach the end. The first fault is raised as one ScheduleError that names rank, index and action.
"""

from __future__ import annotations

from collections.abc import Sequence

from crosscut.parallel.pipeline.schedules import COMPUTE, RECVS, SENDS, Action
from crosscut.parallel.pipeline.timeline import Key, ScheduleError, message_key, simulate

Where = tuple[int, int, Action]  # rank, index, action
Computed = dict[tuple[str, int, int], Where]  # (kind, stage, micro-batch) -> where it is computed
Ordered = dict[tuple[int, int, int], tuple[list[tuple[Key, Where]], list[tuple[Key, Where]]]]
#   (sender, receiver, channel) -> its sends and its receives, each in their rank's order


def validate(
    lists: Sequence[Sequence[Action]],
    num_stages: int | None = None,
    num_micro: int | None = None,
    backward: bool = True,
) -> None:
    """Raise ScheduleError unless the lists compute every stage of every micro-batch exactly as one device would.

    num_stages and num_micro: what the lists must cover; read from the lists if None. backward: False for lists of
    forwards only. Sends are taken as asynchronous: the lists must run with a buffer for each message, and with one
    in-order communicator for each direction (`simulate(..., sends="channels")`).
    """
    entries = [(rank, index, action) for rank, actions in enumerate(lists) for index, action in enumerate(actions)]
    stages = num_stages if num_stages is not None else max((a.stage for _, _, a in entries), default=-1) + 1
    micros = num_micro if num_micro is not None else max((a.micro for _, _, a in entries), default=-1) + 1
    for entry in entries:
        _check_fields(entry, len(lists), stages, micros, backward)
    computed = _check_compute(entries, stages, micros, backward)
    rank_of = {a.stage: rank for rank, _, a in entries if a.is_compute}
    messages = _check_messages(entries, rank_of, stages, computed)
    _check_order(messages)
    for sends in ("buffered", "channels"):
        simulate(lists, sends=sends)


def _fail(entry: Where, what: str) -> ScheduleError:
    rank, index, action = entry
    return ScheduleError(f"rank {rank}, action {index}, {action}: {what}")


def _check_fields(entry: Where, num_ranks: int, stages: int, micros: int, backward: bool) -> None:
    rank, _, action = entry
    if action.kind not in COMPUTE + SENDS + RECVS:
        raise _fail(entry, f"unknown kind {action.kind!r}")
    if action.channel == 1 and not backward:
        raise _fail(entry, "a backward action in a schedule of forwards only")
    if not 0 <= action.stage < stages:
        raise _fail(entry, f"there is no such stage; stages are 0 to {stages - 1}")
    if not 0 <= action.micro < micros:
        raise _fail(entry, f"there is no such micro-batch; micro-batches are 0 to {micros - 1}")
    if action.is_compute:
        if action.peer is not None:
            raise _fail(entry, "F and B have no peer")
    elif action.peer is None or not 0 <= action.peer < num_ranks:
        raise _fail(entry, f"a send or receive needs a peer, a rank from 0 to {num_ranks - 1}")
    elif action.peer == rank:
        raise _fail(entry, "a rank cannot send to itself; leave the message out")


def _check_compute(entries: Sequence[Where], stages: int, micros: int, backward: bool) -> Computed:
    """Each (stage, micro-batch) has one F, then one B, on one rank; returns where each is."""
    seen: Computed = {}
    home: dict[int, int] = {}
    for entry in entries:
        rank, _, action = entry
        if not action.is_compute:
            continue
        if home.setdefault(action.stage, rank) != rank:
            raise _fail(entry, f"stage {action.stage} is already computed on rank {home[action.stage]}")
        key = (action.kind, action.stage, action.micro)
        if key in seen:
            raise _fail(entry, f"computed a second time; first at action {seen[key][1]}")
        if action.kind == "B" and ("F", action.stage, action.micro) not in seen:
            raise _fail(entry, "backward before its forward")
        seen[key] = entry
    for stage in range(stages):
        for micro in range(micros):
            for kind in COMPUTE if backward else COMPUTE[:1]:
                if (kind, stage, micro) not in seen:
                    on = f"rank {home[stage]}" if stage in home else "no rank"
                    raise ScheduleError(f"{on}: {kind}(stage {stage}, micro {micro}) is missing")
    return seen


def _check_messages(entries: Sequence[Where], rank_of: dict[int, int], stages: int, computed: Computed) -> Ordered:
    """Every value is made before it is sent and here before it is used; every message has both ends, once each.

    Returns the messages of each directed pair and channel, in order at either end.
    """
    sends: dict[Key, Where] = {}
    recvs: dict[Key, Where] = {}
    ordered: Ordered = {}
    for entry in entries:
        rank, index, action = entry
        if action.is_compute:
            continue
        key = message_key(rank, action)
        is_send = action.kind in SENDS
        ends = sends if is_send else recvs
        if key in ends:
            raise _fail(entry, f"the same message a second time; first at action {ends[key][1]}")
        neighbour = key[3] + (1 if action.channel == 0 else -1) if is_send else key[3]
        if not 0 <= neighbour < stages:
            raise _fail(entry, "there is no stage at the other end")
        if rank_of[action.stage] != rank:
            raise _fail(entry, f"stage {action.stage} is on rank {rank_of[action.stage]}")
        if rank_of[neighbour] != action.peer:
            raise _fail(entry, f"stage {neighbour} is on rank {rank_of[neighbour]}, not on rank {action.peer}")
        at = computed[("F" if action.channel == 0 else "B", action.stage, action.micro)][1]
        if is_send and at > index:
            raise _fail(entry, f"sent before it is computed (action {at})")
        if not is_send and at < index:
            raise _fail(entry, f"received after it is used (action {at})")
        ends[key] = entry
        ordered.setdefault(key[:3], ([], []))[0 if is_send else 1].append((key, entry))
    for (kind, stage, micro), entry in computed.items():
        source = stage - 1 if kind == "F" else stage + 1
        if not 0 <= source < stages:
            continue
        rank, index, _ = entry
        if rank_of[source] == rank:
            if computed[(kind, source, micro)][1] > index:
                raise _fail(entry, f"stage {source}, on the same rank, computes its input only later")
        elif (rank_of[source], rank, 0 if kind == "F" else 1, source, micro) not in recvs:
            raise _fail(entry, f"its input from stage {source} (rank {rank_of[source]}) is never received")
    for key, entry in recvs.items():
        if key not in sends:
            raise _fail(entry, f"rank {key[0]} never sends it")
    for key, entry in sends.items():
        if key not in recvs:
            raise _fail(entry, f"rank {key[1]} never receives it")
    return ordered


def _check_order(messages: Ordered) -> None:
    """Messages carry no name on the wire: the n-th receive gets the n-th send."""
    for (sender, _, _), (sends, recvs) in messages.items():
        for (sent, sent_at), (received, received_at) in zip(sends, recvs, strict=True):
            if sent != received:
                where = f"action {sent_at[1]}, {sent_at[2]}"
                raise _fail(received_at, f"rank {sender} sends in another order: its message at this place is {where}")
