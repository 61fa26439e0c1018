"""The arguments of a torch process group's methods, in the words of a `Call`.

The methods take lists of tensors and an options object, or a tensor and plain arguments. torch 2.13 has renamed five.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from crosscut.comm.shm.tensors import listed, lists, reduction

Tensor = torch.Tensor
ANY = -1


class Described(NamedTuple):
    """`shown`: the tensors whose shape and dtype must agree between ranks; `tensors`: all that the call touches."""

    shown: Sequence[Tensor]
    tensors: Sequence[Tensor]
    reduce_op: str | None = None
    root: int | None = None
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    peer: int | None = None
    tag: int = 0


Args = Sequence[Any]


def _op(args: Args, index: int) -> str:
    name, factor = reduction(args[index] if len(args) > index else None)
    return name if factor is None else f"premul_{name}"


def _root(args: Args, index: int) -> int:
    value = args[index] if len(args) > index else 0
    return int(value.rootRank) if hasattr(value, "rootRank") else int(value or 0)


def _in_place(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, xs, _op(args, 1))


def _broadcast(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, xs, root=_root(args, 1))


def _reduce(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, xs, _op(args, 2 if len(args) > 2 else 1), _root(args, 1))


def _all_gather(args: Args) -> Described:
    """Lists: the inputs may have any sizes as long as all ranks expect the same, so those are what is compared."""
    outs, xs = lists(args[0]), listed(args[1])
    touched = [*xs, *(x for one in outs for x in one)]
    uneven = any(len({x.numel() for x in one}) > 1 for one in outs)
    return Described([x for one in outs for x in one] if uneven else xs, touched)


def _all_gather_single(args: Args) -> Described:
    xs = listed(args[1])
    return Described(xs, [*xs, *listed(args[0])])


def _gather(args: Args) -> Described:
    xs = listed(args[1])
    return Described(xs, [*xs, *(x for one in lists(args[0]) for x in one)], root=_root(args, 2))


def _scatter(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, [*xs, *(x for one in lists(args[1]) for x in one)], root=_root(args, 2))


def _reduce_scatter(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, [*xs, *(x for one in lists(args[1]) for x in one)], _op(args, 2))


def _reduce_scatter_single(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, [*xs, *listed(args[1])], _op(args, 2))


def _all_to_all_single(args: Args) -> Described:
    out, x = args[0], args[1]
    outs, ins = (tuple(args[i]) if len(args) > i and not hasattr(args[i], "timeout") else () for i in (2, 3))
    return Described([x], [out, x], input_splits=ins, output_splits=outs)


def _all_to_all(args: Args) -> Described:
    outs, ins = listed(args[0]), listed(args[1])
    sizes = (tuple(x.numel() for x in xs) for xs in (ins, outs))
    return Described(ins[:1], [*ins, *outs], input_splits=next(sizes), output_splits=next(sizes))


def _message(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, xs, peer=int(args[1]), tag=int(args[2]) if len(args) > 2 else 0)


def _from_anybody(args: Args) -> Described:
    xs = listed(args[0])
    return Described(xs, xs, peer=ANY, tag=int(args[1]) if len(args) > 1 else 0)


def _barrier(args: Args) -> Described:
    return Described((), ())


# method -> (the call's name, how its arguments are read). All names of all versions: a missing one would be the base
# class's, which waits with the GIL held.
METHODS: dict[str, tuple[str, Callable[[Args], Described]]] = {
    "allreduce": ("all_reduce", _in_place),
    "allreduce_coalesced": ("all_reduce", _in_place),
    "broadcast": ("broadcast", _broadcast),
    "reduce": ("reduce", _reduce),
    "allgather": ("all_gather", _all_gather),
    "allgather_coalesced": ("all_gather", _all_gather),
    "all_gather_single": ("all_gather_single", _all_gather_single),
    "_allgather_base": ("all_gather_single", _all_gather_single),
    "all_gather_single_coalesced": ("all_gather_single", _all_gather_single),
    "allgather_into_tensor_coalesced": ("all_gather_single", _all_gather_single),
    "gather": ("gather", _gather),
    "scatter": ("scatter", _scatter),
    "reduce_scatter": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_single": ("reduce_scatter_single", _reduce_scatter_single),
    "_reduce_scatter_base": ("reduce_scatter_single", _reduce_scatter_single),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single", _reduce_scatter_single),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single", _reduce_scatter_single),
    "all_to_all_single": ("all_to_all_single", _all_to_all_single),
    "alltoall_base": ("all_to_all_single", _all_to_all_single),
    "alltoall": ("all_to_all", _all_to_all),
    "send": ("send", _message),
    "recv": ("recv", _message),
    "recv_anysource": ("recv", _from_anybody),
    "barrier": ("barrier", _barrier),
}
