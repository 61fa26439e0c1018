"""The suite is worth what it catches: every seeded bug is found, by whom it should be, and what is wrong is named."""

from __future__ import annotations

import re

import pytest

from tests.mutations.bugs import BUGS, Bug
from tests.mutations.score import try_bug

KINDS = {"ddp", "zero", "fsdp", "tp", "sp", "pp", "loss-averaging", "grad-norm", "sharding", "init"}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found_and_named(bug: Bug) -> None:
    result = try_bug(bug)
    assert result.found, f"escaped: {result.text}"
    assert result.found == bug.by, result
    assert result.named, f"says {result.text!r}, not {bug.says!r}"


@pytest.mark.parametrize("run", sorted({(b.mesh, tuple(sorted(b.options.items())), tuple(sorted(b.model.items())))
                                        for b in BUGS}), ids=str)  # fmt: skip
def test_the_same_run_without_a_bug_is_equal(run) -> None:  # type: ignore[no-untyped-def]
    bug = next(b for b in BUGS if (b.mesh, tuple(sorted(b.options.items())), tuple(sorted(b.model.items()))) == run)
    result = try_bug(bug, seed=False)
    assert not result.found, result.text


def test_there_are_bugs_of_every_kind() -> None:
    assert len(BUGS) >= 30
    assert {b.kind for b in BUGS} == KINDS
    assert len({b.name for b in BUGS}) == len(BUGS)
    assert sum(bool(b.says) for b in BUGS) >= 12
    assert all(re.compile(b.says) for b in BUGS)
