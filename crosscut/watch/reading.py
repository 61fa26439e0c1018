"""Read the ring of one rank, also while it is written. No torch."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from crosscut.comm.call import Call
from crosscut.watch import ring as layout
from crosscut.watch.ring import COUNTS, HEAD, HEADER_BYTES, LIFE, RECORD, TOTAL

_HALF = "half written: its rank has ended, or is, before its recorder had started"


class Lane(NamedTuple):
    """One communicator: its label (`dp`), its global ranks in its order, and its channel among several of the same."""

    label: str
    ranks: tuple[int, ...]
    channel: int = 0


class Record(NamedTuple):
    """One call of one rank. Times in nanoseconds on rank 0's clock; `waiting`, `completed`: 0 if not (yet)."""

    number: int  # among all calls of the rank, from 1
    lane: Lane
    call: Call
    bytes: int
    step: int
    entered: int
    waiting: int
    completed: int
    message_tag: int = 0
    is_async: bool = False
    own_rank: int = 0


@dataclass
class Ring:
    """What the file of one rank says."""

    path: Path
    rank: int
    world_size: int
    pid: int = 0
    host: str = ""
    device: str = "cpu"
    signal: int = 0  # on which the rank writes its stack
    process_start: int = 0
    start_wall_ns: int = 0
    start_ns: int = 0
    offset_ns: int = 0
    entered: int = 0  # calls so far
    ended: int = layout.RUNNING
    exit_code: int = 0
    section: str = ""
    section_since: int = 0
    section_limit_s: float = 0.0
    records: list[Record] = field(default_factory=list)  # the last ones, oldest first
    last_seq: dict[Lane, int] = field(default_factory=dict)  # of every lane: its last collective
    half_written: int = 0  # records that were being written when the file was read, or the process killed
    totals: dict[tuple[str, str, str, str], tuple[int, int]] = field(default_factory=dict)  # if all records were read

    @property
    def wrapped(self) -> bool:
        """Whether calls have been overwritten: the records do not reach back to the first."""
        return self.entered > len(self.records) + self.half_written

    def wall(self, time_ns: int) -> float:
        """A record's time as seconds since 1970."""
        return (self.start_wall_ns + time_ns - self.offset_ns - self.start_ns) / 1e9


