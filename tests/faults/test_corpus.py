"""A part of the corpus in every test run; `make faults` runs all of it."""

import json
import subprocess
import sys

import pytest

from . import document, tools
from .corpus import CROSSCUT, PROCESS, PROGRAMS, STOCK, WHAT, WHOLE, scenarios
from .launch import Outcome

CHOSEN = [
    *("ddp: raise", "hand: gil", "hand: op", "hand: swap", "groups: skip", "shm hand: swap"),
    *("crosscut tp: kill", "crosscut dp: skip", "crosscut pp: clean", "hand: clean"),
]
CALLS = {"skip", "extra", "swap", "shape", "dtype", "op", "root", "splits", "branch", "draw", "seed", "no step"}
EVERYWHERE = {*PROCESS, *CALLS, "port", "slow"}
STOCK_ONLY = {"unused", "empty", "length", "type", "norecv", "nosend", "micro", "group", "source"}


def test_the_corpus_is_as_large_as_it_says():
    every = scenarios()
    assert len({one.name for one in every}) == len(every)
    assert sum(not one.is_clean for one in every) >= 140
    assert sum(one.is_clean for one in every) >= 20
    assert {*STOCK, *CROSSCUT} == set(PROGRAMS)
    stock, crosscut = (
        {one.fault for one in every if one.name.partition(":")[0] in programs} for programs in (STOCK, CROSSCUT)
    )
    assert stock >= EVERYWHERE | STOCK_ONLY
    assert crosscut >= EVERYWHERE
    assert stock | crosscut == {"", *WHAT}
    for name in WHOLE:
        assert {one.fault for one in every if one.name.startswith(f"{name}:")} >= set(PROCESS)
    assert sum(one.backend == "shm" and not one.is_clean for one in every) >= 10


def _run(*words):
    command = [sys.executable, "-m", "tests.faults", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.xdist_group("processes")
def test_a_part_of_it():
    rows = _run(*CHOSEN)
    assert sorted(row["name"] for row in rows) == sorted(CHOSEN)
    for row in rows:
        assert row["right_kind"], row
        assert row["right_culprit"], row
        assert row["injected"] == (not row["name"].endswith("clean")), row
        if row["injected"]:
            assert row["seconds"] < 5 * 4.5, row  # hang time-out and 3 s, five times over on a busy machine


@pytest.mark.xdist_group("processes")
def test_what_torch_s_own_tools_say():
    """Another dtype: DETAIL and the analyser name the rank; without them the program ends as if nothing were wrong."""
    (row,) = _run("--tools", "hand: dtype")
    assert row["DETAIL"].startswith(f"rank {row['bad']}, ")
    assert row["Gloo time-out"] == "silent"
    assert row["Flight Recorder"].startswith(f"rank {row['bad']}, ")


def test_who_is_named():
    assert tools._named("[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 1500 ms") == {1, 3}
    assert tools._named("missing ranks: {2}\nexpected ranks: {0, 1, 2}") == {2}
    assert tools._named("error msg: Culprit rank 2; Error type: X, Culprit rank 0; Error type: X") == {0, 2}
    assert tools._named("we missed FR dumps from ranks ({1}) so we") == {1}
    assert tools._named("Timed out waiting 1500ms for recv operation to complete") == set()
    mismatch = (
        "Rank 2 is running collective: X(SequenceNumber=4), but Rank 1 is running collective: Y(SequenceNumber=4)"
    )
    assert tools.PAIR.findall(mismatch) == [("2", "1")]


def test_the_document_counts_and_keeps_its_columns(tmp_path):
    every = scenarios()
    wrong = next(one for one in every if one.name == "hand: op")
    outcomes = [(one, Outcome() if one.is_clean else Outcome(one.kinds[0], tuple(one.at_fault))) for one in every]
    outcomes = [(one, Outcome("order", (0,), seconds=0.5) if one is wrong else out) for one, out in outcomes]
    named = tools.Said(True, (1,), True, 1.54)
    said = [(one, [tools.Said(alarm=one.is_clean), tools.Said(), named]) for one in every if tools.fits(one)]
    document.write(tmp_path / "faults.md", outcomes, said, 300.0)
    text = (tmp_path / "faults.md").read_text()
    number = sum(not one.is_clean for one in every)
    assert f"| faults detected | {number} of {number} |" in text
    assert f"| rank at fault named, and named first | {number - 1} of {number} |" in text
    assert "| hand: op | 2 | order | wrong: 0, 0.5 s |  | silent | silent | rank 1, 1.5 s |" in text.replace(
        "\xa0", " "
    )
    stock = sum(not one.is_clean for one, _ in said)
    assert f"| **all** | {stock} / {stock - 1} of {stock} | 0 / 0 of {stock} | 0 / 0 of {stock} |" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert all(len({line.count(" | ") for line in table[2:]}) == 1 for table in tables)
