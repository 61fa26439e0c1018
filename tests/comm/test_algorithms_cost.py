"""The alpha-beta costs are those of the messages really sent, and the steps shown are the steps really taken."""

import pytest

from crosscut.comm.algorithms import ALGORITHMS, COSTS, explain_steps
from crosscut.comm.algorithms.hierarchical import host_lists
from crosscut.comm.algorithms.recorder import Event, Sent
from crosscut.comm.algorithms.trace import record, replay

PAIRS = [(op, name) for op, names in ALGORITHMS.items() for name in names]
DIVIDES = 5040  # by every n and p up to 9, and by every number of pieces of the hosts


def test_every_algorithm_has_a_cost():
    assert {op: list(names) for op, names in ALGORITHMS.items()} == {op: list(names) for op, names in COSTS.items()}
    assert {name for _, name in PAIRS} == {
        "ring", "recursive_doubling", "rabenseifner", "binomial", "bruck", "pairwise", "hierarchical",
    }  # fmt: skip


@pytest.mark.parametrize("op, name", PAIRS)
def test_steps_and_bytes_are_the_costs(op, name):
    """Every world size: the longest chain of messages has the formula's steps and bytes, and the results are right."""
    for n in range(1, 10):
        trace = record(op, name, n, numel=DIVIDES)
        assert trace.after == trace.group_after
        size = DIVIDES * 8
        for alpha, beta in ((1, 0), (0, 1), (700, 0.1)):
            seconds = trace.seconds(lambda src, dst, num_bytes, a=alpha, b=beta: a + b * num_bytes)
            assert seconds == pytest.approx(COSTS[op][name](n, size, alpha, beta)), (n, alpha, beta)
        assert len(trace.steps()) == COSTS[op][name](n, size, 1, 0)


