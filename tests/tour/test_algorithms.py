"""`crosscut tour algorithms`: messages really sent, results checked, costs and winners by the formulas."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from crosscut.cli.main import main
from crosscut.comm.algorithms import ALGORITHMS, COSTS
from crosscut.tour import algorithms, show_algorithms

PAIRS = [(op, name) for op, names in ALGORITHMS.items() for name in names]


def printed(tour, width):
    out = io.StringIO()
    show_algorithms.algorithm(tour, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_the_ring_on_four_ranks():
    tour = algorithms.run("ring", 4)
    text = printed(tour, 100)
    lines = text.splitlines()
    assert lines[0] == "all_reduce by ring, run by 4 ranks (threads)"
    at = next(i for i, line in enumerate(lines) if line.startswith("step 1"))
    assert lines[at].split() == "step 1 → 1 [4] → 2 [10] → 3 [200] → 0 [3000]".split()
    assert lines[at + 1].split() == "piece 3 piece 0 piece 1 piece 2".split()
    after = next(line for line in lines if line.startswith("after"))
    assert after.count("[1111 2222 3333 4444]") == 4
    assert sum(line.startswith("step ") for line in lines) == 6
    assert "own collective gives: yes" in text
    assert "In this run each rank sent 48 bytes" in text


@pytest.mark.parametrize("op, name", PAIRS)
@pytest.mark.parametrize("size", [1, 3, 4, 9])
@pytest.mark.parametrize("width", [80, 100])
def test_every_algorithm_is_shown_whole(op, name, size, width):
    tour = algorithms.run(name, size, op=op)
    text = printed(tour, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith(f"{op} by {name}, run by {size} rank")
    assert all(f"rank {rank} " in text.replace("\n", " \n") for rank in range(size))
    messages = sum(map(len, tour.steps))
    arrows = text.count("→ ")
    assert arrows == messages
    assert tour.is_equal
    assert "gives: yes" in text
    for other in ALGORITHMS[op]:
        assert f"\n  {other} " in text


def test_a_wrong_result_is_not_called_equal():
    tour = algorithms.run("ring", 2)
    wrong = dataclasses.replace(tour, trace=dataclasses.replace(tour.trace, after=([11, 22], [11, 23])))
    assert not wrong.is_equal
    assert "gives: NO" in printed(wrong, 100)


@pytest.mark.parametrize("size", range(2, 10))
def test_winners_are_those_of_the_formulas(size):
    alpha, beta = algorithms.ALPHA_S, algorithms.BETA_S
    for op in ALGORITHMS:
        tour = algorithms.run(next(n for n in ALGORITHMS[op] if n != "hierarchical"), size, op=op)
        assert (tour.winners[0][0], tour.winners[-1][1]) == (8, 2**32)
        for (_, stop, a), (start, _, b) in zip(tour.winners, tour.winners[1:], strict=False):
            assert start == 2 * stop
            assert a != b
        for start, stop, winner in tour.winners:
            for end in (start, stop):
                costs = {name: cost(size, end, alpha, beta) for name, cost in COSTS[op].items()}
                assert costs[winner] <= min(costs.values()) * (1 + 1e-6)


def test_when_it_wins():
    assert (
        algorithms.run("recursive_doubling", 8)
        .wins()
        .startswith("recursive_doubling is the cheapest on 8 ranks up to ")
    )
    assert algorithms.run("rabenseifner", 9).wins() == (
        "rabenseifner is never the cheapest on 9 ranks: up to 128 KiB recursive_doubling is, "
        "from 256 KiB to 1 MiB hierarchical is, from 2 MiB ring is"
    )
    assert algorithms.run("ring", 8).wins().startswith("ring is never the cheapest on 8 ranks: up to ")
    assert algorithms.run("binomial", 4).wins() == "the only algorithm for broadcast here"
    assert algorithms.run("ring", 1).wins() == "one rank has nothing to send"
    assert algorithms.run("bruck", 4, op="all_to_all").wins().endswith("pairwise is")
    assert algorithms.run("bruck", 5).wins() == "bruck is the cheapest on 5 ranks for every size"


def test_hierarchical_wins_where_links_between_hosts_are_slow():
    tour = algorithms.run("hierarchical", 8, hosts=2)
    assert tour.hosts == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert tour.winners[-1][2] == "hierarchical"
    cost = next(cost for cost in tour.costs if cost.name == "hierarchical")
    across = (algorithms.ACROSS * algorithms.ALPHA_S, algorithms.ACROSS * algorithms.BETA_S)
    for size, seconds in zip(algorithms.SHOWN_SIZES, cost.seconds, strict=True):
        formula = COSTS["all_reduce"]["hierarchical"](
            8, size, algorithms.ALPHA_S, algorithms.BETA_S, hosts=2, across=across
        )
        assert seconds == pytest.approx(formula)
    assert "Ranks of host 0: 0 1 2 3, host 1: 4 5 6 7." in printed(tour, 100)


def test_the_command_as_json(capsys):
    assert main(["tour", "algorithms", "bruck", "--op", "all_gather", "--world-size", "3", "--json", "-"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert list(out)[:2] == ["schema", "version"]
    assert (out["schema"], out["op"], out["world_size"]) == ("crosscut.tour.algorithms", "all_gather", 3)
    assert out["equal"] is True
    assert out["after"] == [[0, 100, 200]] * 3
    assert out["rows"][0] == {"step": 1, "src": 0, "dst": 2, "what": "block 0", "bytes": 8, "values": [0]}
    assert {row["step"] for row in out["rows"]} == {1, 2}
    assert [cost["algorithm"] for cost in out["costs"]] == list(ALGORITHMS["all_gather"])
    assert out["cheapest"][0]["from_bytes"] == 8


def test_the_command_prints_and_writes(capsys, tmp_path):
    assert main(["tour", "algorithms", "hierarchical", "--hosts", "2", "--json", str(tmp_path / "t.json")]) == 0
    assert "across, piece 0 of 1" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["hosts"] == [[0, 1], [2, 3]]


def test_without_a_name_all_are_listed(capsys):
    assert main(["tour", "algorithms", "--world-size", "8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[1]) for line in lines if len(line) == 5 and line[-1] == "S"] == PAIRS
    assert ["all_reduce", "rabenseifner", "6", "1.75", "S"] in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rinf"], "unknown algorithm 'rinf'; did you mean 'ring'?"),
        (["ring", "--op", "allreduce"], "unknown operation 'allreduce'; did you mean 'all_reduce'?"),
        (
            ["ring", "--op", "broadcast"],
            "ring is no algorithm of broadcast (but of all_reduce, all_gather, reduce_scatter); broadcast: binomial",
        ),
        (["ring", "--world-size", "10"], "--world-size 10: the tour of an algorithm shows 1 to 9 ranks"),
        (["ring", "--hosts", "2"], "--hosts goes with hierarchical, not with ring"),
        (["hierarchical", "--hosts", "5"], "hosts=5 cannot hold 4 ranks; use 1 to 4"),
        (["--op", "all_gather"], "say which algorithm: crosscut tour algorithms ring | recursive_doubling | bruck"),
        (["ring", "--form", "pairs"], "--form goes with tour tp, not with algorithms"),
    ],
)
def test_bad_usage(words, message, capsys):
    assert main(["tour", "algorithms", *words]) == 2
    assert capsys.readouterr().err == f"crosscut tour: error: {message}\n"


def test_other_tours_take_no_second_name(capsys):
    assert main(["tour", "dp", "ring"]) == 2
    assert "'ring' after dp: only the tour algorithms takes a second name" in capsys.readouterr().err
