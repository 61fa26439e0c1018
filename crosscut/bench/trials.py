"""Trials of several variants in turn, so that a noisy minute of the machine is shared by all; then their statistics.

In every trial each variant is measured once, beginning with another one each time. Two variants are compared by the
median of their ratios within trials, which is steadier than the ratio of medians.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

TARGET_S = 0.002  # a trial repeats a short call until about this has passed
MAX_REPEATS = 50
WARM_UP = 3


def order(count: int, trial: int) -> list[int]:
    """In which order trial number `trial` measures the variants."""
    return [(i + trial) % count for i in range(count)]


def repeats(seconds: float) -> int:
    """How many calls a trial makes of something that takes `seconds`."""
    return max(1, min(MAX_REPEATS, int(TARGET_S / max(seconds, 1e-9))))


def timed(call: Callable[[], Any], num_calls: int, start: Callable[[], None], finish: Callable[[], None]) -> float:
    """Seconds of one call, averaged over `num_calls` made one after another, from a common start."""
    start()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    finish()
    return (time.perf_counter() - began) / num_calls


def interleave(
    calls: Sequence[Callable[[], Any]],
    num_trials: int,
    *,
    start: Callable[[], None],
    finish: Callable[[], None],
    slowest: Callable[[list[float]], list[float]],
    tick: Callable[[], None] = lambda: None,
    known: Sequence[float] | None = None,
) -> list[list[float]]:
    """Seconds of each call: [variant][trial], of the slowest rank.

    start: a barrier; finish: waits for a GPU; slowest: this rank's numbers -> the largest of all ranks, place by place.
    known: about how many seconds each call takes, of calls that are warm already. Every rank makes the same calls in
    the same order.
    """
    known = known or slowest([timed(call, WARM_UP, start, finish) for call in calls])
    counts = [repeats(seconds) for seconds in known]
    own: list[list[float]] = [[] for _ in calls]
    for trial in range(num_trials):
        for i in order(len(calls), trial):
            own[i].append(timed(calls[i], counts[i], start, finish))
        tick()
    flat = slowest([seconds for times in own for seconds in times])
    return [flat[i * num_trials : (i + 1) * num_trials] for i in range(len(calls))]


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95% of them do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def paired(others: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast `ours` is: the median over trials of others / ours."""
    return statistics.median(theirs / own for theirs, own in zip(others, ours, strict=True))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval that holds the median with at least that confidence, from order statistics (binomial, no
    assumption on the distribution); with fewer than six values the smallest and the largest.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.5**n, 0  # P(at most k of n values lie below the median)
    while 2 * (below + math.comb(n, k + 1) * 0.5**n) <= 1 - confidence and k + 1 < n // 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    return ordered[k], ordered[n - 1 - k]
