"""Do the ranks of a group make the same call? If not, an error that says who called what and where. No torch.

Every back end compares by these functions: `threads` with the calls at hand, processes in checked mode with what they
have told each other (docs/checked.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from crosscut.comm.call import END, Call
from crosscut.comm.errors import MismatchError, ranks_text

WINDOW = 16  # calls within which another order of call sites is found


def check_same(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Raise MismatchError unless the calls, one a rank in rank order, are one collective.

    Op, group, reduction, root, dim, shape, dtype and tag must be equal; for all_to_all the shape apart from dim 0, and
    what a rank sends another must be what that one expects.
    """
    kinds = _together(call.key() for call in calls)
    if len(kinds) > 1:
        kinds.sort(key=len)  # the odd ones first: usually the culprit is the minority
        parts = []
        for indices in kinds:
            call, other = calls[indices[0]], calls[kinds[0][0] if indices is not kinds[0] else kinds[-1][0]]
            over = f" over {call.label}" if call.label != other.label and END not in (call.op, other.op) else ""
            sites = list(dict.fromkeys(calls[i].site for i in indices if calls[i].site))[:3]
            at = f" at {' and '.join(sites)}" if sites else ""
            parts.append(f"{ranks_text([ranks[i] for i in indices])} {call.did(other)}{over}{at}")
        first = next(calls[i] for i in reversed([indices[0] for indices in kinds]) if calls[i].op != END)
        raise MismatchError(f"{first.name()}: {', '.join(parts)}")
    if calls[0].input_splits is not None:
        _check_splits(calls, ranks)


def _together(keys: Iterable[Hashable]) -> list[list[int]]:
    """The indices of equal keys, together, in the order in which they come."""
    found: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return list(found.values())


def _check_splits(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            assert sender.input_splits is not None
            assert receiver.output_splits is not None
            if sender.input_splits[j] != receiver.output_splits[i]:
                raise MismatchError(
                    f"{sender.name()}: rank {ranks[i]} sends {sender.input_splits[j]} rows to rank {ranks[j]} "
                    f"(input_splits={list(sender.input_splits)} at {sender.site}), which expects "
                    f"{receiver.output_splits[i]} (output_splits={list(receiver.output_splits)} at {receiver.site})"
                )


def check_message(sent: Call, received: Call, ranks: Sequence[int], src: int, dst: int) -> None:
    """Raise MismatchError unless a message is what its receiver expects: shape, dtype, group and tag."""
    if (sent.shape, sent.dtype, sent.tag, sent.label) != (received.shape, received.dtype, received.tag, received.label):
        tags = ["", ""] if sent.tag == received.tag else [f' tagged "{call.tag}"' for call in (sent, received)]
        over = f" over {received.label}" if sent.label != received.label else ""
        raise MismatchError(
            f"send over {sent.label}: rank {ranks[src]} sent {sent.dtype} {sent.shape}{tags[0]} at {sent.site}, "
            f"rank {ranks[dst]} receives {received.dtype} {received.shape}{tags[1]}{over} at {received.site}; make "
            f"them equal"
        )


class Order:
    """The last collectives of a group, to find two that some ranks have swapped: equal in all that is compared, so that
    only the places in the code from where they were called tell them apart.

    Sites may differ between ranks (an if on the rank): that alone is no error. It is one when two ranks have made the
    same calls from the same sites in another order. Tagged calls are left out: their tags are compared.
    """

    def __init__(self) -> None:
        self._differing: deque[tuple[int, tuple[tuple[Hashable, str], ...]]] = deque()
        self._count = 0

    def same(self) -> None:
        """All ranks have made a call from one site."""
        self._count += 1

    def check(self, calls: Sequence[Call], ranks: Sequence[int]) -> None:
        """A collective, one call a rank in rank order. Raises MismatchError if it completes a swap."""
        self._count += 1
        call = calls[0]
        if call.tag or all(other.site == call.site for other in calls):
            return
        recent = self._differing
        while recent and recent[0][0] <= self._count - WINDOW:
            recent.popleft()
        recent.append((self._count, tuple((call.key(), call.site) for call in calls)))
        rows = [row for _, row in recent]
        for start in range(len(rows) - 2, -1, -1):
            made = [tuple(row[i] for row in rows[start:]) for i in range(len(ranks))]
            for alike in _together(tuple(sorted(map(repr, one))) for one in made):
                orders = _together(made[i] for i in alike)
                if len(orders) > 1:
                    told = (
                        f"{ranks_text([ranks[alike[j]] for j in same])} from "
                        f"{' then '.join(site for _, site in made[alike[same[0]]])}"
                        for same in sorted(orders, key=len)
                    )
                    raise MismatchError(
                        f"{call.name()}: the ranks make the same calls in another order: {', '.join(told)}; call them "
                        f"in one order, or give them tags"
                    )