class RingFile:
    """An open ring: `head()` costs microseconds, `read()` takes the records too.

    Raises ValueError, one line, for a file that is no ring, of a newer version, or half written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.inode = os.fstat(file.fileno()).st_ino
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError:  # an empty file cannot be mapped
            raise ValueError(f"{path}: {_HALF}") from None
        first = self._map[:HEADER_BYTES]
        if len(first) < HEADER_BYTES or first[:8] == bytes(8):
            raise ValueError(f"{path}: {_HALF}")
        if first[:8] != layout.MAGIC:
            raise ValueError(f"{path}: not a ledger of crosscut")
        version = HEAD.unpack_from(first)[1]
        if version > layout.FORMAT_VERSION:
            raise ValueError(f"{path}: format_version {version} is newer than {layout.FORMAT_VERSION}; update crosscut")
        if version < layout.FORMAT_VERSION:
            raise ValueError(f"{path}: format_version {version} is from before crosscut 0.1, which cannot read it")
        capacity, half = HEAD.unpack_from(first)[7:9]
        fixed = layout.LANE_BYTES + layout.NUM_TOTALS * layout.TOTAL_BYTES + layout.NUM_LANES * 8
        whole = HEADER_BYTES + capacity * RECORD.size + 2 * half + fixed
        if len(self._map) < whole:
            raise ValueError(f"{path}: cut short ({len(self._map)} of {whole} bytes); copy the whole file again")

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()

    def head(self) -> Ring:
        """The header."""
        return self._header(self._map)

    def read(self, after: int = 0) -> Ring:
        """Everything, or the records with a number above `after`."""
        data = self._map
        out = self._header(data)
        *_, capacity, half, _, _, _ = HEAD.unpack_from(data)
        text = HEADER_BYTES + capacity * RECORD.size
        lanes = _lanes(data, text + 2 * half)
        text_at = COUNTS.unpack_from(data, layout.AT_COUNTS)[1]
        oldest = (text_at // half - 1) * half
        known: dict[int, list[Any] | None] = {}
        place = text + 2 * half + layout.LANE_BYTES
        num_totals = COUNTS.unpack_from(data, layout.AT_COUNTS)[3]
        totals = [_Total(data, place + i * layout.TOTAL_BYTES) for i in range(num_totals)]
        for number in range(max(1, after + 1, out.entered - capacity + 1), out.entered + 2):
            fields = RECORD.unpack_from(data, HEADER_BYTES + (number - 1) % capacity * RECORD.size)
            if fields[0] != number or fields[7] != number:
                out.half_written += number <= out.entered
                continue
            at = fields[1]
            if at not in known:
                known[at] = _details(data, text + at % (2 * half)) if oldest <= at <= text_at else None
            details = known[at]
            if details is None or details[1] >= len(lanes):
                out.half_written += 1
                continue
            record = _record(number, fields, details[1:], lanes, out)
            out.records.append(record)
            out.entered = max(out.entered, number)
            if record.call.peer is None:
                out.last_seq[record.lane] = record.call.seq
            if details[0] < len(totals):
                totals[details[0]].add(number, record.bytes)
        for total in totals:
            if total.rule is not None:
                old = out.totals.get(total.rule, (0, 0))  # long tags may be equal where they were cut off
                out.totals[total.rule] = (old[0] + total.calls, old[1] + total.bytes)
        numbers = f"<{min(len(lanes), layout.NUM_LANES)}Q"
        written = struct.unpack_from(numbers, data, place + layout.NUM_TOTALS * layout.TOTAL_BYTES)
        for lane, seq in zip(lanes, written, strict=False):
            out.last_seq[lane] = max(seq, out.last_seq.get(lane, 0))
        return out

    def _header(self, data: mmap.mmap) -> Ring:
        head = HEAD.unpack_from(data)
        counts = COUNTS.unpack_from(data, layout.AT_COUNTS)
        ended, exit_code, since, limit_ms, started = LIFE.unpack_from(data, layout.AT_LIFE)
        return Ring(
            path=self.path,
            rank=head[3],
            world_size=head[4],
            pid=head[5],
            signal=head[6],
            start_wall_ns=head[9],
            start_ns=head[10],
            offset_ns=head[11],
            host=_word(data, layout.AT_HOST),
            device=_word(data, layout.AT_DEVICE),
            entered=counts[0],
            ended=ended,
            exit_code=exit_code,
            process_start=started,
            section=_word(data, layout.AT_SECTION),
            section_since=since,
            section_limit_s=limit_ms / 1000,
        )


def read_ring(path: str | Path) -> Ring:
    """The ring of one rank. Raises ValueError as `RingFile` does."""
    file = RingFile(path)
    try:
        return file.read()
    finally:
        file.close()


def _word(data: mmap.mmap, at: int) -> str:
    return data[at + 1 : at + 1 + data[at]].decode(errors="replace")


def _lanes(data: mmap.mmap, at: int) -> list[Lane]:
    out = []
    end = at + COUNTS.unpack_from(data, layout.AT_COUNTS)[2]
    while at < end:
        length = layout.LENGTH.unpack_from(data, at)[0]
        try:
            label, ranks, channel = json.loads(data[at + 2 : at + 2 + length])
        except ValueError:
            label, ranks, channel = "?", [], 0
        if isinstance(ranks, dict):
            ranks = range(ranks["first"], ranks["first"] + ranks["step"] * ranks["count"], ranks["step"])
        out.append(Lane(label, tuple(ranks), channel))
        at += length + 2
    return out


def _details(data: mmap.mmap, at: int) -> list[Any] | None:
    """The text of a record, its rule first; None if it is not whole."""
    length = layout.LENGTH.unpack_from(data, at)[0]
    try:
        value = json.loads(data[at + 2 : at + 2 + length])
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def _record(number: int, fields: tuple[int, ...], details: list[Any], lanes: list[Lane], ring: Ring) -> Record:
    lane, op, num_bytes, site, shape, dtype, reduce_op, root, peer, tag, kind, *more = details
    dim, ins, outs, message_tag, is_async = [*more, None, None, None, None, None][:5]
    _, _, seq, step, entered, waiting, completed, _ = fields
    offset = ring.offset_ns
    call = Call(
        *(op, lanes[lane].label, tag, kind, site, seq, tuple(shape), dtype, reduce_op, root, dim),
        *(None if ins is None else tuple(ins), None if outs is None else tuple(outs), peer),
    )
    times = (entered + offset, waiting and waiting + offset, completed and completed + offset)
    return Record(number, lanes[lane], call, num_bytes, step, *times, message_tag or 0, bool(is_async), ring.rank)


class _Total:
    """Calls and bytes of one rule (None if its text is not whole), as far as they were written, and then counted."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.calls, self.bytes, self._up_to, length = TOTAL.unpack_from(data, at)
        self.rule: tuple[str, str, str, str] | None = None
        with contextlib.suppress(ValueError):
            kind, tag, label, op = json.loads(data[at + TOTAL.size : at + TOTAL.size + length])
            self.rule = kind, tag, label, op

    def add(self, number: int, num_bytes: int) -> None:
        """Count a record, unless it was."""
        if number > self._up_to:
            self.calls, self.bytes = self.calls + 1, self.bytes + num_bytes
