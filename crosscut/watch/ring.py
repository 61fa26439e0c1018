"""One rank's ledger as a file in memory: a ring of its last calls, and totals that never wrap. No torch.

The file is mapped into memory, so that what was written survives whatever ends the process, and another process can
read it live. Nothing is locked: a record carries its number at both ends, and a reader takes it only if both are the
number it looks for. What is the same in every step (op, tag, site, shape, ...) is written once, as text, to which a
record refers. The text area has two halves that are filled in turn, so that programs whose shapes change for ever do
not fill it.

    header (4096 bytes) | capacity records of 64 bytes | two halves of text | lanes (text) | totals (256 bytes a rule) |
    the last sequence number of every lane

The totals and the last numbers are written now and then, at the latest when half of the ring is: with a total stands up
to which record it counts, and a reader adds the records after that. So a call writes one record and its number.

Times are nanoseconds of the monotonic clock, which the processes of one host share.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns as now
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosscut.comm.call import Call

MAGIC = b"crosscut"
FORMAT_VERSION = 2
HEADER_BYTES = 4096
RECORD = struct.Struct("<QQqqQQQQ")  # number, text, seq, step, entered, waiting, completed, number
HEAD = struct.Struct("<8sIIIIIIQQQQq")  # magic .. signal; capacity, half, start (wall, monotonic), clock offset
COUNTS = struct.Struct("<QQQQ")  # entered, text position, lanes position, number of totals
LIFE = struct.Struct("<IiQQQ")  # ended, exit code, section since, section limit (ms), start of the process (ticks)
TOTAL = struct.Struct("<QQQH")  # calls, bytes, up to which record; length of the text that follows
AT_COUNTS, AT_LIFE, AT_HOST, AT_SECTION, AT_DEVICE = 128, 192, 256, 384, 512
TOTAL_BYTES, NUM_TOTALS, LANE_BYTES, NUM_LANES = 256, 512, 1 << 17, 4096
RUNNING, FINISHED, FAILED = 0, 1, 2
SET_UP = "set-up"  # the section that a rank is in until its first call is done
LENGTH = struct.Struct("<H")
_pack, _pack_total = RECORD.pack_into, struct.Struct("<QQQ").pack_into
_HEAD, _WAITING, _COMPLETED = AT_COUNTS // 8, HEADER_BYTES // 8 + 5, HEADER_BYTES // 8 + 6  # words, the last of slot 0
_WORD = 64  # bytes of a short text in the header: its length, then itself


class Mark:
    """What is the same in every call of one kind. text: its place, -1 before it is written; total: calls, bytes and
    place of its rule; last: the last number of its lane, or of its stream of messages.
    """

    __slots__ = ("is_message", "key", "last", "num_bytes", "text", "total")

    def __init__(
        self, key: tuple[Any, ...], num_bytes: int, total: list[int], last: list[int], is_message: bool
    ) -> None:
        self.key, self.num_bytes, self.total, self.last, self.is_message = key, num_bytes, total, last, is_message
        self.text = -1


class RingWriter:
    """The recorder of one rank.

    Raises ValueError if the file cannot be made (the disk is full, the folder is read-only). The space is reserved at
    once: a map into a file that the disk has no room for would kill the process later.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int,
        world_size: int,
        *,
        capacity: int = 4096,
        signal: int = 0,
        device: str = "cpu",
    ) -> None:
        self.path, self.rank, self.world_size = Path(path), rank, world_size
        self.step = 0  # of the optimizer: every record carries it
        self.ended = False
        self._capacity, self._half = capacity, max(1 << 12, 128 * capacity)
        self._text = HEADER_BYTES + capacity * RECORD.size
        self._lanes = self._text + 2 * self._half
        self._totals = self._lanes + LANE_BYTES
        self._last = (self._totals + NUM_TOTALS * TOTAL_BYTES) // 8
        size = 8 * (self._last + NUM_LANES)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # whoever reads the old one keeps it
            with self.path.open("w+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.write(bytes(size))
                    file.flush()
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ValueError(
                f"{path}: the recorder cannot make its file ({error.strerror}); give another run folder"
            ) from None
        self._head = self._text_at = self._oldest = self._lanes_at = self._num_totals = 0
        self._next_count = capacity // 2
        self._known: dict[tuple[Any, ...], Mark] = {}
        self._streams: dict[tuple[int, str, int, int], list[int]] = {}  # of messages -> [how many]
        self._numbers: list[list[int]] = []  # of every lane: [its last]
        self._learning = threading.Lock()
        self._rules: dict[tuple[str, str, str, str], list[int]] = {}  # -> [calls, bytes, offset]
        self._lane_ids: dict[tuple[str, tuple[int, ...], int], int] = {}
        self._labels: list[str] = []
        self._words = memoryview(self._map).cast("Q")  # an assignment to it is the cheapest write there is
        self._word(AT_HOST, socket.gethostname())
        self._word(AT_DEVICE, device)
        LIFE.pack_into(self._map, AT_LIFE, RUNNING, 0, 0, 0, process_start(os.getpid()))
        HEAD.pack_into(
            *(self._map, 0, MAGIC, FORMAT_VERSION, RECORD.size, rank, world_size, os.getpid(), signal),
            *(capacity, self._half, time.time_ns(), now(), 0),
        )

    def lane(self, label: str, ranks: Sequence[int], channel: int = 0) -> int:
        """The number under which calls of one communicator are recorded. `ranks`: its global ranks, in its order."""
        key = (label, tuple(ranks), channel)
        if key not in self._lane_ids:
            data = json.dumps([label, compress(key[1]), channel]).encode()
            if self._lanes_at + len(data) + 2 > LANE_BYTES:  # thousands of groups: their calls are told without ranks
                data = json.dumps([label, [], channel]).encode()[: LANE_BYTES - self._lanes_at - 2]
            at = self._lanes + self._lanes_at
            self._map[at + 2 : at + 2 + len(data)] = data
            LENGTH.pack_into(self._map, at, len(data))
            self._lanes_at += len(data) + 2
            self._lane_ids[key] = len(self._lane_ids)
            self._labels.append(label)
            self._numbers.append([0])
            self._counts()
        return self._lane_ids[key]

    def mark(self, lane: int, call: Call, num_bytes: int, is_async: bool = False, message_tag: int = 0) -> Mark:
        """What `begin` needs to record calls like this one, whatever their number."""
        op, _, tag, kind, site, _, shape, dtype, by, root, dim, ins, outs, peer = call
        more = (dim, ins, outs, message_tag, is_async)
        key = (lane, op, num_bytes, site, shape, dtype, by, root, peer, tag, kind, *more)
        return self._known.get(key) or self._learn(key)

    def begin(self, mark: Mark, seq: int) -> int:
        """Record that a call is made; returns its number, for `complete`. seq: its number in its group; messages are
        numbered here, those of one sender to one receiver (and of one `message_tag`) together.

        Threads need no lock: Python changes them where functions are called or loops turn, and no such place stands
        between reading a number and writing the next one.
        """
        if mark.text < self._oldest:
            self._write(mark)
        last, total = mark.last, mark.total
        if mark.is_message:
            seq = last[0] + 1
        last[0] = seq
        self._head = number = self._head + 1
        at = HEADER_BYTES + (number - 1) % self._capacity * 64
        _pack(self._map, at, number, mark.text, seq, self.step, now(), 0, 0, number)
        self._words[_HEAD] = number
        total[0] += 1
        total[1] += mark.num_bytes
        if number >= self._next_count:
            self._count()
        return number

    def _count(self) -> None:
        """Write the totals and the last numbers, before the records that tell them are overwritten."""
        self._next_count = self._head + self._capacity // 2
        for calls, num_bytes, at in list(self._rules.values()):
            _pack_total(self._map, at, calls, num_bytes, self._head)
        for lane, last in enumerate(self._numbers[:NUM_LANES]):
            self._words[self._last + lane] = last[0]

    def enter(self, lane: int, call: Call, num_bytes: int, is_async: bool = False, message_tag: int = 0) -> int:
        """`mark` and `begin` in one."""
        return self.begin(self.mark(lane, call, num_bytes, is_async, message_tag), call.seq)

    @property
    def entered(self) -> int:
        """Calls so far."""
        return self._head

    def inside(self) -> bool:
        """Whether one of the last calls is not done."""
        last = range(max(1, self._head - 7), self._head + 1)
        return any(not self._words[_COMPLETED + (n - 1) % self._capacity * 8] for n in last)

    def waits(self, number: int) -> None:
        """Record that the rank waits for an async call from now on."""
        if self._head - number < self._capacity:
            self._words[_WAITING + (number - 1) % self._capacity * 8] = now()

    def complete(self, number: int) -> None:
        """Record that a call is done. Without effect for one that the ring has overwritten."""
        if self._head - number < self._capacity:
            self._words[_COMPLETED + (number - 1) % self._capacity * 8] = now()

    def section(self, name: str, limit_s: float = 0.0) -> None:
        """Say that the rank is in a part of the program with a time limit of its own; "" ends it."""
        self._word(AT_SECTION, name)
        struct.pack_into("<QQ", self._map, AT_LIFE + 8, now(), int(limit_s * 1000))

    def device(self, name: str) -> None:
        """Say what the rank computes on: "cpu" or "cuda"."""
        self._word(AT_DEVICE, name)

    def align(self, offset_ns: int) -> None:
        """Set what is added to this rank's clock to compare it with rank 0's."""
        struct.pack_into("<q", self._map, HEAD.size - 8, offset_ns)

    def end(self, exit_code: int) -> None:
        """Say that the program has ended by itself."""
        self.ended = True
        struct.pack_into("<Ii", self._map, AT_LIFE, FAILED if exit_code else FINISHED, exit_code)

    def _learn(self, key: tuple[Any, ...]) -> Mark:
        lane, op, num_bytes, _, _, _, _, _, peer, tag, kind, *more = key
        with self._learning:
            rule = (kind, tag, self._labels[lane], op)
            if rule not in self._rules:
                self._rules[rule] = self._new_total(rule)
            last = self._numbers[lane] if peer is None else self._streams.setdefault((lane, op, peer, more[3]), [0])
            mark = self._known[key] = Mark(key, num_bytes, self._rules[rule], last, peer is not None)
        return mark

    def _write(self, mark: Mark) -> None:
        """Write a call's text, where it can be read until the ring has forgotten the call."""
        lane, op, num_bytes, site, _, dtype, reduce_op, root, peer, _tag, kind, *more = mark.key
        rule = (mark.total[2] - self._totals) // TOTAL_BYTES
        usual = not any(more) and more[1] is None
        data = json.dumps([rule, *(mark.key[: -len(more)] if usual else mark.key)]).encode()
        if len(data) + 2 > self._half:
            data = json.dumps([rule, lane, op, num_bytes, site, (), dtype, reduce_op, root, peer, "", kind]).encode()
        with self._learning:
            if self._text_at // self._half != (self._text_at + len(data) + 1) // self._half:
                self._oldest = self._text_at = -(-self._text_at // self._half) * self._half
                self._known.clear()  # the other half is overwritten: all texts are written again
            at = self._text + self._text_at % (2 * self._half)
            self._map[at + 2 : at + 2 + len(data)] = data
            LENGTH.pack_into(self._map, at, len(data))
            mark.text = self._text_at
            self._text_at += len(data) + 2
            self._counts()

    def _new_total(self, rule: tuple[str, str, str, str]) -> list[int]:
        if self._num_totals >= NUM_TOTALS - 1:  # the last one counts everything that has no place of its own
            rule = ("other", "", "", "")
            if rule in self._rules:
                return self._rules[rule]
        at = self._totals + self._num_totals * TOTAL_BYTES
        kind, tag, label, op = rule
        room = TOTAL_BYTES - TOTAL.size - len(json.dumps([kind, "", label[:64], op]).encode())
        while len(json.dumps(tag).encode()) - 2 > room:
            tag = tag[: len(tag) // 2]
        data = json.dumps([kind, tag, label[:64], op]).encode()
        self._map[at + TOTAL.size : at + TOTAL.size + len(data)] = data
        TOTAL.pack_into(self._map, at, 0, 0, 0, len(data))
        self._num_totals += 1
        self._counts()
        total = self._rules[rule] = [0, 0, at]
        return total

    def _counts(self) -> None:
        COUNTS.pack_into(self._map, AT_COUNTS, self._head, self._text_at, self._lanes_at, self._num_totals)

    def _word(self, at: int, word: str) -> None:
        data = word.encode()[: _WORD - 1]
        self._map[at : at + _WORD] = bytes([len(data)]) + data.ljust(_WORD - 1, b"\0")


def process_start(pid: int) -> int:
    """When a process began, in ticks since boot: tells it from a later one of the same number. 0 where unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def compress(ranks: Sequence[int]) -> Any:
    """Ranks as JSON: evenly spaced ones of a large group as `{"first": 0, "step": 8, "count": 128}`, else the list."""
    step = ranks[1] - ranks[0] if len(ranks) > 32 else 0
    if step > 0 and all(b - a == step for a, b in pairwise(ranks)):
        return {"first": ranks[0], "step": step, "count": len(ranks)}
    return list(ranks)
