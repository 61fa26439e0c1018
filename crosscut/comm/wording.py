"""How a call and a rank that waits are named: in the errors of every back end and in an autopsy alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from crosscut.comm.call import Call
from crosscut.comm.errors import ranks_text


def call_text(call: Call, ranks: Sequence[int] = ()) -> str:
    """`all_reduce(sum) #118 over dp (gradients of mlp.up, store.py:210)`; `recv #45 over pp from rank 0 (run.py:88)`.

    ranks: the group's global ranks, to name a peer by.
    """
    arguments = call.arguments()
    number = f" #{call.seq}" if call.seq else ""
    peer = ""
    if call.peer is not None:
        named = f"rank {ranks[call.peer] if call.peer < len(ranks) else call.peer}" if call.peer >= 0 else "any rank"
        peer = f" {'to' if call.op == 'send' else 'from'} {named}"
    where = ", ".join(part for part in (call.tag, call.site) if part)
    return f"{call.op}{f'({arguments})' if arguments else ''}{number} over {call.label or 'self'}{peer} ({where})"


def waits_text(ranks: Sequence[int], call: str) -> str:
    """`ranks 0,1,3 wait in CALL`."""
    return f"{ranks_text(tuple(ranks))} {'waits' if len(ranks) == 1 else 'wait'} in {call}"