@pytest.mark.parametrize("op, name", PAIRS)
@pytest.mark.parametrize("n", [3, 4, 6])
def test_sizes_that_do_not_divide_cost_no_more_than_rounded_up(op, name, n):
    for numel in (1, n - 1, n + 1, 41):
        if op not in ("all_reduce", "broadcast", "reduce"):
            numel *= n
        trace = record(op, name, n, numel=numel)
        assert trace.after == trace.group_after
        rounded = -(-numel // 12) * 12 * 8
        for alpha, beta in ((1, 0), (0, 1)):
            seconds = trace.seconds(lambda src, dst, num_bytes, a=alpha, b=beta: a + b * num_bytes)
            assert seconds <= COSTS[op][name](n, rounded, alpha, beta)


@pytest.mark.parametrize(
    "op, name",
    [("all_reduce", "ring"), ("all_gather", "ring"), ("reduce_scatter", "ring"), ("all_gather", "bruck"),
     ("all_to_all", "pairwise"), ("reduce_scatter", "pairwise")],
)  # fmt: skip
def test_where_all_ranks_do_the_same_each_sends_the_costs_bytes(op, name):
    for n in range(1, 10):
        trace = record(op, name, n, numel=DIVIDES)
        assert trace.ledger_bytes == (COSTS[op][name](n, DIVIDES * 8, 0, 1),) * n
        assert {len(events) for events in trace.log} == {COSTS[op][name](n, DIVIDES * 8, 1, 0)}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_powers_of_two_by_hand(n):
    """n: steps, and bytes in units of S, from the textbooks."""
    steps = {2: 1, 4: 2, 8: 3}[n]
    size = 5040 * 8
    assert COSTS["all_reduce"]["ring"](n, size, 1, 0) == 2 * (n - 1)
    assert COSTS["all_reduce"]["recursive_doubling"](n, size, 1, 0) == steps
    assert COSTS["all_reduce"]["recursive_doubling"](n, size, 0, 1) == steps * size
    assert COSTS["all_reduce"]["rabenseifner"](n, size, 1, 0) == 2 * steps
    assert COSTS["all_reduce"]["rabenseifner"](n, size, 0, 1) == COSTS["all_reduce"]["ring"](n, size, 0, 1)
    assert COSTS["all_to_all"]["bruck"](n, size, 0, 1) == steps * size / 2
    assert COSTS["all_gather"]["recursive_doubling"](n, size, 3, 1) == COSTS["all_gather"]["bruck"](n, size, 3, 1)
    trace = record("all_reduce", "rabenseifner", n, numel=DIVIDES)
    assert trace.ledger_bytes == (COSTS["all_reduce"]["rabenseifner"](n, size, 0, 1),) * n


@pytest.mark.parametrize("hosts, n", [(2, 4), (2, 8), (3, 9), (4, 8), (2, 7), (3, 7), ([[0, 3], [1, 4], [2, 5]], 6)])
def test_hierarchical_cost_with_slow_links_between_hosts(hosts, n):
    home = {rank: h for h, ranks in enumerate(host_lists(hosts, n)) for rank in ranks}
    trace = record("all_reduce", "hierarchical", n, numel=DIVIDES, hosts=hosts)
    assert trace.after == trace.group_after

    def link(src, dst, num_bytes):
        return 2 + num_bytes if home[src] == home[dst] else 50 + 7 * num_bytes

    cost = COSTS["all_reduce"]["hierarchical"](n, DIVIDES * 8, 2, 1, hosts=hosts, across=(50, 7))
    assert trace.seconds(link) == pytest.approx(cost)
    across = [m for step in trace.steps() for m in step if home[m.src] != home[m.dst]]
    assert across
    assert all(m.what.startswith("across") for m in across)


@pytest.mark.parametrize("op, name", PAIRS)
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_in_a_step_a_rank_sends_and_receives_at_most_one_message(op, name, n):
    steps = explain_steps(op, name, n)
    assert bool(steps) == (n > 1)
    for step in steps:
        assert step
        assert len({m.src for m in step}) == len({m.dst for m in step}) == len(step)
        assert all(m.what and m.bytes == 8 * len(m.values) > 0 and m.src != m.dst for m in step)


def test_ring_steps_by_hand():
    """Piece j of rank r is (j + 1) * 10^r: the digits of a sum tell whose numbers are in it."""
    steps = [[(m.src, m.dst, m.what, m.values) for m in step] for step in explain_steps("all_reduce", "ring", 3)]
    assert steps == [
        [(0, 1, "piece 2", (3,)), (1, 2, "piece 0", (10,)), (2, 0, "piece 1", (200,))],
        [(0, 1, "piece 1", (202,)), (1, 2, "piece 2", (33,)), (2, 0, "piece 0", (110,))],
        [(0, 1, "piece 0", (111,)), (1, 2, "piece 1", (222,)), (2, 0, "piece 2", (333,))],
        [(0, 1, "piece 2", (333,)), (1, 2, "piece 0", (111,)), (2, 0, "piece 1", (222,))],
    ]


def test_figures_of_the_docstrings():
    """The steps that the files draw."""

    def pairs(op, name, n):
        return [[(m.src, m.dst) for m in step] for step in explain_steps(op, name, n)]

    doubling = [[(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 2), (1, 3), (2, 0), (3, 1)]]
    assert pairs("all_reduce", "recursive_doubling", 4) == doubling
    assert pairs("all_reduce", "rabenseifner", 4) == [*doubling[::-1], *doubling]
    assert pairs("broadcast", "binomial", 8) == [[(0, 4)], [(0, 2), (4, 6)], [(0, 1), (2, 3), (4, 5), (6, 7)]]
    bruck = [[(r, (r - d) % 5) for r in range(5)] for d in (1, 2, 4)]
    assert pairs("all_gather", "bruck", 5) == bruck
    assert pairs("all_to_all", "pairwise", 4) == [[(r, r ^ s) for r in range(4)] for s in (1, 2, 3)]
    ring = [(0, 1), (1, 0), (2, 3), (3, 2)]
    across = [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert pairs("all_reduce", "hierarchical", 4) == [ring, across, across, ring]
    folded = pairs("all_reduce", "recursive_doubling", 6)
    assert (folded[0], folded[-1]) == ([(1, 0), (3, 2), (4, 5), (5, 4)], [(0, 1), (2, 3)])
    assert explain_steps("all_to_all", "pairwise", 4)[0][1].values == (100,)


def test_an_algorithm_that_needs_buffers_is_found_out():
    """Two ranks that both send first: it works where sends are buffered, and must not pass for right."""
    log = [
        [Event(Sent(1, "x", 8, ()), None), Event(None, 1)],
        [Event(Sent(0, "x", 8, ()), None), Event(None, 0)],
    ]
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for each other: .* buffered"):
        replay(log, lambda src, dst, num_bytes: 1.0)
    begun, finished = replay(
        [[Event(Sent(1, "x", 8, ()), 1)], [Event(Sent(0, "x", 24, ()), 0)]], lambda src, dst, num_bytes: num_bytes
    )
    assert (begun, finished) == ({(0, 0): 0, (1, 0): 0}, [24, 24])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("all_reduce", "rnig", 4), "did you mean 'ring'"),
        (("all_reduce", "ring", 17), "n=17: .* 1 to 16"),
        (("all_reduce", "ring", 0), "n=0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        explain_steps(*arguments)
    with pytest.raises(ValueError, match="numel=7 of all_gather is not divided by 4 ranks; use 8"):
        explain_steps("all_gather", "ring", 4, numel=7)
