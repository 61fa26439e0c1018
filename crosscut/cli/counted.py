"""What the ranks of a run counted, beside what was derived: read from `ledger/rank-*.json`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.comm.ledger import Ledger
from crosscut.layout.plan import Plan, Rule

Key = tuple[str, str, str]  # (tag, axis, op): what a ledger tells apart


@dataclass(frozen=True)
class Pair:
    """One key on one rank of a stage: a step as derived, and the run as counted."""

    key: Key
    calls: int | None  # derived, a step; None where the engine's buckets decide
    bytes: int
    counted_calls: int  # over the run
    counted_bytes: int

    def equal(self, steps: int) -> bool:
        """Whether the run counted exactly `steps` times what was derived."""
        calls_equal = self.calls is None or self.calls * steps == self.counted_calls
        return calls_equal and self.bytes * steps == self.counted_bytes


@dataclass(frozen=True)
class Counted:
    """The counts of a run, for each pp coordinate those of its first rank."""

    steps: int
    pairs: tuple[dict[Key, Pair], ...]  # by pp coordinate
    ranks_that_differ: tuple[int, ...]  # from the first rank of their stage

    def equal(self, stages: tuple[int, ...]) -> bool:
        """Whether everything counted was derived, to the byte, and the other way round."""
        return not self.ranks_that_differ and all(p.equal(self.steps) for pp in stages for p in self.pairs[pp].values())

    def of_rule(self, plan: Plan, pp: int, rule: Rule) -> dict[str, Any]:
        """The JSON columns of one rule. Rules that one ledger line counts together share its verdict."""
        pair = self.pairs[pp][(rule.tag, rule.axis, rule.op)]
        alone = sum(_key(r) == pair.key for r in plan.rules(pp)) == 1
        equal = pair.equal(self.steps)
        counted = rule.bytes * self.steps if equal and not alone else pair.counted_bytes
        return {"steps": self.steps, "counted_bytes": counted, "equal": equal}

    def not_derived(self, stages: tuple[int, ...]) -> list[tuple[int, Pair]]:
        """What was counted and stands in no rule."""
        return [(pp, p) for pp in stages for p in self.pairs[pp].values() if p.calls == 0 and p.counted_calls]

    def as_json(self, stages: tuple[int, ...]) -> dict[str, Any]:
        """The verdict, and what was counted without a rule."""
        extra = [
            {"stage": pp, "tag": p.key[0], "axis": p.key[1], "op": p.key[2], "calls": p.counted_calls,
             "counted_bytes": p.counted_bytes}
            for pp, p in self.not_derived(stages)
        ]  # fmt: skip
        return {
            "steps": self.steps, "equal": self.equal(stages), "not_derived": extra,
            "ranks_that_differ": list(self.ranks_that_differ),
        }  # fmt: skip


def _key(rule: Rule) -> Key:
    return (rule.tag, rule.axis, rule.op)


def read_counts(folder: Path, plan: Plan) -> Counted:
    """The ledgers of a run folder against its plan. Raises ValueError if files are missing or of another world size."""
    mesh = plan.layout.mesh
    ledgers = []
    for rank in range(mesh.world_size):
        path = folder / "ledger" / f"rank-{rank}.json"
        if not path.is_file():
            raise ValueError(f"{path}: missing; the run wrote no ledger for rank {rank} (it writes them at its end)")
        ledger = Ledger.load(path)
        if ledger.world_size != mesh.world_size:
            raise ValueError(f"{path}: of {ledger.world_size} ranks, but the layout has {mesh.world_size}")
        ledgers.append(ledger)
    firsts = [mesh.rank({"pp": pp}) for pp in range(mesh.size("pp"))]
    steps = max((calls for key, (calls, _) in ledgers[0].counters.items() if key[1] == "clip/step"), default=0)
    pairs = tuple(_pairs(plan, pp, ledgers[first]) for pp, first in enumerate(firsts))
    first_of = [firsts[mesh.coords(rank)["pp"]] for rank in range(mesh.world_size)]
    differ = [rank for rank, first in enumerate(first_of) if _steps_of(ledgers[rank]) != _steps_of(ledgers[first])]
    return Counted(steps, pairs, tuple(differ))


def _steps_of(ledger: Ledger) -> dict[Any, Any]:
    return {key: value for key, value in ledger.counters.items() if key[0] == "step"}


def _pairs(plan: Plan, pp: int, ledger: Ledger) -> dict[Key, Pair]:
    derived: dict[Key, tuple[int | None, int]] = {}
    for rule in plan.rules(pp):
        calls, size = derived.get(_key(rule), (0, 0))
        calls = None if calls is None or rule.calls is None else calls + rule.calls
        derived[_key(rule)] = (calls, size + rule.bytes)
    counted = {key[1:]: value for key, value in _steps_of(ledger).items()}
    keys = dict.fromkeys((*derived, *counted))
    return {key: Pair(key, *derived.get(key, (0, 0)), *counted.get(key, (0, 0))) for key in keys}
