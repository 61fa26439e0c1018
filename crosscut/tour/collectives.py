"""The eight collectives on tensors small enough to read: what each rank has before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from crosscut.comm.context import Context
    from crosscut.comm.group import Group

Values = tuple[int, ...] | None  # a tensor's numbers; None where the rank has no tensor
Run = Callable[["Group"], "tuple[Tensor | None, Tensor | None]"]


@dataclass(frozen=True)
class Collective:
    """One collective: `does` and `used_for` are what is printed; `run(group)` does it and returns (before, after)."""

    name: str
    does: str
    used_for: str
    run: Run


@dataclass(frozen=True)
class Shown:
    """What one rank saw of one collective. `bytes`: what it handed to the call, as the ledger counts."""

    before: Values
    after: Values
    bytes: int


@dataclass(frozen=True)
class RankTour:
    """One rank's tour: a Shown for each collective by name, then an all_reduce in two steps and their bytes."""

    shown: dict[str, Shown]
    pieces: Values  # after the reduce_scatter
    whole: Values  # after the all_gather of the pieces
    two_step_bytes: dict[str, int]


def _own(group: Group) -> Tensor:
    import torch

    return torch.tensor([group.rank], device=group.device)


def _row(group: Group, start: int) -> Tensor:
    import torch

    return torch.arange(start, start + group.size, device=group.device)


def _broadcast(group: Group) -> tuple[Tensor | None, Tensor | None]:
    x = _row(group, 0)
    if group.rank != 0:
        x.zero_()
    before = x.clone()
    return before, group.broadcast(x, src=0)


def _scatter(group: Group) -> tuple[Tensor | None, Tensor | None]:
    x = _row(group, 0) if group.rank == 0 else None
    out = _own(group).fill_(-1)
    group.scatter(None if x is None else list(x.split(1)), src=0, out=out)
    return x, out


def _gather(group: Group) -> tuple[Tensor | None, Tensor | None]:
    import torch

    x = _own(group)
    parts = group.gather(x, dst=0)
    return x, None if parts is None else torch.cat(parts)


def _reduce(group: Group) -> tuple[Tensor | None, Tensor | None]:
    x = _own(group)
    before = x.clone()
    return before, group.reduce(x, dst=0)


def _all_gather(group: Group) -> tuple[Tensor | None, Tensor | None]:
    x = _own(group)
    return x, group.all_gather(x)


def _reduce_scatter(group: Group) -> tuple[Tensor | None, Tensor | None]:
    x = _row(group, group.rank)
    return x, group.reduce_scatter(x)


def _all_reduce(group: Group) -> tuple[Tensor | None, Tensor | None]:
    x = _row(group, group.rank)
    before = x.clone()
    return before, group.all_reduce(x)


def _all_to_all(group: Group) -> tuple[Tensor | None, Tensor | None]:
    x = _row(group, group.rank * group.size)
    return x, group.all_to_all(x)


COLLECTIVES = (
    Collective("broadcast", "rank 0's tensor, to every rank", "a checkpoint that one rank has loaded", _broadcast),
    Collective("scatter", "rank 0's tensor, a piece to each rank", "data that one rank has read", _scatter),
    Collective("gather", "every rank's tensor, to rank 0", "results that one rank prints or saves", _gather),
    Collective("reduce", "the sum of every rank's tensor, to rank 0", "the loss that one rank reports", _reduce),
    Collective(
        "all_gather", "every rank's tensor, to every rank", "sharded parameters, made whole before forward", _all_gather
    ),
    Collective(
        "reduce_scatter",
        "the sum of every rank's tensor, a piece to each rank",
        "gradients of sharded parameters",
        _reduce_scatter,
    ),
    Collective(
        "all_reduce", "the sum of every rank's tensor, to every rank", "gradients in data parallelism", _all_reduce
    ),
    Collective(
        "all_to_all", "the r-th piece of every rank's tensor, to rank r", "tokens on their way to experts", _all_to_all
    ),
)

TO_REMEMBER = {
    "reduce": "by any operation whose order does not matter: sum, min, max, product, average",
    "scatter": "undoes gather",
    "all_": "every rank is a destination",
}


def rank_tour(ctx: Context) -> RankTour:
    """Run every collective on this rank. Collective; the numbers are made on the spot, not written down."""
    shown = {}
    for collective in COLLECTIVES:
        before, after, num_bytes = _counted(ctx, collective.run)
        shown[collective.name] = Shown(_values(before), _values(after), num_bytes.get(collective.name, 0))
    ledger = ctx.ledger.copy()
    piece = ctx.world.reduce_scatter(_row(ctx.world, ctx.rank))
    whole = ctx.world.all_gather(piece)
    counted = (ctx.ledger - ledger).totals().get("world", {})
    return RankTour(shown, _values(piece), _values(whole), counted)


def _counted(ctx: Context, run: Run) -> tuple[Tensor | None, Tensor | None, dict[str, int]]:
    earlier = ctx.ledger.copy()
    before, after = run(ctx.world)
    return before, after, (ctx.ledger - earlier).totals().get("world", {})


def _values(x: Tensor | None) -> Values:
    return None if x is None else tuple(x.tolist())


def run(world_size: int, backend: str) -> list[RankTour]:
    """The tour of every rank, in rank order. Raises ValueError for a world size below 1 or an unknown back end."""
    from crosscut.comm.launch import spawn

    return spawn(rank_tour, world_size=world_size, backend=backend)


def is_equal(tours: Sequence[RankTour]) -> bool:
    """Whether, on every rank, reduce_scatter and then all_gather gave what all_reduce gave."""
    return all(tour.whole == tour.shown["all_reduce"].after for tour in tours)


def to_json(tours: Sequence[RankTour], backend: str) -> dict[str, Any]:
    """The body of `--json`: one of `rows` a collective and rank."""
    rows = [
        {"collective": name, "rank": rank, "before": s.before, "after": s.after, "bytes": s.bytes}
        for name in tours[0].shown
        for rank, s in enumerate(tour.shown[name] for tour in tours)
    ]
    return {
        "world_size": len(tours),
        "backend": backend,
        "rows": rows,
        "all_reduce": tours[0].shown["all_reduce"].after,
        "reduce_scatter_then_all_gather": tours[0].whole,
        "equal": is_equal(tours),
    }
