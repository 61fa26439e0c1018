"""What is known of a tensor that is wrong, what was found out, and exact factors: products of axis sizes and their
inverses. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite, prod

from torch import Tensor

Ranges = tuple[tuple[tuple[int, int], ...], ...]  # per tensor dim the [start, stop) held, in order
MICRO = "micro_batches"
RANKS = "ranks"  # the size of a world that has no named axes
MOST = 0.05  # however noisy a run is, numbers further apart are not the same number


@dataclass(frozen=True)
class Finding:
    """What was found. text: a sentence that begins after the tensor's name. factor: run / reference where the tensor is
    an exact multiple; factor_name: that number in words, such as "1/tp"."""

    text: str
    factor: float | None = None
    factor_name: str = ""


@dataclass(frozen=True)
class Case:
    """One tensor and what is known of it.

    sizes: what a factor may be made of (axes, micro_batches). owed: the axes its gradient is summed over. held: the
    part of each rank. values: each rank's part, where ranks that hold the same one differ. coords: where the ranks
    stand in the mesh. before: the reference of the step before. parts: summands of the reference by name; tokens:
    how many each stands for. tol: how far, relative to the norm, correct values may be off.
    """

    run: Tensor
    ref: Tensor
    kind: str = "gradient"
    sizes: Mapping[str, int] = field(default_factory=dict)
    owed: tuple[str, ...] = ()
    held: Mapping[int, Ranges] = field(default_factory=dict)
    values: Mapping[int, Tensor] = field(default_factory=dict)
    coords: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    before: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    tol: float = 1e-9


def widened(tol: float, times: float, least: float = 1e-6) -> float:
    """`times` as much as the tolerance of a tensor: for numbers made of it."""
    return min(max(least, times * tol), MOST)


def proportion(run: Tensor, ref: Tensor, tol: float) -> float | None:
    """c with run = c * ref on every element to `tol` of its norm; None where there is no such number."""
    square = float((ref * ref).sum())
    if square == 0 or run.shape != ref.shape:
        return None
    c = float((run * ref).sum()) / square
    off = float((run - c * ref).norm())
    return c if isfinite(off) and off <= tol * max(abs(c), 1e-30) * square**0.5 else None


def name_factor(value: float, sizes: Mapping[str, int], prefer: Iterable[str] = (), tol: float = 1e-6) -> list[str]:
    """`value` as a product of sizes, or as one over such a product: the shortest readings, those of `prefer` first.

    ``name_factor(0.5, {"dp": 2, "tp": 2}, prefer=["tp"])`` is ``["1/tp"]``; without `prefer` it is both.
    """
    names = [name for name, size in sizes.items() if size > 1]
    readings: list[tuple[tuple[str, ...], str]] = [((name, name), f"{name}^2") for name in names]
    for count in range(1, len(names) + 1):
        readings += [(chosen, "*".join(chosen)) for chosen in combinations(names, count)]
    found = []
    for chosen, text in readings:
        size, wide = prod(sizes[name] for name in chosen), "*" in text
        for candidate, label in ((float(size), text), (1 / size, f"1/({text})" if wide else f"1/{text}")):
            if abs(value - candidate) <= tol * candidate:
                found.append((not set(chosen) <= set(prefer), len(chosen), label))
    best = min((key[:2] for key in found), default=None)
    return [label for *key, label in found if tuple(key) == best]


def factor_finding(value: float, case: Case) -> Finding:
    """The sentence for a tensor (or a number) that is `value` times what it should be."""
    tol = widened(case.tol, 10)
    every = "" if case.run.ndim == 0 else " on every element"
    shown = f"{round(value, 6):.8g}" if abs(value) >= 1e-3 else f"{value:.6g}"
    said = f"is {shown} x the reference{every}"
    if abs(value + 1) <= tol:
        return Finding(f"{said}: the sign is wrong", value, "-1")
    names = name_factor(value, case.sizes, case.owed, tol)
    if not names:
        return Finding(f"{said}, which is no product of {listed(case.sizes)}", value)
    return Finding(f"{said} = {' or '.join(names)}: {_reason(names[0], case.kind)}", value, " or ".join(names))


def _reason(name: str, kind: str) -> str:
    inverse = name.startswith("1/")
    over = name.removeprefix("1/").strip("()")
    if kind == "norm":
        return f"as of gradients that are {'divided by' if inverse else 'summed over'} {over} once too often"
    if kind == "loss":
        return f"it is divided by {over} once too often" if inverse else f"it is not divided by {over}"
    if over == RANKS:
        if inverse:
            return "it is averaged over the ranks once too often"
        return "it is summed over the ranks and not divided by their number"
    if MICRO in over:
        return f"it is divided by {over} once too often" if inverse else f"it is not divided by {over}"
    if over.endswith("^2"):
        return f"it is {'divided by' if inverse else 'summed over'} {over[:-2]} twice too often"
    if inverse:
        return f"a sum over {over} is missing (or it is divided by {over})"
    return f"it is summed over {over} once too often (or not divided by it)"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0,2`."""
    shown = ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def listed(names: Iterable[str]) -> str:
    """The first six names, and how many more."""
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
