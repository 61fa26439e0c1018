"""Which algorithms there are for which operation, and their costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crosscut.comm.algorithms import (
    binomial,
    bruck,
    hierarchical,
    pairwise,
    rabenseifner,
    recursive_doubling,
    ring,
)
from crosscut.comm.group import Group
from crosscut.layout.errors import nearest

ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "recursive_doubling": recursive_doubling.all_reduce,
        "rabenseifner": rabenseifner.all_reduce,
        "hierarchical": hierarchical.all_reduce,
    },
    "all_gather": {
        "ring": ring.all_gather,
        "recursive_doubling": recursive_doubling.all_gather,
        "bruck": bruck.all_gather,
    },
    "reduce_scatter": {"ring": ring.reduce_scatter, "pairwise": pairwise.reduce_scatter},
    "all_to_all": {"pairwise": pairwise.all_to_all, "bruck": bruck.all_to_all},
    "broadcast": {"binomial": binomial.broadcast},
    "reduce": {"binomial": binomial.reduce},
    "scatter": {"binomial": binomial.scatter},
    "gather": {"binomial": binomial.gather},
}

# Of (n, size, alpha, beta): seconds on n ranks for `size` bytes, where a message of s bytes takes alpha + s * beta and
# a rank can send one and receive one at a time. size: of all_reduce, broadcast, reduce the tensor; of the others the
# whole array (all_gather: the output; reduce_scatter, all_to_all: one rank's input; scatter, gather: all parts).
# alpha=1, beta=0 gives the number of steps; alpha=0, beta=1 the bytes that go one after another. Exact where pieces
# are equal.
COSTS: dict[str, dict[str, Callable[..., float]]] = {
    "all_reduce": {
        "ring": ring.cost_all_reduce,
        "recursive_doubling": recursive_doubling.cost_all_reduce,
        "rabenseifner": rabenseifner.cost_all_reduce,
        "hierarchical": hierarchical.cost_all_reduce,
    },
    "all_gather": {
        "ring": ring.cost_all_gather,
        "recursive_doubling": recursive_doubling.cost_all_gather,
        "bruck": bruck.cost_all_gather,
    },
    "reduce_scatter": {"ring": ring.cost_reduce_scatter, "pairwise": pairwise.cost_reduce_scatter},
    "all_to_all": {"pairwise": pairwise.cost_all_to_all, "bruck": bruck.cost_all_to_all},
    "broadcast": {"binomial": binomial.cost_broadcast},
    "reduce": {"binomial": binomial.cost_reduce},
    "scatter": {"binomial": binomial.cost_scatter},
    "gather": {"binomial": binomial.cost_gather},
}


def find(op: str, name: str) -> Callable[..., Any]:
    """The function. Raises ValueError, with the nearest name, for an unknown operation or algorithm."""
    if op not in ALGORITHMS:
        raise ValueError(f"unknown operation {op!r}{nearest(op, ALGORITHMS)}")
    if name in ALGORITHMS[op]:
        return ALGORITHMS[op][name]
    others = ops_of(name)
    if others:
        raise ValueError(
            f"{name} is no algorithm of {op} (but of {', '.join(others)}); {op}: {', '.join(ALGORITHMS[op])}"
        )
    raise ValueError(f"unknown algorithm {name!r} of {op}{nearest(name, ALGORITHMS[op])}")


def ops_of(name: str) -> list[str]:
    """The operations that an algorithm can do; none for an unknown one."""
    return [op for op, algorithms in ALGORITHMS.items() if name in algorithms]


def run(op: str, name: str, group: Group, *args: Any, **options: Any) -> Any:
    """Do `op` by the algorithm `name`: the arguments and the result of the `Group` method `op`. Collective.

    Raises ValueError for unknown names, and for what the `Group` method refuses.
    """
    return find(op, name)(group, *args, **options)
