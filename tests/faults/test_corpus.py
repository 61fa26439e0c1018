"""A part of the corpus in every test run; `make faults` runs all of it."""

import json
import subprocess
import sys

import pytest

from .corpus import CRASH, MISTAKES, STUCK, scenarios

CHOSEN = [
    *("ddp: raise", "hand: gil", "hand: op", "hand: swap", "groups: skip"),
    *("crosscut tp: kill", "crosscut dp: skip", "crosscut pp: clean", "hand: clean"),
]


def test_the_corpus_is_as_large_as_it_says():
    every = scenarios()
    assert len({one.name for one in every}) == len(every)
    assert sum(not one.is_clean for one in every) >= 60
    assert sum(one.is_clean for one in every) >= 10
    faults = {one.fault for one in every}
    assert faults >= {*CRASH, *STUCK, "batches", "slow", "port", *(fault for _, fault, _, _ in MISTAKES)}


@pytest.mark.xdist_group("processes")
def test_a_part_of_it():
    command = [sys.executable, "-m", "tests.faults", *CHOSEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(row["name"] for row in rows) == sorted(CHOSEN)
    for row in rows:
        assert row["right_kind"], row
        assert row["right_culprit"], row
        assert row["injected"] == (not row["name"].endswith("clean")), row
        if row["injected"]:
            assert row["seconds"] < 5 * 4.5, row  # hang time-out and 3 s, five times over on a busy machine
