"""docs/faults.md, from the outcomes of a run of the corpus and from what torch's own tools say of the same."""

import os

import torch

from .corpus import CRASH, STUCK, WHAT
from .launch import HANG_S, Scenario
from .tools import NAMES

HEAD = """# Faults

What `crosscut.watch` makes of {faults} injected faults and {clean} clean runs, and what torch's own tools say of the
same. This file is written by `make faults`, in {minutes:.0f} minutes on {cores} cores.

Each scenario forks its ranks, records them by `crosscut.watch.install()`, injects one fault at a named rank in its
step {step}, and lets the watchdog of `python -m crosscut.watch` look on with a hang time-out of {hang_s} s. Seconds go
from the fault to the verdict; *lost* counts the steps since the last checkpoint (one every second step).

| figure | value |
|---|---|
| faults detected | {detected} of {faults} |
| rank at fault named, and named first | {culprit} of {faults} |
| kind right | {kind} of {faults} |
| false alarms in clean runs | {alarms} of {clean} |
| slowest verdict on a rank that died or raised | {dead:.1f} s |
| slowest verdict on a hang (time-out {hang_s} s) | {hang:.1f} s |
"""
BESIDE = """
## Beside torch's own tools

The faults in stock programs on Gloo, with torch {torch}. "7 / 6 of 9": of 9 faults 7 are reported, and in 6 of these
the report names the rank at fault.

"""
RULES = f"""
How it was counted:

- *DETAIL* is `TORCH_DISTRIBUTED_DEBUG=DETAIL`; *Gloo time-out* is {HANG_S} s for every group, as our hang time-out;
  *Flight Recorder* is what `torchfrtrace --allow-incomplete-ranks` makes of the ranks' dumps of the time-out's run.
- A rank is named if the text says that it did not come, differs or has no dump, or if it raised an error of its own. Of
  messages that set two ranks against each other, the rank that all of them share counts as named. Several named ranks
  count as right if the one at fault is among them, unless that is every rank ("any rank").
- Ranks that torch counts within a group were translated by the traceback. A message that sends the reader to the log of
  a rank that says nothing names that rank.
- Seconds go to the first word of any rank. The analyser's are those of the dumps, taken when the first rank gave up,
  or at the end of a job that did not notice; starting it comes on top.
- "silent": the program ends as if nothing were wrong. "hangs": it does not end. "false alarm": the tool stops it though
  nothing has happened yet, which does not count as reported. "rank 0/1": both are named.
- What a launcher adds (which process ended first, and with which code) is in none of the four columns.

So that each could say its best: on Gloo, DETAIL crashes DDP's constructor in a logging call, which was left out. Gloo
writes dumps without the names of groups, on which the analyser stops with a KeyError: they were put in. A rank that was
stuck was asked for its dump over torch's worker server. The analyser was handed the files in order of ranks, since it
holds all others against the first.

What stands in their way on Gloo: the recorder records no messages, and DETAIL counts them as collectives, which do not
match in a program that sends any. Neither compares reductions. Of two ranks that differ, DETAIL names both, and the
analyser the one that is not rank 0.
"""


