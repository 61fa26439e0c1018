"""Measure the collectives and write docs/benchmarks.md: `make benchmarks` (about ten minutes, on a machine at rest).

    python benchmarks/publish.py [--results FOLDER] [--mpich FOLDER]

What has been measured is kept in the results folder, a file a run; a second start goes on where the first was stopped.
--mpich: a virtual environment with mpi4py, mpich and numpy (see mpich.py); without it that comparison is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from crosscut.bench.machine import host
from crosscut.bench.show import figures
from crosscut.bench.sizes import parse_size, size_text

HERE = Path(__file__).parent
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
SIZES = ("8", "512", "4KiB", "64KiB", "1MB", "10MB", "100MB")
TRIALS = {2: 9, 4: 3}
ROUNDS = 3  # of shm and MPICH in turn
MPICH_SIZES = ("8", "4KiB", "64KiB", "1MB", "10MB", "100MB")
SMALL, LARGE = parse_size("4KiB"), parse_size("1MB")


def bench(*arguments: str) -> dict[str, Any]:
    """What `crosscut bench collectives` writes."""
    command = [sys.executable, "-m", "crosscut", "bench", "collectives", *arguments, "--json", "-"]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def mpich(folder: Path) -> dict[str, float]:
    """Median us by bytes."""
    sizes = ",".join(str(parse_size(size)) for size in MPICH_SIZES)
    command: list[str | Path] = [
        folder / "bin/mpiexec",
        "-n",
        "2",
        folder / "bin/python",
        HERE / "mpich.py",
        sizes,
        "15",
    ]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def measure(results: Path, mpi: Path | None, seconds: float) -> None:
    """Everything that is not in the results folder yet; ends the program when the time is over."""
    results.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds

    def keep(name: str, make: Any) -> None:
        path = results / f"{name}.json"
        if not path.exists():
            if time.monotonic() > end:
                sys.exit("stopped by --seconds; start it again to go on")
            print(name, flush=True)
            path.write_text(json.dumps(make()), encoding="utf-8")

    for number in range(ROUNDS if mpi else 0):
        assert mpi is not None
        flags = ("--ops", "all_reduce", "--sizes", ",".join(MPICH_SIZES), "--backends", "shm", "--trials", "15")
        keep(f"mpich-{number}", lambda flags=flags: {"shm": bench(*flags)["rows"], "mpich": mpich(mpi)})
    for world_size, trials in TRIALS.items():
        for op in OPS:
            flags = ("--ops", op, "--sizes", ",".join(SIZES), "--world-size", str(world_size), "--trials", str(trials))
            keep(f"{op}-{world_size}", lambda flags=flags: bench(*flags))


class Results:
    """What was measured, by op, number of ranks, back end and way."""

    def __init__(self, folder: Path) -> None:
        self.time_us: dict[tuple[str, int, int, str, str], float] = {}
        self.ratio: dict[tuple[str, int, int, str, str], float] = {}  # of shm: via and versus
        for path in sorted(folder.glob("*-[0-9].json")):
            if not path.name.startswith("mpich"):
                self._add(json.loads(path.read_text(encoding="utf-8")))
        self.rounds = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("mpich-*.json"))]

    def _add(self, run: dict[str, Any]) -> None:
        world_size = run["world_size"]
        for row in run["rows"]:
            assert row["correct"], row
            key = row["op"], world_size, row["bytes"], row["backend"], row["via"]
            self.time_us[key] = row["time_us_median"]
        for row in run["copy_limit"]["rows"]:
            self.time_us["copy", world_size, row["bytes"], "", ""] = row["time_us_median"]
        for row in run["ratios"]["rows"]:
            if row["backend"] == "shm":
                self.ratio[row["op"], world_size, row["bytes"], row["via"], row["versus"]] = row["speed_ratio"]

    def sizes(self, op: str, world_size: int) -> list[int]:
        return sorted({key[2] for key in self.time_us if key[:2] == (op, world_size)})

    def against_mpich(self, num_bytes: int) -> tuple[float, float, float]:
        """us of shm, us of MPICH, and how many times as fast shm is: medians over the rounds."""
        key = str(num_bytes)
        pairs = [
            (
                next(r["time_us_median"] for r in one["shm"] if r["via"] == "group" and r["bytes"] == num_bytes),
                one["mpich"][key],
            )
            for one in self.rounds
        ]
        ours, theirs = zip(*pairs, strict=True)
        ratio = statistics.median(b / a for a, b in pairs)
        return statistics.median(ours), statistics.median(theirs), ratio


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, the first column to the left."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)]


def collectives(results: Results, world_size: int) -> list[str]:
    """A table an operation."""
    lines = []
    head = ["S", "Gloo us", "shm us", "GB/s", "x Gloo", "Gloo us", "shm us", "GB/s", "x Gloo"]
    for op in OPS:
        rows = []
        for size in results.sizes(op, world_size):
            row = [size_text(size)]
            for via in ("group", "torch"):
                gloo, shm = (results.time_us[op, world_size, size, backend, via] for backend in ("gloo", "shm"))
                ratio = results.ratio[op, world_size, size, via, "gloo"]
                row += [figures(gloo), figures(shm), f"{size / shm / 1e3:.2f}", f"{ratio:.1f}"]
            rows.append(row)
        if not rows:  # the run was stopped before
            lines += ["", f"**{op}**: not measured."]
            continue
        lines += ["", f"**{op}**", "", *table(head, rows)]
    return lines


def copy_limit(results: Results) -> list[str]:
    """all_reduce beside copying."""
    rows = []
    for world_size in TRIALS:
        for size in results.sizes("copy", world_size):
            shm = results.time_us["all_reduce", world_size, size, "shm", "group"]
            copy = results.time_us["copy", world_size, size, "", ""]
            percent = 100 * results.ratio["all_reduce", world_size, size, "group", "copy limit"]
            rows.append([f"{world_size} ranks, {size_text(size)}", figures(copy), figures(shm), f"{percent:.0f}%"])
    return table(["", "copy us", "all_reduce us", "speed of all_reduce"], rows)


def targets(results: Results) -> list[str]:
    """Every target, what was measured, and whether that is enough."""
    rows: list[list[str]] = []

    def add(what: str, goal: str, values: dict[str, float], enough: Any, unit: str) -> None:
        missed = [f"{name} {figures(value)}{unit}" for name, value in values.items() if not enough(value)]
        worst = (max if enough(0) else min)(values.values())
        text = "met" if not missed else f"**missed**: {', '.join(missed)}" if len(values) > 1 else "**missed**"
        rows.append([what, goal, f"{figures(worst)}{unit}", text])

    for via, name, limit in (("group", "`Group`", 60), ("torch", "torch.distributed", 120)):
        values = {
            f"{op} {size_text(size)}": results.time_us[op, 2, size, "shm", via]
            for op in OPS[:3]
            for size in results.sizes(op, 2)
            if size <= SMALL
        }
        add(f"up to 4 KiB, 2 ranks, {name}", f"at most {limit} us", values, lambda us, limit=limit: us <= limit, " us")
    for ops, goal in ((OPS[:3], 3.0), (OPS[3:], 1.5)):
        for via, name in (("group", "`Group`"), ("torch", "torch.distributed")):
            values = {
                f"{op} {size_text(size)}": results.ratio[op, 2, size, via, "gloo"]
                for op in ops
                for size in results.sizes(op, 2)
                if size >= LARGE
            }
            what = f"{', '.join(ops)}, 1 to 100 MB, 2 ranks, {name}"
            add(what, f"{goal:g}x Gloo", values, lambda ratio, goal=goal: ratio >= goal, "x")
    values = {"": 100 * results.ratio["all_reduce", 2, 10**8, "group", "copy limit"]}
    add("all_reduce 100 MB, 2 ranks", "70% of the copy limit", values, lambda percent: percent >= 70, "%")
    if results.rounds:
        values = {"": results.against_mpich(10**8)[2]}
        add("all_reduce 100 MB, 2 ranks", "1.5x MPICH", values, lambda ratio: ratio >= 1.5, "x")
    values = {
        f"{op} {size_text(size)} ({via})": results.ratio[op, 4, size, via, "gloo"]
        for op in OPS
        for size in results.sizes(op, 4)
        for via in ("group", "torch")
    }
    measured = ", ".join(op for op in OPS if results.sizes(op, 4))
    add(f"{measured}, every size, 4 ranks on 2 cores", "2x Gloo", values, lambda ratio: ratio >= 2, "x")
    return table(["what", "target", "worst measured", ""], rows)


def page(results: Results) -> str:
    """The document: benchmarks/page.md with the tables in it."""
    machine, mpi = host(), []
    for size in map(parse_size, MPICH_SIZES) if results.rounds else ():
        ours, theirs, ratio = results.against_mpich(size)
        mpi.append([size_text(size), figures(theirs), figures(ours), f"{ratio:.2f}"])
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB"
    return string.Template((HERE / "page.md").read_text(encoding="utf-8")).substitute(
        date=datetime.date.today().isoformat(),
        machine=f"{cpu}, {machine['system']}, Python {machine['python']}, torch {machine['torch']}",
        trials=" and ".join(f"{trials} trials of all in turn on {n} ranks" for n, trials in TRIALS.items()),
        targets="\n".join(targets(results)),
        two="\n".join(collectives(results, 2)),
        four="\n".join(collectives(results, 4)),
        copy="\n".join(copy_limit(results)),
        rounds=len(results.rounds),
        mpich="\n".join(table(["S", "MPICH us", "shm us", "x MPICH"], mpi)) if mpi else "Not measured.",
    )


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--mpich", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after as many")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/benchmarks.md")
    args = parser.parse_args()
    measure(args.results, args.mpich, args.seconds)
    args.out.write_text(page(Results(args.results)), encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
