"""What `crosscut bench` prints and writes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosscut.bench import definitions
from crosscut.bench.measure import Measured
from crosscut.bench.sizes import size_text

COLUMNS = (
    "op",
    "backend",
    "via",
    "algorithm",
    "world_size",
    "bytes",
    "time_us_median",
    "time_us_p95",
    "algbw_gbs",
    "busbw_gbs",
    "correct",
)

BOTH_IN_A_CELL = 4  # as many ranks have room for a latency and a bandwidth side by side
COLUMNS_OF_NUMBERS = 8


def to_json(measured: Measured) -> dict[str, Any]:
    """The body of `--json`."""
    plan = measured.plan
    return {
        "world_size": plan.world_size,
        "dtype": plan.dtype,
        "trials": plan.trials,
        "threads_per_rank": 1,
        "complete": measured.error is None,
        "rows": measured.rows,
        "ratios": {"rows": measured.ratios},
        "copy_limit": {"rows": measured.copy_limit},
        "matrix": {"rows": measured.matrix},
    }


def write_csv(path: str, rows: list[dict[str, Any]]) -> None:
    """The rows, with a line of names. Raises ValueError if the file cannot be written."""
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ValueError(f"--csv {path}: cannot be written ({error.strerror})") from error


def figures(value: float) -> str:
    """Three digits that count; no powers of ten."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def collectives(measured: Measured, console: Console) -> None:
    """Print the definitions, a table an operation, the copy limit, the matrix and the lectures' formula."""
    plan = measured.plan
    console.print(
        Text.assemble(
            ("collectives", "bold"),
            f", {plan.world_size} ranks of 1 thread, {plan.dtype}, {plan.trials} trials of all in turn",
        )
    )
    console.print(Text("us: median time, p95: of 95% of trials; x Gloo: medians of paired trials", style="dim"))
    for line in definitions.explain([op for op in plan.ops if any(row["op"] == op for row in measured.rows)]):
        console.print(Text(line, style="dim"))
    for op in plan.ops:
        _table(measured, op, console)
    if measured.copy_limit:
        console.print(
            Text(
                "\n% copy: speed relative to the copy limit, every rank at once reading n*S and writing n*S by memcpy",
                style="dim",
            )
        )
    _matrix(measured, console)
    _lecture(measured, console)


def _ratio(measured: Measured, row: dict[str, Any], versus: str) -> str:
    keys = ("op", "backend", "via", "algorithm", "bytes")
    for ratio in measured.ratios:
        if ratio["versus"] == versus and all(ratio[key] == row[key] for key in keys):
            return f"{100 * ratio['speed_ratio']:.0f}%" if versus == "copy limit" else f"{ratio['speed_ratio']:.2f}x"
    return ""


