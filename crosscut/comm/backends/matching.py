"""Do the ranks of a group make the same call? If not, an error that says who called what and where. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from crosscut.comm.call import Call
from crosscut.comm.errors import MismatchError, ranks_text


def check_same(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Raise MismatchError unless the calls, one a rank in rank order, are one collective.

    Op, group, reduction, root, dim, shape and dtype must be equal; for all_to_all the shape apart from dim 0, and what
    a rank sends another must be what that one expects.
    """
    by_key: dict[tuple[object, ...], list[int]] = {}
    for index, call in enumerate(calls):
        by_key.setdefault(call.key(), []).append(index)
    if len(by_key) > 1:
        # The odd ones first: usually the culprit is the minority.
        kinds = sorted(by_key.values(), key=len)
        parts = []
        for indices in kinds:
            call, other = calls[indices[0]], calls[kinds[0][0] if indices is not kinds[0] else kinds[-1][0]]
            over = f" over {call.label}" if call.label != other.label else ""
            parts.append(f"{ranks_text([ranks[i] for i in indices])} called {call.text(other)}{over}")
        first = calls[kinds[-1][0]]
        raise MismatchError(f"{first.op} #{first.seq} over {first.label}: {', '.join(parts)}")
    if calls[0].input_splits is not None:
        _check_splits(calls, ranks)


def _check_splits(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            assert sender.input_splits is not None
            assert receiver.output_splits is not None
            if sender.input_splits[j] != receiver.output_splits[i]:
                raise MismatchError(
                    f"all_to_all #{sender.seq} over {sender.label}: rank {ranks[i]} sends "
                    f"{sender.input_splits[j]} rows to rank {ranks[j]} (input_splits={list(sender.input_splits)} at "
                    f"{sender.site}), which expects {receiver.output_splits[i]} "
                    f"(output_splits={list(receiver.output_splits)} at {receiver.site})"
                )


def check_message(sent: Call, received: Call, ranks: Sequence[int], src: int, dst: int) -> None:
    """Raise MismatchError unless a message is what its receiver expects."""
    if (sent.shape, sent.dtype) != (received.shape, received.dtype):
        raise MismatchError(
            f"send over {sent.label}: rank {ranks[src]} sent {sent.dtype} {sent.shape} at {sent.site}, "
            f"rank {ranks[dst]} receives {received.dtype} {received.shape} at {received.site}; make them equal"
        )
