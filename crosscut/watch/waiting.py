"""Who waits for whom: a rank that never came, a circle, a call that does not end. No torch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from crosscut.comm.errors import ranks_text
from crosscut.comm.wording import waits_text
from crosscut.watch.case import Case, Waits, began
from crosscut.watch.facts import Verdict
from crosscut.watch.lanes import lane_key, text
from crosscut.watch.reading import Record
from crosscut.watch.ring import FINISHED, RUNNING, SET_UP

NOT_STARTED = "it has not started recording, so its program has not come to init_process_group"
_SLOW_SET_UP = (
    "look at the line where it stands; if it is only slow, give it longer until its first call: --set-up-timeout S, "
    "install(set_up_timeout=S), or run.set_up_timeout_s of crosscut train"
)
_LATELY = 32  # calls before the hang that are looked at


def waiting(case: Case) -> Verdict | None:
    """The verdict over ranks that wait, None if none does."""
    waits = case.waits()
    if not waits:
        return _all_came(case)
    awaited = sorted({rank for _, absent in waits.values() for rank in absent})
    roots = [rank for rank in awaited if rank not in waits]
    if roots:
        return _missing(case, roots, waits)
    return _cycle(case, waits)


def _missing(case: Case, roots: list[int], waits: Waits) -> Verdict:
    record = min((record for record, absent in waits.values() if set(absent) & set(roots)), key=began)
    absent = [rank for rank in roots if rank in case.calls.absent(record)]
    sentence = case.waiting_sentence(record, waits)
    came = f"{ranks_text(tuple(absent))} never came: "
    gone = [rank for rank in absent if _has_returned(case, rank)]
    if gone:
        last = [f"its last call was {text(case.rings[rank].records[-1])}" for rank in gone if case.rings[rank].records]
        said = f"{ranks_text(tuple(gone))} never came: it has ended; {last[0] if last else 'it made no call'}"
        return case.verdict("missing_call", f"{sentence}; {said}", gone, record, case.stacks(gone))
    found = case.verdict(
        "stuck_outside", f"{sentence}; {came}{_stands(case, absent[0])}", absent, record, case.stacks(absent)
    )
    if absent[0] in case.rings and case.facts[absent[0]].state == "stopped":
        found.advice = f"kill -CONT {case.rings[absent[0]].pid} lets it go on; it was stopped from outside"
    elif absent[0] not in case.rings or case.rings[absent[0]].section == SET_UP:
        found.advice = _SLOW_SET_UP
    return found


def _has_returned(case: Case, rank: int) -> bool:
    fact = case.facts.get(rank)
    return (
        fact is not None
        and fact.ring is not None
        and (fact.ring.ended == FINISHED or (not fact.alive and fact.exit_code == 0))
    )


def _stands(case: Case, rank: int) -> str:
    """Where a rank is that is in no call."""
    fact = case.facts.get(rank)
    if fact is None or fact.ring is None:
        return NOT_STARTED
    state = {"stopped": "is stopped (SIGSTOP, or a debugger)", "running": "computes or loops"}.get(fact.state, "is")
    place = f" at {fact.stack[0]}" if fact.stack else ""
    section = f' (section "{fact.ring.section}")' if fact.ring.section not in ("", SET_UP) else ""
    return f"it {state} outside any collective{place}{section}{_since(case, rank)}"


def _since(case: Case, rank: int) -> str:
    records = case.rings[rank].records
    if not records:
        return ", before its first call"
    last = records[-1]
    return f" since {case.clock(last, last.completed or last.entered)}, after {text(last)}"


def _cycle(case: Case, waits: Waits) -> Verdict:
    circle = _circle(waits)
    odd = _unusual(case, circle, waits) or _few(circle, waits)
    inside = [rank for rank in circle if rank not in odd] or circle[1:]
    first = min((waits[rank][0] for rank in inside), key=began)
    parts = [case.waiting_sentence(first, {rank: wait for rank, wait in waits.items() if rank not in odd})]
    for rank in odd or [rank for rank in circle if rank in waits[inside[0]][1]][:1]:
        record, absent = waits[rank]
        blocked = [other for other in absent if other in waits]
        parts.append(f"rank {rank} never came: it is in {text(record)}, which waits for {ranks_text(tuple(blocked))}")
    if not odd:
        return case.verdict("waiting_cycle", "; ".join(parts), sorted(circle), first, case.all_waits(waits))
    parts += [f"the order differs on rank {rank} since {text(since)}" for rank, since in odd.items()]
    verdict = "missing_call" if any(_leaves_out(case, since, first) for since in odd.values()) else "order"
    return case.verdict(verdict, "; ".join(parts), sorted(odd), first, case.stacks(sorted(odd)))


def _program(case: Case, rank: int) -> list[tuple[str, ...]]:
    """The rank's calls in its own order: communicators by name, so that ranks in the same place are comparable."""
    records = case.rings[rank].records
    return [("start",), *((r.call.op, r.call.label, r.call.tag, r.call.site) for r in records)]