def _table(measured: Measured, op: str, console: Console) -> None:
    rows = [row for row in measured.rows if row["op"] == op]
    if not rows:
        return
    versus = [name for name in ("gloo", "copy limit") if any(_ratio(measured, row, name) for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("S", "right"), ("back end", "left"), ("via", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("us", "p95", "algbw", "busbw"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in versus:
        table.add_column({"gloo": "x Gloo", "copy limit": "% copy"}[name], justify="right", no_wrap=True)
    table.add_column("correct")
    shown = 0
    for row in rows:
        times = [figures(row[key]) for key in ("time_us_median", "time_us_p95")]
        rates = [f"{row[key]:.3f}" for key in ("algbw_gbs", "busbw_gbs")]
        table.add_row(
            size_text(row["bytes"]) if row["bytes"] != shown else "",
            row["backend"],
            row["algorithm"] or row["via"],
            *times,
            *rates,
            *(_ratio(measured, row, name) for name in versus),
            Text("yes") if row["correct"] else Text("WRONG", style="bold red"),
        )
        shown = row["bytes"]
    console.print(Text(f"\n{op}", style="bold"))
    console.print(table)


def _matrix(measured: Measured, console: Console) -> None:
    size = measured.plan.world_size
    for backend in dict.fromkeys(row["backend"] for row in measured.matrix):
        cells = {(row["src"], row["dst"]): row for row in measured.matrix if row["backend"] == backend}
        console.print(Text.assemble((f"\nfrom rank to rank, {backend}", "bold"), ", one message at a time"))
        if size <= BOTH_IN_A_CELL:
            _grid(size, cells, lambda cell: f"{_latency(cell)} us  {_bandwidth(cell)} GB/s", "from \\ to", console)
            continue
        _grid(size, cells, _latency, "us", console)
        _grid(size, cells, _bandwidth, "GB/s", console)


def _latency(cell: dict[str, Any]) -> str:
    return figures(cell["latency_us"])


def _bandwidth(cell: dict[str, Any]) -> str:
    return f"{cell['bandwidth_gbs']:.2f}"


def _grid(
    size: int, cells: dict[Any, Any], text: Callable[[dict[str, Any]], str], corner: str, console: Console
) -> None:
    """A row a sender, a column a receiver; columns in blocks where they are many."""
    step = BOTH_IN_A_CELL if size <= BOTH_IN_A_CELL else COLUMNS_OF_NUMBERS
    for first in range(0, size, step):
        receivers = range(first, min(first + step, size))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(corner, no_wrap=True)
        for dst in receivers:
            table.add_column(f"rank {dst}", justify="right", no_wrap=True)
        for src in range(size):
            table.add_row(f"rank {src}", *(text(cells[src, dst]) if (src, dst) in cells else "-" for dst in receivers))
        console.print(table)


def _lecture(measured: Measured, console: Console) -> None:
    """The bandwidth by counting what is sent, worked out for the largest all_reduce."""
    rows = [row for row in measured.rows if row["op"] == "all_reduce"]
    if not rows:
        return
    row = max(rows, key=lambda one: (one["bytes"], one["busbw_gbs"]))
    n, size, time_s = row["world_size"], row["bytes"], row["time_us_median"] * 1e-6
    counted = definitions.sent_per_rank_gbs(n, size, time_s)
    console.print(
        Text(
            f"\nbusbw of all_reduce is what is sent / (n * t): sent = 2 S (n-1) = {2 * size * (n - 1):,} bytes, "
            f"n = {n}, t = {time_s:.6f} s ({row['backend']}, {row['via']}, {size_text(size)}): {counted:.3g} GB/s; "
            f"busbw {row['busbw_gbs']:.3g} GB/s",
            style="dim",
        )
    )


def machine(profile: dict[str, Any], path: Path | str, console: Console) -> None:
    """Print a machine's profile."""
    host = profile["host"]
    console.print(Text.assemble((host["cpu"], "bold"), f", {host['cores']} cores, {host['memory_bytes'] / 1e9:.0f} GB"))
    console.print(
        f"copying: one rank alone {profile['copy_gbs']:.1f} GB/s, {profile['world_size']} ranks together "
        f"{profile['copy_all_gbs']:.1f} GB/s\nmatrix products in fp32, on 1 thread of each rank at once:"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("matmul m x k x n", "us", "GFLOP/s"):
        table.add_column(name, justify="right" if table.columns else "left")
    for row in profile["matmul"]:
        shape = f"{row['m']} x {row['k']} x {row['n']}"
        table.add_row(shape, figures(row["time_us_median"]), f"{row['gflops_per_s']:.1f}")
    console.print(table)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    console.print(Text("\na call takes latency + S / bandwidth; fit error: median distance from that", style="dim"))
    for name in ("op", "back end", "ranks", "latency us", "bandwidth GB/s", "fit error"):
        table.add_column(name, justify="left" if len(table.columns) < 2 else "right")
    for row in profile["links"]:
        bandwidth = "-" if row["bandwidth_gbs"] is None else f"{row['bandwidth_gbs']:.2f}"
        latency = figures(row["latency_us"])
        error = f"{100 * row['fit_error']:.0f}%"
        table.add_row(row["op"], row["backend"], str(row["world_size"]), latency, bandwidth, error)
    console.print(table)
    console.print(Text(f"written to {path}"))
