"""The machine's profile: how fast it copies, multiplies matrices and communicates, for whoever predicts a step's time.

A call's time is modelled as `latency + bytes / bandwidth`, bytes being S of `crosscut.bench.definitions`. The two are
fitted to the medians of a sweep by least squares on relative errors: on absolute ones the largest size alone would
decide, and the latency could come out as anything.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from crosscut.bench.sides import Sides
from crosscut.comm.context import Context

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
SIZES = (8, 4096, 65536, 2**20, 2**22, 2**24)
COPY_BYTES = 128 * 10**6  # beyond any cache
SHAPES = ((128, 1024, 1024), (512, 512, 512), (1024, 1024, 1024), (2048, 256, 1024), (2048, 1024, 256))  # m, k, n
TRIALS = 5


def profile_path() -> Path:
    """Where the profile is kept: $XDG_CACHE_HOME/crosscut/machine.json, by default under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crosscut" / "machine.json"


def fit(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """(latency in s, seconds a byte) of `latency + size * seconds`, with the least sum of squared relative errors.

    Neither is negative: where the best fit would be, that one is 0 and the other fitted alone. At least two sizes.
    """
    w = [1 / (t * t) for t in times_s]
    sw = sum(w)
    sx = sum(a * x for a, x in zip(w, sizes, strict=True))
    sy = sum(a * t for a, t in zip(w, times_s, strict=True))
    sxx = sum(a * x * x for a, x in zip(w, sizes, strict=True))
    sxy = sum(a * x * t for a, x, t in zip(w, sizes, times_s, strict=True))
    determinant = sw * sxx - sx * sx
    if determinant <= 0:
        raise ValueError(f"fit: sizes {list(sizes)} are all the same; two different ones are needed")
    latency, per_byte = (sy * sxx - sx * sxy) / determinant, (sw * sxy - sx * sy) / determinant
    if latency < 0:
        return 0.0, sxy / sxx
    if per_byte < 0:
        return sy / sw, 0.0
    return latency, per_byte


def links(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a sweep -> a latency and a bandwidth per op, back end and world size. `fit_error`: the median relative
    distance between the fit and what was measured. A bandwidth of null: no slope was seen.
    """
    cells: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in rows:
        if row["via"] == "group" and not row["algorithm"]:
            cells.setdefault((row["op"], row["backend"], row["world_size"]), []).append(
                (row["bytes"], row["time_us_median"] * 1e-6)
            )
    found = []
    for (op, backend, world_size), points in cells.items():
        if len({size for size, _ in points}) < 2:
            continue
        latency, per_byte = fit([size for size, _ in points], [t for _, t in points])
        error = statistics.median(abs(latency + size * per_byte - t) / t for size, t in points)
        found.append(
            {
                "op": op,
                "backend": backend,
                "world_size": world_size,
                "latency_us": latency * 1e6,
                "bandwidth_gbs": 1 / per_byte / 1e9 if per_byte > 0 else None,
                "fit_error": error,
            }
        )
    return found


def host() -> dict[str, Any]:
    """Facts about this machine; no names of people, hosts or folders."""
    import psutil

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def measure_rank(ctx: Context, sides: Sides) -> dict[str, Any]:
    """Copying and matrix products. Collective.

    `copy_gbs`: bytes copied a second (each read once and written once) by one rank alone; `copy_all_gbs`: by all
    ranks together. `matmul`: fp32 on one thread a rank, all ranks at work, as in training; the slowest rank's time.
    """
    source = torch.ones(COPY_BYTES // 4)
    to = torch.zeros_like(source)

    def median(call: Callable[[], Any]) -> float:
        call()
        times = []
        for _ in range(TRIALS):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def slowest(seconds: float) -> float:
        return max(ctx.all_gather_object(seconds, tag="machine"))

    sides.start()
    alone_s = slowest(median(lambda: to.copy_(source)) if ctx.rank == 0 else 0.0)
    sides.start()
    together_s = slowest(median(lambda: to.copy_(source)))
    rows = []
    for m, k, n in SHAPES:
        a, b = torch.full((m, k), 0.5), torch.full((k, n), 0.25)
        sides.start()
        seconds = slowest(median(lambda a=a, b=b: a @ b))  # type: ignore[misc]
        rows.append(
            {
                "m": m,
                "k": k,
                "n": n,
                "dtype": "fp32",
                "device": "cpu",
                "time_us_median": seconds * 1e6,
                "gflops_per_s": 2 * m * k * n / seconds / 1e9,
            }
        )
    return {
        "copy_gbs": COPY_BYTES / alone_s / 1e9,
        "copy_all_gbs": ctx.world_size * COPY_BYTES / together_s / 1e9,
        "matmul": rows,
    }
