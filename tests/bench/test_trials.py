"""Variants in turn, ranks together, medians and ratios."""

import pytest

from crosscut.bench import trials
from crosscut.bench.machine import fit, links
from crosscut.comm.launch import spawn


def test_every_variant_once_a_trial_and_each_first_in_turn():
    for count in (1, 2, 3, 4):
        rounds = [trials.order(count, trial) for trial in range(2 * count)]
        assert all(sorted(one) == list(range(count)) for one in rounds)
        assert [one[0] for one in rounds] == list(range(count)) * 2


@pytest.mark.parametrize("seconds, count", [(1e-6, 50), (1e-3, 2), (0.0021, 1), (1.0, 1), (0.0, 50)])
def test_short_calls_are_repeated(seconds, count):
    assert trials.repeats(seconds) == count


def test_statistics():
    assert trials.p95([float(i) for i in range(1, 101)]) == 95
    assert trials.p95([float(i) for i in range(1, 21)]) == 19
    assert trials.p95([3.0]) == 3
    assert trials.paired([2.0, 4.0, 30.0], [1.0, 1.0, 10.0]) == 3  # 2, 4 and 3 times as fast
    # A trial in which the machine was 100 times slower does not count for more.
    assert trials.paired([2.0, 200.0, 2.0], [1.0, 100.0, 1.0]) == 2


def test_interleaving_order_and_the_slowest_rank():
    """With a clock that each call moves on: rank 1 is slower in `b`, rank 0 in `a`."""
    log, now, ticks = [], [0.0], []
    costs = {"a": 0.0009, "b": 0.1}

    def call(name):
        def run():
            log.append(name)
            now[0] += costs[name]

        return run

    def slowest(own):
        """This rank's numbers and the other one's: twice as long in every second of them."""
        return [seconds * (2 if i % 2 else 1) for i, seconds in enumerate(own)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials.time, "perf_counter", lambda: now[0])
        times = trials.interleave(
            [call("a"), call("b")],
            3,
            start=lambda: log.append("|"),
            finish=lambda: None,
            slowest=slowest,
            tick=lambda: ticks.append(1),
        )
    words = "".join(log).split("|")[1:]
    assert words[:2] == ["aaa", "bbb"]  # warm-up
    assert words[2:] == ["aa", "b", "b", "aa", "aa", "b"]
    assert times[0] == pytest.approx([0.0009, 0.0018, 0.0009])
    assert times[1] == pytest.approx([0.2, 0.1, 0.2])
    assert len(ticks) == 3


def _rank(ctx):
    import time

    calls = [lambda: time.sleep(0.002 * ctx.rank), lambda: time.sleep(0.004 if ctx.rank == 0 else 0)]
    return trials.interleave(
        calls,
        3,
        start=lambda: ctx.world.barrier(),
        finish=lambda: None,
        slowest=lambda own: [max(column) for column in zip(*ctx.all_gather_object(own), strict=True)],
    )


def test_on_ranks_the_slowest_counts_and_all_know_it():
    values = spawn(_rank, world_size=2, backend="threads")
    assert values[0] == values[1]
    assert [len(times) for times in values[0]] == [3, 3]
    assert min(values[0][0]) >= 0.002
    assert min(values[0][1]) >= 0.004


@pytest.mark.parametrize("latency, rate", [(20e-6, 4e9), (1e-3, 1e9), (0.0, 2e9)])
def test_the_fit_finds_what_made_the_times(latency, rate):
    sizes = [8, 4096, 65536, 2**20, 2**24]
    found = fit(sizes, [latency + size / rate for size in sizes])
    assert found == pytest.approx((latency, 1 / rate), rel=1e-6, abs=1e-12)


def test_the_fit_weighs_small_sizes_like_large_ones_and_is_never_negative():
    sizes = [8, 2**20, 2**24]
    latency, _ = fit(sizes, [100e-6, 2**20 / 1e9, 2**24 / 0.9e9])
    assert 50e-6 < latency < 150e-6
    assert fit([8, 2**20, 2**22], [1e-9, 2e-3, 10e-3])[0] == 0
    assert fit([8, 16, 32], [3e-3, 2e-3, 1e-3])[1] == 0
    with pytest.raises(ValueError, match="two different ones"):
        fit([8, 8], [1e-3, 2e-3])


def test_links_per_op_and_back_end():
    rows = [
        {"op": op, "backend": "shm", "via": via, "algorithm": "", "world_size": 2, "bytes": size, "time_us_median": t}
        for op, factor in (("all_reduce", 1), ("broadcast", 2))
        for via in ("group", "torch")
        for size, t in ((8, 20 * factor), (10**6, (20 + 500) * factor + (via == "torch")))
    ]
    found = links(rows)
    assert [(row["op"], row["backend"], row["world_size"]) for row in found] == [
        ("all_reduce", "shm", 2),
        ("broadcast", "shm", 2),
    ]
    assert found[0]["latency_us"] == pytest.approx(20, rel=1e-3)
    assert found[1]["bandwidth_gbs"] == pytest.approx(1.0, rel=1e-3)
    assert found[0]["fit_error"] < 1e-9