def _unusual(case: Case, circle: list[int], waits: Waits) -> dict[int, Record]:
    """Those of the circle that have lately made a call which does not follow as it did in earlier steps, or as it does
    on most ranks; and that call.
    """
    pairs = {rank: list(pairwise(_program(case, rank))) for rank in case.rings}
    counts = {rank: Counter(own) for rank, own in pairs.items()}
    # Ranks that do the same again and again are in the same role (stages of a pipeline are not).
    roles = {rank: frozenset(pair for pair, number in own.items() if number > 1) for rank, own in counts.items()}
    out = {}
    for rank in circle:
        own, records = pairs[rank], case.rings[rank].records
        repeated = next((index for index, pair in enumerate(own) if own.index(pair) < index), len(own))
        lately = range(max(repeated, len(own) - _LATELY), len(own))  # what comes once before the loop is no matter
        alike = [counts[other] for other in counts if roles[other] == roles[rank]]
        for index in lately:
            if sum(own_counts[own[index]] for own_counts in alike) == 1:
                out[rank] = records[index]
                break
    if out:
        return out if len(out) < len(circle) else {}
    usual = Counter(pair for own in pairs.values() for pair in own)
    present = {rank: pairs[rank][case.rings[rank].records.index(waits[rank][0])] for rank in circle}
    most = max(usual[pair] for pair in present.values())  # the first step: what most ranks do is usual
    odd = [rank for rank in circle if usual[present[rank]] < most]
    alone = all(usual[present[rank]] == 1 for rank in odd) and len(odd) < len(circle)
    return {rank: waits[rank][0] for rank in odd} if alone else {}


def _few(circle: list[int], waits: Waits) -> dict[int, Record]:
    """Those of the circle that have come to a call of three or more ranks to which most have not."""
    out = {}
    for rank in circle:
        record, absent = waits[rank]
        if record.call.peer is None and 2 * len(absent) > len(record.lane.ranks) > 2:
            out[rank] = record
    return out if len(out) < len(circle) else {}


def _leaves_out(case: Case, own: Record, theirs: Record) -> bool:
    """Whether in earlier steps `theirs` came before `own` with nothing between: then it was left out."""
    for rank in case.rings:
        records = case.rings[rank].records
        for before, after in pairwise(records):
            if _same_place(before, theirs) and _same_place(after, own):
                return True
    return False


def _all_came(case: Case) -> Verdict | None:
    """Calls that every rank has come to and that do not end."""
    stuck = [(record, rank) for rank, records in case.open.items() for record in records if case.facts[rank].alive]
    stuck = [(record, rank) for record, rank in stuck if not record.is_async or record.waiting]
    if not stuck:
        return None
    record, _ = min(stuck, key=lambda one: one[0].entered)
    stopped = [rank for rank, fact in case.facts.items() if fact.state == "stopped"]
    who = sorted(rank for other, rank in stuck if lane_key(other) == lane_key(record))
    sentence = f"{waits_text(who, text(record))} since {case.clock(record, record.entered)}; every rank has come to it"
    if stopped:
        sentence += f", and {ranks_text(tuple(stopped))} is stopped (SIGSTOP, or a debugger) inside it"
        return case.verdict("stuck_outside", sentence, stopped, record, case.stacks(stopped))
    outside = [
        rank for rank in case.rings if rank not in who and case.facts[rank].alive and case.rings[rank].ended == RUNNING
    ]
    if outside and set(outside) <= set(record.lane.ranks):
        sentence += f"; {ranks_text(tuple(outside))} has left it, and {_stands(case, outside[0])}"
        return case.verdict("stuck_outside", sentence, outside, record, case.stacks(outside))
    return None


def _same_place(a: Record, b: Record) -> bool:
    return (a.call.op, a.call.label, a.call.tag, a.call.site) == (b.call.op, b.call.label, b.call.tag, b.call.site)


def _circle(waits: Waits) -> list[int]:
    """The ranks of one circle of waiting: from any rank, follow the first rank that it waits for."""
    rank, path = min(waits), list[int]()
    while rank not in path:
        path.append(rank)
        rank = next(other for other in waits[rank][1] if other in waits)
    return path[path.index(rank) :]
