"""The calls of all ranks side by side: which belong together, where they first differ, and in what way. No torch.

A collective is matched by its number within its communicator, a message by its number among those of one sender to one
receiver. `first_divergence` finds the first place where ranks made different calls; what it was (a call left out, one
too many, another order, other arguments) is told from what follows, and from what the same ranks did in earlier steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from crosscut.comm.backends.matching import check_same
from crosscut.comm.errors import MismatchError, ranks_text
from crosscut.comm.wording import call_text
from crosscut.watch.reading import Record, Ring

LaneKey = tuple[tuple[int, ...], int]  # ranks, channel
MessageKey = tuple[LaneKey, int, int, int]  # lane, sender, receiver, tag
Key = tuple[Any, ...]
_AHEAD = 64  # how far behind a divergence is looked for what it was
INIT = "the world to be"  # the lane of init_process_group
_UNROOTED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def lane_key(record: Record) -> LaneKey:
    """The communicator of a record."""
    return record.lane.ranks, record.lane.channel


def message_key(record: Record) -> MessageKey:
    """The stream of messages that a send or a recv belongs to."""
    ranks = record.lane.ranks
    own, peer = record.own_rank, ranks[record.call.peer or 0] if ranks else -1
    pair = (own, peer) if record.call.op == "send" else (peer, own)
    return (lane_key(record), *pair, record.message_tag)


@dataclass
class Divergence:
    """Where ranks of one communicator first made different calls."""

    verdict: str  # "missing_call" | "order" | "mismatch"
    culprits: list[int]
    record: Record  # what the others called
    odd: Record  # what the culprit called
    sentence: str
    time: int
    after_wrap: bool = False  # an earlier difference may have been overwritten


@dataclass
class Calls:
    """The records of several ranks, matched."""

    collectives: dict[LaneKey, dict[int, dict[int, Record]]] = field(default_factory=lambda: defaultdict(dict))
    messages: dict[MessageKey, dict[int, dict[str, Record]]] = field(default_factory=lambda: defaultdict(dict))
    last: dict[tuple[LaneKey, int], int] = field(default_factory=dict)  # (lane, rank) -> its last collective's number

    @staticmethod
    def of(rings: Mapping[int, Ring]) -> Calls:
        """Match everything that the rings hold."""
        out = Calls()
        for rank, ring in rings.items():
            out.add(rank, ring.records)
            for lane, seq in ring.last_seq.items():
                key = (lane.ranks, lane.channel), rank
                out.last[key] = max(seq, out.last.get(key, 0))
        return out

    def add(self, rank: int, records: Iterable[Record]) -> None:
        """Take in records of one rank."""
        for record in records:
            if record.call.peer is not None and record.call.peer < 0:
                continue  # a recv from any rank: which message it took is not known
            if record.call.peer is not None:
                self.messages[message_key(record)].setdefault(record.call.seq, {})[record.call.op] = record
            else:
                key = lane_key(record)
                self.collectives[key].setdefault(record.call.seq, {})[rank] = record
                self.last[key, rank] = max(record.call.seq, self.last.get((key, rank), 0))

    def absent(self, record: Record) -> list[int]:
        """The global ranks that a call still waits for: members that have not come to it, or the peer of a message."""
        if record.call.peer is None:
            key = lane_key(record)
            return [rank for rank in record.lane.ranks if self.last.get((key, rank), 0) < record.call.seq]
        if record.call.peer < 0:
            return []
        other = "recv" if record.call.op == "send" else "send"
        both = self.messages.get(message_key(record), {}).get(record.call.seq, {})
        return [] if other in both or not record.lane.ranks else [record.lane.ranks[record.call.peer]]

    def first_divergence(self, wrapped: Iterable[int] = ()) -> Divergence | None:
        """The first place, in time, where ranks made different calls. `wrapped`: ranks whose ring has overwritten."""
        found = [one for key in self.collectives if (one := self._in_lane(key, set(wrapped)))]
        found += [one for key in self.messages if (one := self._in_messages(key))]
        return min(found, key=lambda one: one.time, default=None)

    def _in_lane(self, key: LaneKey, wrapped: set[int]) -> Divergence | None:
        by_seq = self.collectives[key]
        numbers = sorted(seq for seq, ranks in by_seq.items() if len(ranks) > 1)
        at = next((seq for seq in numbers if not _equal(by_seq[seq])), None) or self._swapped_sites(key, numbers)
        if at is None:
            return None
        at = self._lone_site(key, [seq for seq in numbers if seq < at]) or at
        here = by_seq[at]
        ranks = sorted(here)
        told = _Tellable(by_seq, at, ranks)
        odd, normal = told.split()
        after_wrap = at == numbers[0] and at > 1 and bool(wrapped & set(ranks))
        time = max(record.entered for record in here.values())
        culprit, other = here[odd[0]], here[normal[0]]
        verdict, sentence = told.kind(odd, normal)
        if not told.certain:
            sentence += f" (which of ranks {','.join(map(str, ranks))} is right cannot be told from two)"
        return Divergence(verdict, odd, other, culprit, sentence, time, after_wrap)

    def _swapped_sites(self, key: LaneKey, numbers: list[int]) -> int | None:
        """Where two calls that look alike were made in the other order: told from the sites, if other steps pair each
        site with itself. (Ranks may rightly take part in one collective from different lines.)
        """
        by_seq = self.collectives[key]
        paired: set[tuple[str, str]] = set()  # (tag, site) that all ranks came from together
        mixed = []
        for seq in numbers:
            places = {(record.call.tag, record.call.site) for record in by_seq[seq].values()}
            if len(places) == 1:
                paired |= places
            elif next(iter(by_seq[seq].values())).call.op in _UNROOTED:
                mixed.append((seq, places))
        for index, (seq, places) in enumerate(mixed):
            if places <= paired and any(later == places for _, later in mixed[index + 1 : index + 3]):
                return seq
        return None

    def _lone_site(self, key: LaneKey, numbers: list[int]) -> int | None:
        """Where, before ranks differed, one of them had come from a line from which none comes otherwise, while the
        others came from one that ranks share in other steps: a call too many that looks like the one it took the place
        of, so that it shows only later.
        """
        by_seq = self.collectives[key]
        places = {seq: {rank: (r.call.tag, r.call.site) for rank, r in by_seq[seq].items()} for seq in numbers}
        shared = {next(iter(here.values())) for here in places.values() if len(set(here.values())) == 1}
        lone = {seq: [rank for rank, place in here.items() if place not in shared] for seq, here in places.items()}
        found = [seq for seq, ranks in lone.items() if ranks and len(ranks) < len(places[seq])]
        ranks = {rank for seq in found for rank in lone[seq]}
        return found[0] if found and len(ranks) == 1 else None

    def _in_messages(self, key: MessageKey) -> Divergence | None:
        for _, both in sorted(self.messages[key].items()):
            if len(both) < 2:
                continue
            sent, received = both["send"], both["recv"]
            if (_numel(sent), sent.call.dtype) != (_numel(received), received.call.dtype):
                _, src, dst, _ = key
                sentence = (
                    f"rank {src} sends {sent.call.dtype} {sent.call.shape} in {text(sent)}, which rank {dst} receives "
                    f"as {received.call.dtype} {received.call.shape} in {text(received)}"
                )
                time = max(sent.entered, received.entered)
                return Divergence("mismatch", [dst, src], sent, received, sentence, time)
        return None


class _Tellable:
    """What can be told about the different calls that `ranks` made as number `at` of one communicator."""

    def __init__(self, by_seq: Mapping[int, Mapping[int, Record]], at: int, ranks: list[int]) -> None:
        self.by_seq, self.at, self.ranks = by_seq, at, ranks
        self.certain = True
        self.earlier = False  # only earlier steps tell who is odd
        self.next: dict[Key, Counter[Key]] = defaultdict(Counter)  # what followed what, while all agreed
        before: Key | None = None
        for seq in sorted(seq for seq in by_seq if seq < at):
            key = _full(next(iter(by_seq[seq].values())))
            if before is not None:
                self.next[before][key] += 1
            before = key
        self.before = before

    def split(self) -> tuple[list[int], list[int]]:
        """The odd ranks and the normal ones: told from earlier steps, else the minority is odd."""
        groups: dict[Key, list[int]] = defaultdict(list)
        for rank in self.ranks:
            groups[_full(self.by_seq[self.at][rank])].append(rank)
        if len(groups) == 1:  # an exchange whose splits disagree
            splits = {rank: self._splits(rank) for rank in self.ranks}
            most, number = Counter(splits.values()).most_common(1)[0]
            self.certain = number > len(self.ranks) - number
            odd = [rank for rank in self.ranks if splits[rank] != most] or self.ranks[-1:]
            return odd, [rank for rank in self.ranks if rank not in odd]
        usual = self.next.get(self.before, Counter()) if self.before is not None else Counter()
        known = [key for key in groups if usual[key]]
        sizes = sorted(len(members) for members in groups.values())
        if known and len(known) < len(groups):
            best = max(known, key=lambda key: (usual[key], len(groups[key])))
            self.earlier = 2 * len(groups[best]) <= len(self.ranks)
        elif sizes[-1] > sizes[-2] if len(sizes) > 1 else True:
            best = max(groups, key=lambda key: len(groups[key]))
        else:
            self.certain = False
            best = _full(self.by_seq[self.at][self.ranks[0]])
        odd = sorted(rank for key, members in groups.items() if key != best for rank in members)
        return odd or [self.ranks[-1]], groups[best]

    def _splits(self, rank: int) -> tuple[object, ...]:
        """What a rank says of its exchange that another would say alike."""
        call = self.by_seq[self.at][rank].call
        return call.input_splits, call.output_splits

    def kind(self, odd: list[int], normal: list[int]) -> tuple[str, str]:
        """The verdict and the sentence."""
        theirs, own = self.by_seq[self.at][normal[0]], self.by_seq[self.at][odd[0]]
        who, others = ranks_text(tuple(odd)), ranks_text(tuple(normal))
        told = f"; in earlier steps {who} called what {others} called" if self.earlier else ""
        if own.call.site == theirs.call.site and own.call.tag == theirs.call.tag:
            return "mismatch", self._mismatch() + told
        a, b = self._following(odd[0]), self._following(normal[0])
        skipped, extra = _shift(b, a), _shift(a, b)
        permuted = next((k for k in range(2, 9) if len(a) >= k <= len(b) and sorted(a[:k]) == sorted(b[:k])), 0)
        if not (skipped or extra or permuted):  # too little has followed: earlier steps have to tell
            skipped = next((k for k in range(1, len(b)) if b[k] == a[0]), 0)
            skipped = skipped or int(self.next.get(_full(theirs), Counter())[_full(own)] > 0)
            usual = self.next.get(self.before or (), Counter())  # a call that is made now and then: all or none make it
            skipped = skipped or int(usual[_full(own)] > 0 and usual[_full(theirs)] > 0)
        number = f"#{self.at}"
        shortest = min((k for k in (skipped, extra, permuted) if k), default=0)  # a loop fits many ways: the least
        if skipped and skipped == shortest:
            few = f" and {skipped - 1} more" if skipped > 1 else ""
            return "missing_call", (
                f"{others} called {text(theirs)}; {who} never made that call{few}: as {number} of this group it called "
                f"{text(own)}"
            )
        if extra and extra == shortest:
            return "order", f"{who} made a call too many, {text(own)}; as {number} {others} called {text(theirs)}"
        if permuted or own.call.key() == theirs.call.key():
            differs = f"the order differs on {who} since {number}"
            return "order", f"{differs}: there it called {text(own)}, {others} {text(theirs)}"
        if own.call.op != theirs.call.op and self.next.get(self.before or (), Counter())[_full(theirs)]:
            return "order", f"{who} called {text(own)} as {number}, where {others} called {text(theirs)}"
        return "mismatch", self._mismatch() + told

    def _mismatch(self) -> str:
        here = self.by_seq[self.at]
        try:
            check_same([here[rank].call for rank in self.ranks], self.ranks)
        except MismatchError as error:
            return str(error)
        return f"the calls differ at #{self.at}"

    def _following(self, rank: int) -> list[Key]:
        """What the rank called from here on."""
        out = []
        for seq in range(self.at, self.at + _AHEAD):
            record = self.by_seq.get(seq, {}).get(rank)
            if record is None:
                break
            out.append(_full(record))
        return out


def text(record: Record) -> str:
    """The call of a record, as everywhere."""
    if record.lane.label == INIT:  # it has no group yet
        return f"{record.call.op}, at {record.call.site}"
    return call_text(record.call, record.lane.ranks)


def _shift(longer: list[Key], shorter: list[Key]) -> int:
    """How many calls must be taken off `longer` to make the two alike; 0 if that does not."""
    for k in range(1, min(9, len(longer))):
        overlap = min(len(longer) - k, len(shorter))
        if overlap >= 2 and longer[k : k + overlap] == shorter[:overlap]:
            return k
    return 0


def _equal(here: Mapping[int, Record]) -> bool:
    calls = [here[rank].call for rank in sorted(here)]
    key = calls[0].key()
    if any(call.key() != key for call in calls[1:]):
        return False
    if calls[0].input_splits is None or len(here) < len(next(iter(here.values())).lane.ranks):
        return True
    try:
        check_same(calls, sorted(here))
    except MismatchError:
        return False
    return True


def _full(record: Record) -> Key:
    """What tells one call of a program from another: what must be equal on all ranks, and where it was made."""
    return tuple(map(str, (*record.call.key(), record.call.tag, record.call.site)))


def _numel(record: Record) -> int:
    out = 1
    for extent in record.call.shape:
        out *= extent
    return out
