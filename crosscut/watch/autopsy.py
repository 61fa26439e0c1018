"""From what every rank left behind to a verdict in words: first divergence first. No torch, no files: pure.

The order of the questions: did ranks make different calls? did one end? does one stand outside its calls while others
wait for it? do ranks wait for each other in a circle? have steps come apart? is one late? A later question is asked
only if the earlier ones found nothing, because each of them is a consequence of those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from crosscut.comm.errors import ranks_text
from crosscut.watch.case import Case
from crosscut.watch.facts import Facts, Verdict
from crosscut.watch.lanes import text
from crosscut.watch.ring import FINISHED, RUNNING
from crosscut.watch.stragglers import exposed_waits, find_straggler, waits_table
from crosscut.watch.waiting import NOT_STARTED, waiting

_ADVICE = {
    "missing_call": "make the call on every rank of the group, or on none, and nowhere later than the others: look for "
    "a branch or a loop bound that differs between ranks before it",
    "order": "make the calls in the same order on every rank",
    "mismatch": "make op, shape, dtype, root and reduction equal on all ranks of the group",
    "waiting_cycle": "make calls over different groups in the same order on all ranks; of two that exchange, one "
    "receives first",
    "stuck_outside": "look at the line where it stands; if it is only slow, raise the hang time-out, or declare the "
    "part with crosscut.watch.section(name, limit_s)",
    "desync": "skip a step on all ranks or on none (crosscut: ctx.decide)",
    "oom": "use a smaller micro-batch, recompute, or a layout that stores less on a rank",
    "disk_full": "make room, or write elsewhere; checkpoints that were whole before are whole now",
    "dead_rank": "look at the last lines of that rank",
    "exception": "the traceback of that rank says where",
    "straggler": "look at what else runs on that machine, at its clock and its share of the data",
}


def autopsy(facts: Mapping[int, Facts], world_size: int, *, alive: bool = False) -> Verdict:
    """The verdict over all ranks. `alive`: the run goes on, so that waiting is not yet a fault.

    Ranks without a ring are those that never came as far as torch.distributed.
    """
    case = Case(facts, world_size)
    found = _divergence(case) or _crash(case) or waiting(case) or _never_came(case) or _desync(case)
    found = found or find_straggler(case.rings) or _nothing(case)
    if found.verdict in ("straggler", "none"):  # a hang would be all waiting
        waits = exposed_waits(case.rings)
        found.evidence += waits_table(waits)
        found.rows = [{"rank": rank, "axis": axis, "wait_s": s} for (rank, axis), s in sorted(waits.items())]
    found.alive = alive
    found.advice = found.advice or _ADVICE.get(found.verdict, "")
    return found


def _divergence(case: Case) -> Verdict | None:
    found = case.calls.first_divergence(rank for rank, ring in case.rings.items() if ring.wrapped)
    if found is None:
        return None
    crash = _first_crash(case)
    if crash is not None and crash[0] < case.wall(found.record, found.time) - 1e-3 and crash[2]:
        return None  # it came first
    evidence = case.who_waits(found.culprits)
    if found.after_wrap:
        evidence.insert(
            0,
            f"the recorder holds no earlier call of this group: the ranks may have come apart before "
            f"#{found.record.call.seq}; certain is that from there on their calls differ",
        )
    return case.verdict(found.verdict, found.sentence, found.culprits, found.record, evidence, found)


def _first_crash(case: Case) -> tuple[float, int, bool] | None:
    """(when, rank, whether it is a real one) of the first rank that ended badly: real errors before others."""
    found = []
    for rank, fact in case.facts.items():
        if fact.failure is not None:
            found.append((fact.failure.secondary, fact.failure.time_s, rank))
        elif fact.exit_code not in (None, 0) or (
            not fact.alive and fact.exit_code is None and fact.ring is not None and fact.ring.ended == RUNNING
        ):
            found.append((fact.exit_code == 1 and fact.ring is not None, fact.ended_s, rank))
    if not found:
        return None
    secondary, when, rank = min(found)
    return when, rank, not secondary


def _crash(case: Case) -> Verdict | None:
    first = _first_crash(case)
    if first is None or not first[2]:
        return None
    _, rank, _ = first
    fact = case.facts[rank]
    where = _was_in(case, rank)
    if fact.failure is not None:
        kind = fact.failure.kind
        at = f" at {fact.failure.site}" if fact.failure.site else ""
        sentence = f"rank {rank} of {case.world_size} raised {fact.failure.said}{at}{where}"
        lines = fact.failure.traceback.splitlines()[-12:]
    else:
        kind = "oom" if fact.oom_killed and fact.exit_code == -9 else "dead_rank"
        sentence = f"rank {rank} of {case.world_size} {fact.death()}{where}"
        lines = [*(f"it was at {place}" for place in fact.stack[:6]), *fact.last_lines[-8:]]
    record = next(iter(case.open.get(rank, [])), None)
    return case.verdict(kind, sentence, [rank], record, [*case.who_waits([rank]), *lines])


def _was_in(case: Case, rank: int) -> str:
    ring = case.rings.get(rank)
    if ring is None or not ring.records:
        return ", before its first call" if ring is not None else ""
    last = ring.records[-1]
    step = f" in step {last.step + 1}" if last.step else ""
    return f"{step}, {'inside' if not last.completed else 'after'} {text(last)}"


def _never_came(case: Case) -> Verdict | None:
    lost = [rank for rank in range(case.world_size) if rank not in case.rings]
    if not lost or not case.rings:
        return None
    sentence = f"{ranks_text(tuple(lost))} of {case.world_size} never came: {NOT_STARTED}"
    return case.verdict("stuck_outside", sentence, lost, None, [])


def _desync(case: Case) -> Verdict | None:
    """Steps that were equal and came apart: the calls still match, the steps that they belong to do not."""
    for by_seq in case.calls.collectives.values():
        agreed = False
        apart: list[int] = []
        for seq in sorted(by_seq):
            here = by_seq[seq]
            if len(here) < 2 or len(here) < len(next(iter(here.values())).lane.ranks):
                continue
            if len({record.step for record in here.values()}) == 1:
                agreed, apart = True, []
            elif agreed:
                apart.append(seq)
        if len(apart) < 2:
            continue
        here = by_seq[apart[0]]
        steps = Counter(record.step for record in by_seq[apart[-1]].values())
        usual = max(steps.items(), key=lambda item: (item[1], item[0]))[0]
        odd = sorted(rank for rank, record in by_seq[apart[-1]].items() if record.step != usual)
        record = here[next(rank for rank in here if rank not in odd)]
        sentence = (
            f"{ranks_text(tuple(odd))} is at another optimizer step than the others since {text(record)}: "
            f"{here[odd[0]].step + 1} instead of {record.step + 1}"
        )
        return case.verdict("desync", sentence, odd, record, [])
    return None


def _nothing(case: Case) -> Verdict:
    counts = [ring.entered for ring in case.rings.values()]
    if not counts:
        return Verdict("none", "no rank has recorded a call")
    ended = all(ring.ended == FINISHED for ring in case.rings.values())
    said = "every rank has ended by itself" if ended else "no rank waits for one that does not come"
    each = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
    return Verdict("none", f"nothing wrong was found: {said}; {each} calls a rank")
