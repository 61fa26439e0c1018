"""Pipeline schedules as plain lists of actions, one list a rank, made by pure functions.

A schedule is written in two steps. First the compute actions alone, in the order in which a rank does them (`gpipe`,
`one_f_one_b`, `forward_only`). Then `add_communication` inserts the sends and receives that these orders imply, so a
new schedule is only a new order of F and B. `build` does both and is what the engine calls. Nothing here needs torch or
a process: validate.py checks any list, timeline.py runs it on a simulated clock, runtime.py runs it for real.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
COMPUTE: tuple[Kind, ...] = ("F", "B")
SENDS: tuple[Kind, ...] = ("SEND_F", "SEND_B")
RECVS: tuple[Kind, ...] = ("RECV_F", "RECV_B")

NAMES = ("gpipe", "1f1b")  # what `build` makes
LATER = ("interleaved", "zero-bubble")  # known names that nothing executes yet


@dataclass(frozen=True)
class Action:
    """One thing that a rank does for one micro-batch.

    kind: `F` and `B` compute the forward and backward of `stage` for micro-batch `micro`. `SEND_F` hands the output of
    this rank's `stage` to the rank of stage + 1, `RECV_F` takes the input of this rank's `stage` from the rank of
    stage - 1; `SEND_B` hands the gradient of `stage`'s input to the rank of stage - 1, `RECV_B` takes the gradient of
    its output from the rank of stage + 1. `stage` is always a stage of the rank that acts, counted over the model.
    `peer`: the other rank of a send or receive (its index along pp); None for F and B.
    """

    kind: Kind
    stage: int
    micro: int
    peer: int | None = None

    @property
    def is_compute(self) -> bool:
        """True for F and B."""
        return self.kind in COMPUTE

    @property
    def channel(self) -> int:
        """0 for what moves forward (activations), 1 for what moves backward (gradients).

        The two directions need communicators of their own: on one in-order communicator 1F1B deadlocks (tested).
        """
        return 1 if self.kind.endswith("B") else 0

    def __str__(self) -> str:
        """`F(stage 1, micro 0)`, `SEND_F(stage 0, micro 2, to rank 1)`."""
        to = "" if self.peer is None else f", {'to' if self.kind in SENDS else 'from'} rank {self.peer}"
        return f"{self.kind}(stage {self.stage}, micro {self.micro}{to})"


Lists = tuple[tuple[Action, ...], ...]  # [rank][index]


def _check_sizes(num_stages: int, num_micro: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: a pipeline has at least 1 stage")
    if num_micro < 1:
        raise ValueError(f"num_micro={num_micro}: a schedule needs at least 1 micro-batch")


def gpipe(num_stages: int, num_micro: int) -> Lists:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe"), one stage a rank; compute actions only.

    Each rank keeps the activations of all `num_micro` micro-batches. Idle time over ideal time: (p-1)/m. Backwards run
    in the order of the forwards, so every schedule here adds up gradients in the same order.
    """
    _check_sizes(num_stages, num_micro)
    return tuple(
        tuple(Action(kind, stage, micro) for kind in COMPUTE for micro in range(num_micro))
        for stage in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_micro: int) -> Lists:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards left over; compute actions only.

    PipeDream-Flush (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", 2.2).
    Stage s starts with min(m, p-1-s) forwards and so keeps at most min(m, p-s) micro-batches instead of GPipe's m; the
    idle time is the same. Any m >= 1 works; with m < p some stages never leave the warm-up.
    """
    _check_sizes(num_stages, num_micro)
    lists = []
    for stage in range(num_stages):
        warm_up = min(num_micro, num_stages - 1 - stage)
        actions = [Action("F", stage, micro) for micro in range(warm_up)]
        for micro in range(num_micro - warm_up):
            actions += [Action("F", stage, warm_up + micro), Action("B", stage, micro)]
        actions += [Action("B", stage, micro) for micro in range(num_micro - warm_up, num_micro)]
        lists.append(tuple(actions))
    return tuple(lists)


def forward_only(num_stages: int, num_micro: int) -> Lists:
    """The forwards alone, as evaluation runs them; compute actions only. Busy for m/(m+p-1) of the time."""
    _check_sizes(num_stages, num_micro)
    return tuple(tuple(Action("F", stage, micro) for micro in range(num_micro)) for stage in range(num_stages))


def stage_ranks(lists: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The rank that computes each stage, read from the lists. Raises ValueError if a stage is computed on two ranks."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if action.is_compute and ranks.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} is computed on rank {ranks[action.stage]} and on rank {rank}")
    return ranks


def add_communication(lists: Sequence[Sequence[Action]]) -> Lists:
    """Insert the sends and receives that lists of compute actions imply.

    A value is sent right after the action that made it and received right before the action that uses it: this is the
    order in which sends never wait for anything, and receives wait as late as they can. Neighbouring stages on one rank
    hand the value over without communication. On every directed pair of ranks and channel, sends and receives come out
    in the same order if both ranks compute that direction's micro-batches in the same order (`validate` checks it).
    """
    rank_of = stage_ranks(lists)
    last = max(rank_of, default=0)
    out = []
    for rank, actions in enumerate(lists):
        done: list[Action] = []
        for action in actions:
            stage, micro = action.stage, action.micro
            before, after = rank_of.get(stage - 1, rank), rank_of.get(stage + 1, rank)
            if action.kind == "F":
                if stage > 0 and before != rank:
                    done.append(Action("RECV_F", stage, micro, before))
                done.append(action)
                if stage < last and after != rank:
                    done.append(Action("SEND_F", stage, micro, after))
            elif action.kind == "B":
                if stage < last and after != rank:
                    done.append(Action("RECV_B", stage, micro, after))
                done.append(action)
                if stage > 0 and before != rank:
                    done.append(Action("SEND_B", stage, micro, before))
            else:
                raise ValueError(f"rank {rank}: add_communication takes lists of F and B only, got {action}")
        out.append(tuple(done))
    return tuple(out)


def build(name: str, num_stages: int, num_micro: int, virtual_stages: int = 1) -> Lists:
    """The finished lists of schedule `name` ("gpipe" or "1f1b"), one a rank, with sends and receives.

    num_stages: ranks along pp (stages when virtual_stages = 1). num_micro: micro-batches a step. virtual_stages: stages
    a rank. Raises ValueError for an unknown name (with the nearest known one), for a name that nothing executes yet,
    and for sizes below 1.
    """
    if name in LATER:
        raise ValueError(f"schedule {name!r} is not executable yet; use gpipe or 1f1b")
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES + LATER, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(NAMES)}"
        raise ValueError(f"unknown schedule {name!r}; {hint}")
    if virtual_stages != 1:
        raise ValueError(
            f"virtual_stages={virtual_stages}: schedule {name!r} has one stage a rank; use virtual_stages=1"
        )
    return add_communication(gpipe(num_stages, num_micro) if name == "gpipe" else one_f_one_b(num_stages, num_micro))
