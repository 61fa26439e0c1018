"""`crosscut tour collectives`: the values of the lectures, really communicated, and what is printed."""

import io
import json

import pytest
from rich.console import Console

from crosscut.cli.main import main
from crosscut.tour import collectives, show


@pytest.fixture(scope="module")
def four():
    return collectives.run(4, "threads")


def ends(tours, name):
    return [t.shown[name].before for t in tours], [t.shown[name].after for t in tours]


def test_the_lectures_values_on_four_ranks(four):
    whole, own = (0, 1, 2, 3), [(0,), (1,), (2,), (3,)]
    shifted = [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)]
    assert ends(four, "broadcast") == ([whole] + [(0,) * 4] * 3, [whole] * 4)
    assert ends(four, "scatter") == ([whole, None, None, None], own)
    assert ends(four, "gather") == (own, [whole, None, None, None])
    assert ends(four, "reduce") == (own, [(6,), (1,), (2,), (3,)])
    assert ends(four, "all_gather") == (own, [whole] * 4)
    assert ends(four, "reduce_scatter") == (shifted, [(6,), (10,), (14,), (18,)])
    assert ends(four, "all_reduce") == (shifted, [(6, 10, 14, 18)] * 4)
    rows = [tuple(range(4 * r, 4 * r + 4)) for r in range(4)]
    assert ends(four, "all_to_all") == (rows, list(zip(*rows, strict=True)))
    assert list(four[0].shown) == [c.name for c in collectives.COLLECTIVES]
    assert len(four[0].shown) == 8


def test_all_reduce_is_reduce_scatter_and_all_gather(four):
    assert [t.pieces for t in four] == [(6,), (10,), (14,), (18,)]
    assert {t.whole for t in four} == {(6, 10, 14, 18)}
    assert collectives.is_equal(four)


def test_bytes_are_the_ledgers(four):
    """int64: 8 bytes a number."""
    assert [t.shown["scatter"].bytes for t in four] == [32, 0, 0, 0]
    for name, sent in {"broadcast": 32, "gather": 8, "all_gather": 32, "reduce_scatter": 32, "all_reduce": 32}.items():
        assert {t.shown[name].bytes for t in four} == {sent}
    assert four[0].two_step_bytes == {"reduce_scatter": 32, "all_gather": 32}


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_other_world_sizes(size):
    tours = collectives.run(size, "threads")
    total = size * (size - 1) // 2
    assert [t.pieces for t in tours] == [(total + size * r,) for r in range(size)]
    assert collectives.is_equal(tours)
    assert [t.shown["reduce"].after for t in tours] == [(total,)] + [(r,) for r in range(1, size)]


def test_a_wrong_result_is_not_called_equal(four):
    wrong = [*four[:3], collectives.RankTour(four[3].shown, four[3].pieces, (6, 10, 14, 0), {})]
    assert not collectives.is_equal(wrong)


def printed(tours, width):
    out = io.StringIO()
    show.collectives(tours, "threads", Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_what_is_printed(four, width):
    text = printed(four, width)
    assert max(map(len, text.splitlines())) <= width
    assert "run by 4 ranks (threads)" in text
    for collective in collectives.COLLECTIVES:
        assert f"\n{collective.name}  {collective.does}\n" in text
        assert f"used for  {collective.used_for}\n" in text
    assert "all_reduce       [6 10 14 18] on every rank: equal" in text


def test_every_rank_is_printed_however_many(four):
    text = printed(collectives.run(9, "threads"), 80)
    assert max(map(len, text.splitlines())) <= 80
    for collective in collectives.COLLECTIVES:
        part = text.split(f"\n{collective.name}  ")[1].split("used for")[0]
        assert [f"rank {r}" in part for r in range(9)] == [True] * 9


def test_the_command(capsys):
    assert main(["tour", "collectives", "--world-size", "3", "--json", "-"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["schema"], out["version"], out["world_size"], out["equal"]) == ("crosscut.tour.collectives", 1, 3, True)
    assert list(out)[:2] == ["schema", "version"]
    assert len(out["rows"]) == 8 * 3
    assert out["rows"][-1] == {
        "collective": "all_to_all",
        "rank": 2,
        "before": [6, 7, 8],
        "after": [2, 5, 8],
        "bytes": 24,
    }


def test_the_command_prints_and_writes(capsys, tmp_path):
    assert main(["tour", "collectives", "--json", str(tmp_path / "t.json")]) == 0
    assert "[6 10 14 18] on every rank: equal" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["all_reduce"] == [6, 10, 14, 18]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["colectives"], "unknown tour 'colectives'; did you mean 'collectives'?"),
        (["zzz"], "unknown tour 'zzz'; tours: collectives, dp, tp, pp, algorithms"),
        (["collectives", "--world-size", "0"], "--world-size 0: a tour takes 1 to 16 ranks"),
        (["dp", "--world-size", "17"], "--world-size 17: a tour takes 1 to 16 ranks"),
    ],
)
def test_bad_usage(words, message, capsys):
    assert main(["tour", *words]) == 2
    assert capsys.readouterr().err == f"crosscut tour: error: {message}\n"


def test_without_a_name_the_tours_are_listed(capsys):
    assert main(["tour"]) == 0
    names = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert names == ["collectives", "dp", "tp", "pp", "algorithms"]
