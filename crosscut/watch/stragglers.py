"""Who keeps the others waiting though nothing is broken: a slow rank, or a slow link. No torch.

A slow rank is one that spends more time outside its calls than the ranks that run the same program; what the others
then wait inside their calls is a consequence. Medians over steps, so that one hiccup names nobody, and shares, so that
uniform slowness names nobody. Arrival times of different ranks are compared only for the exposed waits: the clock of
the ring is that of the host, aligned to rank 0's by `RingWriter.align`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import median

from crosscut.comm.errors import ranks_text
from crosscut.watch.facts import Verdict
from crosscut.watch.lanes import INIT, Calls
from crosscut.watch.reading import Record, Ring

SLOWER = 0.15  # than its peers: a rank that needs 25% more stands out, the noise of a busy machine does not
LEAST_S, OFTEN = 3e-3, 0.75  # by this much a step, and in this share of the steps
MIN_STEPS, MIN_MESSAGES = 10, 20
Anchor = tuple[str, str, str, str]  # op, label, tag, site


def find_straggler(rings: Mapping[int, Ring]) -> Verdict | None:
    """The rank or link that is slower than its peers, or None."""
    return _slow_rank(rings) or _slow_link(rings)


def exposed_waits(rings: Mapping[int, Ring]) -> dict[tuple[int, str], float]:
    """Seconds that each rank has waited in its calls for others to come to them: `{(rank, axis): seconds}`.

    Of the calls that the rings still hold; those of the first step are left out where there are more, since there
    everybody compiles and meets.
    """
    out: dict[tuple[int, str], float] = defaultdict(float)
    steps = {record.step for ring in rings.values() for record in ring.records}
    first = min(steps) if len(steps) > 2 else -1
    calls = Calls.of(rings)
    for by_seq in calls.collectives.values():
        for here in by_seq.values():
            record = next(iter(here.values()))
            if record.lane.label != INIT and record.step != first and len(here) == len(record.lane.ranks):
                _add_waits(out, list(here.values()), max(record.entered for record in here.values()))
    for messages in calls.messages.values():
        for both in messages.values():
            if len(both) == 2 and both["send"].step != first:
                _add_waits(out, [both["recv"]], both["send"].entered)
    return dict(out)


def _add_waits(out: dict[tuple[int, str], float], records: list[Record], last: int) -> None:
    for record in records:
        began = record.waiting or record.entered  # an async call costs nothing until it is waited for
        waited = max(0, min(last, record.completed) - began) if record.completed else 0
        out[record.own_rank, record.lane.label] += waited / 1e9


def waits_table(waits: Mapping[tuple[int, str], float]) -> list[str]:
    """Exposed waits for a reader: a line a rank, a column an axis, the longest eight ranks."""
    axes = sorted({axis for _, axis in waits})
    ranks = sorted({rank for rank, _ in waits}, key=lambda rank: -sum(waits.get((rank, axis), 0.0) for axis in axes))
    return [
        f"rank {rank} waited for others: "
        + ", ".join(f"{waits[rank, axis]:.3f} s over {axis}" for axis in axes if (rank, axis) in waits)
        for rank in sorted(ranks[:8])
    ]


def outside_by_step(ring: Ring, anchor: Anchor | None = None) -> dict[int, float]:
    """Seconds outside any call, by step: from the end of what came before to the beginning of a call. anchor: a call
    that is made once a step, where the program counts no steps itself.
    """
    out: dict[int, float] = defaultdict(float)
    end = step = 0
    for record in ring.records:
        step = record.step if anchor is None else record.call.seq if _place(record) == anchor else step
        if end:
            out[step] += max(0, record.entered - end) / 1e9
        end = max(end, record.completed or record.entered)
    ends = (min(out, default=0), max(out, default=0))  # the ring begins and ends in the middle of a step
    return {step: seconds for step, seconds in out.items() if step not in ends}


def _anchor(ring: Ring) -> Anchor | None:
    """What tells steps apart in a loop without a torch optimizer: of the calls made again and again, the rarest."""
    if any(record.step for record in ring.records):
        return None
    counts = Counter(_place(record) for record in ring.records if record.call.peer is None)
    return min((one for one in counts if counts[one] > MIN_STEPS), key=lambda one: (counts[one], one), default=None)


def _place(record: Record) -> Anchor:
    return record.call.op, record.call.label, record.call.tag, record.call.site


def _slow_rank(rings: Mapping[int, Ring]) -> Verdict | None:
    outside = {rank: outside_by_step(ring, _anchor(ring)) for rank, ring in rings.items()}
    programs: dict[frozenset[Anchor], list[int]] = defaultdict(list)
    for rank, ring in rings.items():
        if len(outside[rank]) >= MIN_STEPS:
            programs[frozenset(map(_place, ring.records))].append(rank)
    found = []
    for ranks in programs.values():
        for rank in ranks:
            steps = set.intersection(*(set(outside[other]) for other in ranks))
            others = [other for other in ranks if other != rank]
            if len(steps) < MIN_STEPS or not others:
                continue
            own = median(outside[rank][step] for step in steps)
            usual = max(median(outside[other][step] for step in steps) for other in others)
            slowest = sum(all(outside[rank][s] > outside[o][s] for o in others) for s in steps) / len(steps)
            if usual > 0 and own / usual - 1 >= SLOWER and own - usual >= LEAST_S and slowest >= OFTEN:
                found.append((own / usual - 1, rank, others, own, usual))
    if not found:
        return None
    slower, rank, others, own, usual = max(found)
    sentence = (
        f"rank {rank} is {slower:.0%} slower than its peers: it spends {own * 1e3:.1f} ms a step outside its calls, "
        f"{ranks_text(tuple(others))} at most {usual * 1e3:.1f} ms"
    )
    return Verdict("straggler", sentence, [rank])


def _slow_link(rings: Mapping[int, Ring]) -> Verdict | None:
    calls = Calls.of(rings)
    times: dict[tuple[str, str, int], dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for (_, src, dst, _), by_seq in calls.messages.items():
        for both in by_seq.values():
            # Only where the receiver was there first: else the message may have arrived before anybody looked.
            if len(both) == 2 and both["recv"].completed and both["recv"].entered <= both["send"].entered:
                _add(times, both["send"], (src, dst), list(both.values()), both["recv"].completed)
    for (ranks, _), lane in calls.collectives.items():
        for here in lane.values():
            if len(here) == len(ranks) and all(record.completed for record in here.values()):
                records = list(here.values())
                _add(times, records[0], ranks, records, max(record.completed for record in records))
    found = []
    for (label, op, num_bytes), links in times.items():
        medians = {link: median(taken) for link, taken in links.items() if len(taken) >= MIN_MESSAGES}
        if len(medians) < 2:
            continue
        worst = max(medians, key=lambda link: medians[link])
        usual = median(taken for link, taken in medians.items() if link != worst)
        quarter = sorted(times[label, op, num_bytes][worst])[MIN_MESSAGES // 4]
        if usual > 0 and medians[worst] / usual - 1 >= SLOWER and quarter > usual and medians[worst] - usual > 1e-3:
            found.append((num_bytes * len(links[worst]), label, op, worst, medians[worst], usual))
    if not found:
        return None
    _, label, op, link, taken, usual = max(found)
    sentence = (
        f"the link between {ranks_text(link)} is {taken / usual - 1:.0%} slower than others over {label}: {op} takes "
        f"{taken * 1e3:.2f} ms after the last rank has come, elsewhere {usual * 1e3:.2f} ms"
    )
    return Verdict("straggler", sentence, sorted(link), axis=label, op=op, advice="look at the network between them")


def _add(
    times: Mapping[tuple[str, str, int], dict[tuple[int, ...], list[float]]],
    record: Record,
    link: tuple[int, ...],
    records: list[Record],
    end: int,
) -> None:
    start = max(one.entered for one in records)
    times[record.lane.label, record.call.op, record.bytes][link].append(max(0, end - start) / 1e9)
