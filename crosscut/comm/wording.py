"""How a call and a rank that waits are named: in the errors of every back end and in an autopsy alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from crosscut.comm.call import Call
from crosscut.comm.errors import ranks_text


def call_text(call: Call, ranks: Sequence[int] = ()) -> str:
    """As `Call.where`; of a message its number and its peer: `recv #45 over pp from rank 0, at run.py:88`.

    ranks: the group's global ranks.
    """
    if call.peer is None:
        return call.where()
    named = f"rank {ranks[call.peer] if call.peer < len(ranks) else call.peer}" if call.peer >= 0 else "any rank"
    tag = f', tag "{call.tag}"' if call.tag else ""
    number = f" #{call.seq}" if call.seq else ""
    return f"{call.op}{number} over {call.label} {'to' if call.op == 'send' else 'from'} {named}{tag}, at {call.site}"


def waits_text(ranks: Sequence[int], call: str) -> str:
    """`ranks 0,1,3 wait in CALL`."""
    return f"{ranks_text(tuple(ranks))} {'waits' if len(ranks) == 1 else 'wait'} in {call}"
