"""What a run has left in its folder, or leaves there now: rings, failures, stacks, an autopsy. No torch.

RUN/ledger/rank-3.ring    the calls                         RUN/autopsy.json, autopsy.txt   what the watchdog found
RUN/ledger/rank-3.error   the exception that ended it       RUN/ledger/rank-3.stack         Python stacks, on a signal
RUN/ledger/rank-3.end     exit code and last lines, from the process that started it
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from crosscut.comm.site import short_path
from crosscut.watch.autopsy import autopsy
from crosscut.watch.facts import Facts, Failure, Verdict
from crosscut.watch.flight_recorder import read_dumps
from crosscut.watch.reading import Ring, read_ring
from crosscut.watch.ring import FAILED, RUNNING, process_start

LEDGER, AUTOPSY = "ledger", "autopsy"
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "stopped"}
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (.+)$')
_INNER = (
    *("importlib._bootstrap", "<frozen", "<string>", "runpy.py", f"{os.sep}crosscut{os.sep}watch"),
    *(f"{os.sep}torch{os.sep}", f"{os.sep}multiprocessing{os.sep}"),
)
_OURS = f"{os.sep}crosscut{os.sep}comm{os.sep}"

_FAILURE = Failure.__dataclass_fields__  # a later version may write more


def path_of(run: Path, rank: int, kind: str) -> Path:
    """The file of a rank: "ring", "error", "stack", "end" or "stop"."""
    return run / LEDGER / f"rank-{rank}.{kind}"


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write a file that is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(body), encoding="utf-8")
    partial.replace(path)


def newest_run(root: Path = Path("runs")) -> Path:
    """The run in `root` that wrote to its ledgers last. Raises ValueError if there is none."""
    found = root.glob(f"*/{LEDGER}/rank-*.ring")
    rings = [(ring.stat().st_mtime, run) for ring in found if not (run := ring.parent.parent).is_symlink()]
    if not rings:
        raise ValueError(f"{root}/ holds no run that recorded its calls; give a run folder: crosscut why RUN")
    return max(rings)[1]


def diagnose(run: Path, *, facts: dict[int, Facts] | None = None) -> Verdict:
    """The verdict over a run folder, or over a folder of Flight Recorder dumps.

    Raises ValueError, one line, if there is nothing to read.
    """
    try:
        os.listdir(run)
    except NotADirectoryError:
        inside = [place for place in run.absolute().parents[:2] if (place / LEDGER).is_dir()]
        hint = os.path.relpath(inside[0]) if inside else "the folder that it lies in"
        raise ValueError(f"{run} is a file; give {hint}: a run folder, or a folder of Flight Recorder dumps") from None
    except FileNotFoundError:
        raise ValueError(f"{run}: no such folder; give a run folder or a folder of Flight Recorder dumps") from None
    except OSError as error:
        raise ValueError(f"{run}: cannot be read ({error.strerror})") from None
    facts, problems = (facts, []) if facts is not None else gather(run)
    if not facts:
        dumps = read_dumps(run)
        if not dumps:
            newest = max(run.glob("*/ledger"), key=lambda path: path.stat().st_mtime, default=None)
            hint = f"; its newest run is {newest.parent}" if newest else ""
            raise ValueError(f"{run}: holds no ledger (ledger/rank-N.ring) and no Flight Recorder dump{hint}")
        facts = {rank: Facts(rank, ring) for rank, ring in dumps.items()}
        return autopsy(facts, len(facts))
    size = max(fact.ring.world_size for fact in facts.values() if fact.ring is not None)
    alive = [rank for rank, fact in facts.items() if fact.alive]
    began = max(fact.ring.start_wall_ns for fact in facts.values() if fact.ring is not None) / 1e9
    found = run / f"{AUTOPSY}.json"
    if not alive and found.exists() and found.stat().st_mtime >= began and (body := _json(found)) is not None:
        # When it was written the ranks still stood where they stood, or their exit codes were at hand.
        return Verdict(**{key: value for key, value in body.items() if key in Verdict.__dataclass_fields__})
    verdict = autopsy(facts, size, alive=bool(alive))
    verdict.evidence += [f"not read: {problem}" for problem in problems]
    return verdict


def gather(run: Path) -> tuple[dict[int, Facts], list[str]]:
    """What is known of every rank whose ring can be read, and what is wrong with the other rings.

    Raises ValueError if none can be read, or one is of a newer version.
    """
    out: dict[int, Facts] = {}
    problems: list[str] = []
    try:
        names = sorted(os.listdir(run / LEDGER))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise ValueError(f"{run / LEDGER}: cannot be read ({error.strerror})") from None
    for path in (run / LEDGER / name for name in names if name.startswith("rank-") and name.endswith(".ring")):
        try:
            ring = read_ring(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        out[ring.rank] = facts_of(run, ring)
    if problems and (not out or any("newer" in problem for problem in problems)):
        raise ValueError(problems[0])
    newest = max(out.values(), key=lambda fact: fact.ring.start_wall_ns if fact.ring else 0, default=None)
    size = newest.ring.world_size if newest is not None and newest.ring is not None else 0
    return {rank: fact for rank, fact in out.items() if rank < size}, problems  # not those of a larger world before


def facts_of(run: Path, ring: Ring) -> Facts:
    """One rank: its process, its failure, its stack."""
    fact = Facts(ring.rank, ring)
    fact.alive, fact.state = look_at(ring)
    failure = _json(path_of(run, ring.rank, "error"))
    if failure and failure.pop("pid", 0) == ring.pid:
        fact.failure = Failure(**{"line": "", **{k: v for k, v in failure.items() if k in _FAILURE}})
    end = _json(path_of(run, ring.rank, "end"))
    if end and end.pop("pid", 0) in (ring.pid, 0):
        fact.exit_code, fact.last_lines = end.get("exit_code"), end.get("last_lines", [])
        fact.ended_s = end.get("ended_s", 0.0)
        fact.oom_killed = bool(end.get("oom_killed"))
    elif ring.ended != RUNNING:
        fact.exit_code = ring.exit_code
    if not fact.alive and not fact.ended_s:
        fact.ended_s = time.time()
    if fact.failure is not None and ring.ended == FAILED and fact.exit_code is None:
        fact.exit_code = 1
    stack = path_of(run, ring.rank, "stack")
    if stack.exists() and stack.stat().st_mtime * 1e9 >= ring.start_wall_ns:
        fact.stack = python_stack(stack.read_text(encoding="utf-8", errors="replace"))
        if not fact.alive and fact.exit_code is None and (crash := fatal(stack)):
            fact.exit_code = crash
    return fact


def look_at(ring: Ring) -> tuple[bool, str]:
    """Whether the process of a ring lives, and its state. A process of another host counts as alive."""
    if ring.host != os.uname().nodename:
        return ring.ended == RUNNING, ""
    try:
        text = Path(f"/proc/{ring.pid}/stat").read_text()
    except OSError:
        return _pid_lives(ring.pid) if not Path("/proc/self").exists() else False, ""
    state = text.rpartition(")")[2].split()[0]
    if state in "ZX" or (ring.process_start and process_start(ring.pid) != ring.process_start):
        return False, ""
    return True, _STATES.get(state, "")


def _pid_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def fatal(stack: Path) -> int | None:
    """The signal (below 0) that Python's fault handler has noted."""
    names = {"Segmentation fault": -11, "Aborted": -6, "Bus error": -7, "Floating-point exception": -8}
    text = stack.read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"^Fatal Python error: (.+)$", text, re.MULTILINE)
    return names.get(found[-1].strip()) if found else None


def python_stack(text: str) -> list[str]:
    """The main thread of the last dump of Python's fault handler: `train.py:12 in step`, innermost first.

    Frames of torch and of this package's communication are left out, unless there is no other.
    """
    dumps = re.split(r"\n\s*\n", text.strip())
    threads = [part for part in dumps if "most recent call first" in part]
    last = next((part for part in reversed(threads) if "Current thread" in part or len(threads) == 1), None)
    chosen = [part for part in threads if "line" in part and "<module>" in part] or ([last] if last else threads)
    frames = [_FRAME.match(line) for line in (chosen[-1].splitlines() if chosen else [])]
    places = [(found[1], int(found[2]), found[3]) for found in frames if found]
    shown = [place for place in places if not any(part in place[0] for part in (*_INNER, _OURS))]
    return [f"{short_path(file)}:{line} in {name}" for file, line, name in shown or places]


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
