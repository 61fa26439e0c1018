"""docs/faults.md, from the outcomes of a run of the corpus; and torch's own tools on the same mistakes."""

import tempfile
from pathlib import Path

from .corpus import MISTAKES, scenarios
from .launch import run

HEAD = """# Faults

What `crosscut.watch` makes of {faults} injected faults and {clean} clean runs. This file is written by `make faults`.

Each scenario forks its ranks, records them by `crosscut.watch.install()`, injects one fault at a named rank and step
(step {step}), and lets the watchdog of `python -m crosscut.watch` look on with a hang time-out of 1.5 s. *Seconds* go
from the fault to the verdict; *lost* counts the steps since the last checkpoint (one every second step).
"Right" means: the verdict is one of those that describe the fault, and the first culprit is the rank at fault.

| figure | value |
|---|---|
| faults detected | {detected} of {faults} |
| culprit right | {culprit} of {faults} |
| kind right | {kind} of {faults} |
| false alarms in clean runs | {alarms} of {clean} |
| slowest verdict on a rank that died or raised | {dead:.1f} s |
| slowest verdict on a hang (time-out 1.5 s) | {hang:.1f} s |

"""
TOOLS: dict = {"Gloo time-out (4 s)": {}}  # name -> environment


def write(path, outcomes):
    """Write the document."""
    faults = [one for one in outcomes if not one.scenario.is_clean]
    clean = [one for one in outcomes if one.scenario.is_clean]
    sudden = ("exception", "dead_rank", "oom", "disk_full")
    timed = [one for one in faults if one.seconds is not None]
    text = HEAD.format(
        faults=len(faults),
        clean=len(clean),
        step=5,
        detected=sum(one.detected for one in faults),
        culprit=sum(one.detected and one.right_culprit for one in faults),
        kind=sum(one.right_kind for one in faults),
        alarms=sum(one.detected for one in clean),
        dead=max((one.seconds for one in timed if one.verdict in sudden), default=0),
        hang=max((one.seconds for one in timed if one.verdict not in (*sudden, "straggler")), default=0),
    )
    text += "## Every scenario\n\n| scenario | rank | verdict | culprits | right | seconds | lost |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for one in outcomes:
        right = "yes" if one.right_kind and one.right_culprit else "**no**"
        seconds = "" if one.seconds is None else f"{one.seconds:.1f}"
        lost = "" if one.lost is None else str(one.lost)
        bad = "" if one.scenario.is_clean else str(one.scenario.bad)
        named = ",".join(map(str, one.culprits))
        text += f"| {one.scenario.name} | {bad} | {one.verdict} | {named} | {right} | {seconds} | {lost} |\n"
    path.write_text(text + _torch(), encoding="utf-8")


def _torch():
    """The mistakes in stock programs, under torch's own tools: does some rank raise, and does it name the culprit?"""
    wanted = {f"{name}: {fault}" for name, fault, _, _ in MISTAKES if not name.startswith("crosscut")}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for index, scenario in enumerate(one for one in scenarios() if one.name in wanted):
            cells = []
            for environ in TOOLS.values():
                place = Path(folder) / f"{index}-{len(cells)}"
                out = run(scenario, place, install=False, environ=environ)
                raised = [file.read_text() for file in sorted(place.glob("*.raised"))]
                crashed = [code for code in out.exits.values() if code < 0]
                said = f"{len(raised)} rank(s) raise" if raised else "a process crashes" if crashed else "silent"
                bad = (f"rank {scenario.bad} ", f"ank {scenario.bad}]", f"Rank {scenario.bad}", f"rank={scenario.bad}")
                named = any(part in line for line in raised for part in bad)
                cells.append(f"{said}{', names the rank' if named else ''}")
            rows.append(f"| {scenario.name} | {' | '.join(cells)} |")
    head = "\n## Torch's own tools on the mistakes of communication\n\n"
    head += 'What the ranks themselves are told. "silent": the program ends as if nothing were wrong.\n\n'
    return head + f"| scenario | {' | '.join(TOOLS)} |\n|---|{'---|' * len(TOOLS)}\n" + "\n".join(rows) + "\n"
