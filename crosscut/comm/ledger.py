"""The ledger: which communications really happened on one rank. Reads and writes without torch.

Bytes are what one rank hands to a call: all_reduce, broadcast, reduce: the tensor; all_gather: the output;
reduce_scatter: the input; all_to_all: what is sent, own part included; send: the tensor; recv: 0; gather: own part;
scatter: the whole at the root, 0 elsewhere; barrier: 0. A group of one rank records nothing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = "crosscut.ledger"
VERSION = 1


class Entry(NamedTuple):
    """One call. `axis` is the group's label (`tp`, `dp+tp`, `world`), `seq` its number within the group."""

    kind: str  # "step": compared with the derived rules; "control": headers, checkpoints, evaluation
    tag: str
    axis: str
    op: str
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    reduce_op: str | None = None
    seq: int = 0
    site: str = ""


class Ledger:
    """Counts of one rank's communications, keyed (kind, tag, axis, op), and the last entries in order.

    Counters are exact however long the run; `entries` keeps the last `max_entries` calls. One ledger belongs to one
    rank: a rank issues its calls one after another, so there is no lock.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, max_entries: int = 4096) -> None:
        self.rank = rank
        self.world_size = world_size
        self.counters: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        self._last: deque[tuple[Entry, int]] = deque(maxlen=max_entries)  # with the number: calls alike share an entry
        self.all_control = False  # see `control`

    @contextmanager
    def control(self) -> Iterator[None]:
        """Within it every call counts as `control`, whatever it says: evaluation runs a step's code and is no step."""
        before, self.all_control = self.all_control, True
        try:
            yield
        finally:
            self.all_control = before

    def record(self, entry: Entry, seq: int | None = None) -> None:
        """Count one call. seq: its number, if not the entry's."""
        key = entry[:4]
        calls, num_bytes = self.counters.get(key, (0, 0))
        self.counters[key] = (calls + 1, num_bytes + entry.bytes)
        self._last.append((entry, entry.seq if seq is None else seq))

    @property
    def entries(self) -> list[Entry]:
        """The last calls, oldest first."""
        return [entry._replace(seq=seq) for entry, seq in self._last]

    def add(self, kind: str, tag: str, axis: str, op: str, calls: int, num_bytes: int) -> None:
        """Count `calls` calls of `num_bytes` in all, without entries."""
        key = (kind, tag, axis, op)
        old_calls, old_bytes = self.counters.get(key, (0, 0))
        self.counters[key] = (old_calls + calls, old_bytes + num_bytes)

    def totals(self, kind: str = "step") -> dict[str, dict[str, int]]:
        """Bytes by axis label and op: `{"tp": {"all_reduce": 37773312}}`."""
        return self._sum(kind, 1)

    def calls(self, kind: str = "step") -> dict[str, dict[str, int]]:
        """Numbers of calls by axis label and op."""
        return self._sum(kind, 0)

    def _sum(self, kind: str, field: int) -> dict[str, dict[str, int]]:
        out: dict[str, dict[str, int]] = {}
        for (entry_kind, _, axis, op), counted in self.counters.items():
            if entry_kind == kind:
                ops = out.setdefault(axis, {})
                ops[op] = ops.get(op, 0) + counted[field]
        return out

    def by_tag(self, kind: str = "step") -> dict[str, dict[tuple[str, str], tuple[int, int]]]:
        """`{tag: {(axis, op): (calls, bytes)}}`, in the order in which the tags first appeared."""
        out: dict[str, dict[tuple[str, str], tuple[int, int]]] = {}
        for (entry_kind, tag, axis, op), counted in self.counters.items():
            if entry_kind == kind:
                out.setdefault(tag, {})[(axis, op)] = counted
        return out

    def copy(self) -> Ledger:
        """A snapshot of the counters, for a later difference: `ledger - snapshot`."""
        out = Ledger(self.rank, self.world_size, self._last.maxlen or 0)
        out.counters = dict(self.counters)
        out._last = self._last.copy()
        return out

    def __sub__(self, earlier: Ledger) -> Ledger:
        """What was counted since the snapshot `earlier`. Without entries."""
        out = Ledger(self.rank, self.world_size)
        for key, (calls, num_bytes) in self.counters.items():
            old_calls, old_bytes = earlier.counters.get(key, (0, 0))
            if calls != old_calls:
                out.counters[key] = (calls - old_calls, num_bytes - old_bytes)
        return out

    @staticmethod
    def sum(ledgers: Iterable[Ledger]) -> Ledger:
        """The counters of several ranks added up."""
        out = Ledger()
        for ledger in ledgers:
            out.world_size = ledger.world_size
            for key, (calls, num_bytes) in ledger.counters.items():
                out.add(*key, calls, num_bytes)
        return out

    def clear(self) -> None:
        """Forget everything."""
        self.counters.clear()
        self._last.clear()

    def to_json(self) -> str:
        """The counters as JSON: `schema`, `version`, `rank`, `world_size`, and one of `rows` a counter."""
        rows = [
            {"kind": kind, "tag": tag, "axis": axis, "op": op, "calls": calls, "bytes": num_bytes}
            for (kind, tag, axis, op), (calls, num_bytes) in self.counters.items()
        ]
        head = {"schema": SCHEMA, "version": VERSION, "rank": self.rank, "world_size": self.world_size}
        return json.dumps({**head, "rows": rows}, indent=1)

    @staticmethod
    def from_json(text: str) -> Ledger:
        """Read what `to_json` wrote. Raises ValueError if it is something else or of a newer version."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a ledger: {error}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a ledger: schema is {found!r}, expected {SCHEMA!r}")
        if data["version"] > VERSION:
            raise ValueError(f"ledger version {data['version']} is newer than {VERSION}, which this crosscut reads")
        out = Ledger(data["rank"], data["world_size"])
        for row in data["rows"]:
            out.add(row["kind"], row["tag"], row["axis"], row["op"], row["calls"], row["bytes"])
        return out

    def save(self, path: str | Path) -> None:
        """Write `to_json()` to a file, whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(path)

    @staticmethod
    def load(path: str | Path) -> Ledger:
        """Read the file of one rank."""
        try:
            return Ledger.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
