"""What an algorithm does, from a run of it: who sends what to whom in which step, and how long that takes.

The messages are those of a real run, written down by a `Recorder` on every rank; the steps are found by playing them
again against a clock. In the replay nothing is buffered: a message takes place when its sender and its receiver have
both come to it. An algorithm that relied on buffers would not come through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from crosscut.comm.algorithms.recorder import Event, Recorder
from crosscut.comm.algorithms.registry import ALGORITHMS, find
from crosscut.comm.context import Context
from crosscut.comm.group import Group
from crosscut.comm.launch import spawn

Tensor = torch.Tensor
Log = Sequence[Sequence[Event]]  # the events of every rank, in its order
Seconds = Callable[[int, int, int], float]  # of a message: (src, dst, bytes) -> seconds


class Message(NamedTuple):
    """One message of a step. `values`: its numbers (of a long one the first)."""

    src: int
    dst: int
    what: str
    bytes: int
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Trace:
    """One run. Of every rank, in rank order: `log`, `before` (what it had), `after` (what the algorithm made of it),
    `group_after` (what the back end's own collective makes of the same), `ledger_bytes` (sent by the algorithm).
    """

    op: str
    name: str
    log: Log
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    group_after: tuple[Any, ...]
    ledger_bytes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.log)

    def steps(self) -> list[list[Message]]:
        """The messages of each step, by sender. In one step a rank sends at most one and receives at most one."""
        begun, _ = replay(self.log, lambda src, dst, num_bytes: 1.0)
        out: list[list[Message]] = [[] for _ in range(int(max(begun.values(), default=-1)) + 1)]
        for (rank, index), start in begun.items():
            sent = self.log[rank][index].sent
            assert sent is not None
            out[int(start)].append(Message(rank, *sent))
        return [sorted(step) for step in out]

    def seconds(self, seconds: Seconds) -> float:
        """How long the run would take if each message took `seconds(src, dst, bytes)`."""
        _, finished = replay(self.log, seconds)
        return max(finished, default=0.0)


def explain_steps(
    op: str, name: str, n: int, *, numel: int | None = None, backend: str = "threads", **options: Any
) -> list[list[Message]]:
    """The steps of the algorithm `name` for `op` on n ranks, from a run on small tensors: in each step its messages
    (src, dst, what, bytes, values). Arguments and errors as `record`.
    """
    return record(op, name, n, numel=numel, backend=backend, **options).steps()


def record(op: str, name: str, n: int, *, numel: int | None = None, backend: str = "threads", **options: Any) -> Trace:
    """Run the algorithm `name` for `op` on n ranks with int64 numbers that tell where they come from; write it down.

    numel: of the whole array (`COSTS` says which that is); default n. options: further arguments of the algorithm.
    Reductions: number j of rank r is (j % 9 + 1) * 10^r, so that a digit of a sum stands for a rank. Else: number j of
    rank r is 100 r + j. Raises ValueError for unknown names, more than 16 ranks, and a numel that has to divide.
    """
    find(op, name)
    if not 1 <= n <= 16:
        raise ValueError(f"n={n}: the numbers can tell 1 to 16 ranks apart")
    numel = n if numel is None else numel
    if op not in ("all_reduce", "broadcast", "reduce") and numel % n:
        raise ValueError(f"numel={numel} of {op} is not divided by {n} ranks; use {-(-numel // n) * n}")
    ranks = spawn(_rank, op, name, numel, options, world_size=n, backend=backend)
    return Trace(op, name, *zip(*ranks, strict=True))


def _rank(ctx: Context, op: str, name: str, numel: int, options: dict[str, Any]) -> tuple[Any, ...]:
    recorder = Recorder(ctx.world)
    before = numbers(op, ctx.world_size, ctx.rank, numel).to(ctx.device)
    after = call(ALGORITHMS[op][name], op, recorder, before.clone(), **options)
    sent = sum(event.sent.bytes for event in recorder.events if event.sent is not None)
    assert sent == ctx.ledger.totals().get("world", {}).get("send", 0), "what was written down is not what was counted"
    shared = {key: value for key, value in options.items() if key in ("op", "src", "dst")}
    theirs = call(getattr(Group, op), op, ctx.world, before.clone(), **shared)
    held = None if op == "scatter" and ctx.rank != options.get("src", 0) else before.tolist()
    return recorder.events, held, _values(after), _values(theirs), sent


def numbers(op: str, n: int, rank: int, numel: int) -> Tensor:
    """This rank's numbers (int64): of all_gather and gather its n-th of `numel`, else `numel`."""
    places = torch.arange(numel // n if op in ("all_gather", "gather") else numel)
    return (places % 9 + 1) * 10**rank if "reduce" in op else 100 * rank + places


def call(function: Callable[..., Any], op: str, group: Group, x: Tensor, **options: Any) -> Any:
    """`function`, a `Group` method or an algorithm, on x. For scatter, `x` is all parts one after another."""
    if op != "scatter":
        return function(group, x, **options)
    parts = list(x.clone().chunk(group.size)) if x.numel() else [x.clone() for _ in range(group.size)]
    at_src = group.rank == options.get("src", 0)
    return function(group, parts if at_src else None, out=torch.zeros_like(parts[0]), **options)


def _values(result: Any) -> list[Any] | None:
    if isinstance(result, list):
        return [part.tolist() for part in result]
    return None if result is None else result.tolist()


def replay(log: Log, seconds: Seconds) -> tuple[dict[tuple[int, int], float], list[float]]:
    """Play the events of all ranks against a clock: (when each message began, by (rank, index of its event); when each
    rank was done). Raises RuntimeError if the ranks would wait for each other for ever.
    """
    n = len(log)
    clock, at = [0.0] * n, [0] * n
    begun: dict[tuple[int, int], float] = {}
    received: set[tuple[int, int]] = set()
    ends: dict[tuple[int, int], float] = {}  # of an event: the end of what it has done so far
    moved = True
    while moved:
        moved = False
        for rank in range(n):
            here = (rank, at[rank])
            if at[rank] == len(log[rank]):
                continue
            event = log[rank][at[rank]]
            if event.sent is not None and here not in begun:
                dst = event.sent.dst
                there = (dst, at[dst])
                # Its receiver has come to it when the event it is at receives from this rank and has not done so.
                if at[dst] < len(log[dst]) and log[dst][at[dst]].src == rank and there not in received:
                    begun[here] = start = max(clock[rank], clock[dst])
                    received.add(there)
                    end = start + seconds(rank, dst, event.sent.bytes)
                    for each in (here, there):
                        ends[each] = max(ends.get(each, 0.0), end)
                    moved = True
            if (event.sent is None or here in begun) and (event.src is None or here in received):
                clock[rank] = ends[here]
                at[rank] += 1
                moved = True
    stuck = [rank for rank in range(n) if at[rank] < len(log[rank])]
    if stuck:
        raise RuntimeError(f"ranks {stuck} wait for each other: the algorithm relies on messages being buffered")
    return begun, clock
