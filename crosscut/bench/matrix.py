"""Latency and bandwidth from every rank to every other one, by send and recv while the rest of the world is silent."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from crosscut.bench.sides import Side, Sides
from crosscut.comm.context import Context

SMALL_BYTES, LARGE_BYTES = 8, 4 * 2**20
SMALL_TRIALS, LARGE_TRIALS = 30, 5


def measure_pairs(ctx: Context, side: Side, sides: Sides) -> list[dict[str, Any]]:
    """A row a direction: `latency_us` is half a round trip of 8 bytes; `bandwidth_gbs` comes from 4 MiB answered by 8
    bytes, less that answer's latency. Medians, measured at the sender. Collective; all ranks get all rows.
    """
    small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=side.device)
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=side.device)
    own: list[dict[str, Any]] = []
    for src in range(ctx.world_size):
        for dst in range(ctx.world_size):
            if src == dst:
                continue
            sides.start()
            if ctx.rank in (src, dst):
                peer = dst if ctx.rank == src else src
                latency_s = _round_trip(side, sides, peer, ctx.rank == src, small, small, SMALL_TRIALS) / 2
                both_s = _round_trip(side, sides, peer, ctx.rank == src, large, small, LARGE_TRIALS)
                if ctx.rank == src:
                    one_way_s = max(both_s - latency_s, 1e-9)
                    rates = {"latency_us": latency_s * 1e6, "bandwidth_gbs": LARGE_BYTES / one_way_s / 1e9}
                    own.append({"backend": side.backend, "src": src, "dst": dst, **rates})
            sides.start()
    return [row for rows in ctx.all_gather_object(own, tag="pairs") for row in rows]


def _round_trip(
    side: Side, sides: Sides, peer: int, is_src: bool, there: torch.Tensor, back: torch.Tensor, num_trials: int
) -> float:
    """Median seconds from the send of `there` until `back` has come (at the source); two trials warm up."""
    times = []
    for _ in range(num_trials + 2):
        began = time.perf_counter()
        if is_src:
            side.group.send(there, peer)
            side.group.recv(back, peer)
        else:
            side.group.recv(there, peer)
            side.group.send(back, peer)
        sides.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])