def write(path, outcomes, said, took_s):
    """Write the document. outcomes: [(scenario, Outcome)]; said: [(scenario, [Said of each tool])]."""
    faults = [(one, out) for one, out in outcomes if not one.is_clean]
    clean = [out for one, out in outcomes if one.is_clean]
    sudden = ("exception", "dead_rank", "oom", "disk_full")
    timed = [out for _, out in faults if out.seconds is not None]
    text = HEAD.format(
        faults=len(faults),
        clean=len(clean),
        minutes=took_s / 60,
        cores=os.cpu_count(),
        step=Scenario.step + 1,
        hang_s=HANG_S,
        detected=sum(out.detected for _, out in faults),
        culprit=sum(out.right_culprit(one) for one, out in faults),
        kind=sum(out.right_kind(one) for one, out in faults),
        alarms=sum(out.detected for out in clean),
        dead=max((out.seconds for out in timed if out.verdict in sudden), default=0),
        hang=max((out.seconds for out in timed if out.verdict not in (*sudden, "straggler")), default=0),
    )
    by_name = {one.name: answers for one, answers in said}
    stock = [(one, out, by_name[one.name]) for one, out in outcomes if one.name in by_name]
    text += BESIDE.format(torch=torch.__version__.partition("+")[0]) + _summary(stock) + RULES
    text += "\n## Every fault in a stock program\n\nUnder *rank* stands the one at fault.\n\n" + _beside(
        [row for row in stock if not row[0].is_clean]
    )
    text += "\n## crosscut runs, and stock programs on `shm`\n\n"
    text += _alone([(one, out) for one, out in faults if one.name not in by_name])
    text += "\n## Clean runs\n\n" + _clean([(one, out, by_name.get(one.name)) for one, out in outcomes if one.is_clean])
    path.write_text(text + "\n## What the faults are\n\n" + _what(), encoding="utf-8")


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _group(scenario):
    fault = scenario.fault
    return 0 if fault in CRASH or fault == "port" else 1 if fault in STUCK else 3 if fault == "slow" else 2


def _summary(stock):
    """Detected and named, by kind of fault and by tool; and the false alarms."""
    faults = [row for row in stock if not row[0].is_clean]
    kinds = (
        "a rank dies or raises",
        "a rank is stuck",
        "ranks make different calls",
        "a rank or link is slow",
        "**all**",
    )
    rows = []
    for index, kind in enumerate(kinds):
        here = [row for row in faults if index == len(kinds) - 1 or _group(row[0]) == index]
        answers = [
            [(out.detected, out.right_culprit(one)), *((s.detected, s.right) for s in own)] for one, out, own in here
        ]
        cells = [(sum(d for d, _ in tool), sum(d and r for d, r in tool)) for tool in zip(*answers, strict=True)]
        rows.append([kind, *(f"{detected} / {named} of {len(here)}" for detected, named in cells)])
    clean = [[out.detected, *(s.alarm for s in own)] for one, out, own in stock if one.is_clean]
    rows.append(["false alarms in clean runs", *(f"{sum(tool)} of {len(clean)}" for tool in zip(*clean, strict=True))])
    return _table(["faults", "crosscut", *NAMES], rows)


def _ours(scenario, out):
    if not out.detected:
        return "silent"
    who = "rank" if out.right_culprit(scenario) and out.right_kind(scenario) else "wrong:"
    after = "" if out.seconds is None else f", {out.seconds:.1f}\N{NO-BREAK SPACE}s"
    return f"{who} {'/'.join(map(str, out.culprits))}{after}"


def _fault(scenario, out):
    lost = "" if out.lost is None else out.lost
    return [scenario.name, "/".join(map(str, scenario.at_fault)), out.verdict, _ours(scenario, out), lost]


def _beside(rows):
    head = ["scenario", "rank", "verdict", "crosscut", "lost", *NAMES]
    return _table(head, [[*_fault(one, out), *map(str, own)] for one, out, own in rows])


def _alone(rows):
    return _table(["scenario", "rank", "verdict", "crosscut", "lost"], [_fault(one, out) for one, out in rows])


def _clean(rows):
    head = ["scenario", "crosscut", *NAMES]
    return _table(head, [[one.name, out.verdict, *(map(str, own) if own else ["-"] * 3)] for one, out, own in rows])


def _what():
    programs = [
        ["ddp, fsdp, tensor, pipeline", "DDP, FSDP2, DTensor's tensor parallelism, torch.distributed.pipelining"],
        ["hand, messages, groups, ring, many", "loops by hand: collectives, sends, a mesh, a ring, twenty groups"],
        ["timed, links", "loops in which one rank, or one link, can be slow"],
        ["crosscut ...", "a deep MLP under that layout; calls: dp=3, the loop makes calls of its own; chain: pp=4"],
    ]
    text = _table(["program", "what it is"], programs)
    return text + "\n" + _table(["fault", "what the rank does"], list(WHAT.items()))
