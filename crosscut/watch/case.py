"""What is known of all ranks together, and the phrases that every verdict is made of. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping

from crosscut.comm.errors import one_line, ranks_text
from crosscut.comm.wording import waits_text
from crosscut.watch.facts import Facts, Verdict
from crosscut.watch.lanes import Calls, Divergence, lane_key, text
from crosscut.watch.reading import Record, Ring

Waits = Mapping[int, tuple[Record, list[int]]]  # rank -> (the call that it waits in, for whom)


class Case:
    """The facts of all ranks, their calls matched, and what each has not finished."""

    def __init__(self, facts: Mapping[int, Facts], world_size: int) -> None:
        self.facts, self.world_size = facts, world_size
        self.rings: dict[int, Ring] = {rank: fact.ring for rank, fact in facts.items() if fact.ring is not None}
        self.calls = Calls.of(self.rings)
        self.open = {
            rank: [record for record in ring.records if not record.completed] for rank, ring in self.rings.items()
        }

    def waits(self) -> dict[int, tuple[Record, list[int]]]:
        """rank -> (the call that it waits in, for whom)."""
        out = {}
        for rank, records in self.open.items():
            candidates = [(record, self.calls.absent(record)) for record in records]
            candidates = [(record, absent) for record, absent in candidates if absent]
            blocking = [one for one in candidates if not one[0].is_async or one[0].waiting]
            if blocking or candidates:
                out[rank] = (blocking or candidates)[-1 if blocking else 0]
        return out

    def verdict(
        self,
        verdict: str,
        sentence: str,
        culprits: list[int],
        record: Record | None,
        evidence: list[str],
        found: Divergence | None = None,
    ) -> Verdict:
        evidence = [*evidence, *self.folded(culprits), *self.caveats()]
        if record is None:
            return Verdict(verdict, sentence, culprits, evidence=evidence)
        call = record.call
        site = found.odd.call.site if found is not None else call.site
        return Verdict(verdict, sentence, culprits, call.label or None, call.op, call.seq, site, evidence)

    def waiting_sentence(self, record: Record, waits: Waits) -> str:
        who = sorted(
            rank
            for rank, (other, _) in waits.items()
            if lane_key(other) == lane_key(record)
            and other.call.seq == record.call.seq
            and other.call.op == record.call.op
        )
        return f"{waits_text(who, text(record))} since {self.clock(record, began(record))}"

    def who_waits(self, culprits: list[int]) -> list[str]:
        return [line for rank, line in self.wait_lines(self.waits()) if rank not in culprits][:4]

    def all_waits(self, waits: Waits) -> list[str]:
        return [line for _, line in self.wait_lines(waits)][:16]

    def wait_lines(self, waits: Waits) -> list[tuple[int, str]]:
        out = []
        for rank, (record, absent) in sorted(waits.items()):
            since = self.clock(record, began(record))
            out.append((rank, f"{waits_text([rank], text(record))} for {ranks_text(tuple(absent))} since {since}"))
        return out

    def stacks(self, ranks: list[int]) -> list[str]:
        stacks = {rank: self.facts[rank].stack[:5] for rank in ranks if rank in self.facts}
        return [f"rank {rank} at {' < '.join(stack)}" for rank, stack in stacks.items() if stack][:4]

    def folded(self, culprits: list[int]) -> list[str]:
        others = [
            f"rank {rank}: {one_line(fact.failure.said, 160)}"
            for rank, fact in sorted(self.facts.items())
            if fact.failure is not None and rank not in culprits
        ]
        return [*others[:2], *([f"and {len(others) - 2} more like it"] if len(others) > 2 else [])]

    def caveats(self) -> list[str]:
        broken = {rank: ring.half_written for rank, ring in self.rings.items() if ring.half_written}
        return [f"rank {rank}: {count} record(s) were half written" for rank, count in broken.items()]

    def wall(self, record: Record, time_ns: int) -> float:
        return self.rings[record.own_rank].wall(time_ns)

    def clock(self, record: Record, time_ns: int) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self.wall(record, time_ns)))


def began(record: Record) -> int:
    """When the rank began to wait in a call."""
    return record.waiting or record.entered
