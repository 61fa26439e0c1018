"""What is wrong with a tensor that should equal another one. Pure functions over tensors: no ranks, no files.

Wrong parallel code leaves signatures. A forgotten or doubled sum is an exact factor; a lost micro-batch is a sum of the
other parts; a forgotten `zero_grad` is this step plus the one before; a rank that took another's slice shows where it
is. `explain` tries them in turn and returns a sentence about the first that fits to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite, prod

import torch
from torch import Tensor

Ranges = tuple[tuple[tuple[int, int], ...], ...]  # per tensor dim the [start, stop) held, in order
MICRO = "micro_batches"
RANKS = "ranks"  # the size of a world that has no named axes


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


def explain(case: Case) -> Finding:
    """The first explanation of `case.run` that fits, from the most telling to the least."""
    run, ref, tol = case.run.double(), case.ref.double(), case.tol
    if case.values:
        return _ranks_differ(case)
    if not bool(run.isfinite().all()):
        where = describe_box(_box(~run.isfinite()), tuple(ref.shape), case.held)
        return Finding(f"holds NaN or infinite values, or nothing at all{where}")
    scale = float(ref.norm())
    if float(run.norm()) <= tol * scale:
        return Finding("is zero everywhere, where the reference is not: no contribution arrived", 0.0, "0")
    factor = proportion(run, ref, tol)
    if factor is not None:
        return factor_finding(factor, case)
    if case.before is not None:
        w = weights({"now": ref, "before": case.before.double()}, run, tol)
        if w is not None:
            return Finding(_stale(w, tol))
    w = weights({name: part.double() for name, part in case.parts.items()}, run, tol)
    if w is not None:
        return Finding(describe_weights(w, case.tokens, tol))
    return _by_place(run, ref, case) or Finding(_general(run, ref))


# ---- factors -------------------------------------------------------------------------------------------------------


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
    tol = max(1e-6, 10 * case.tol)
    every = "" if case.run.ndim == 0 else " on every element"
    shown = f"{value:.10g}" if abs(value - round(value, 6)) <= tol * abs(value) else f"{value:.6g}"
    if abs(value - round(value, 6)) <= tol * abs(value):
        shown = f"{round(value, 6):g}"
    said = f"is {shown} x the reference{every}"
    if abs(value + 1) <= tol:
        return Finding(f"{said}: the sign is wrong", value, "-1")
    names = name_factor(value, case.sizes, case.owed, tol)
    if not names:
        return Finding(f"{said}, which is no product of {_listed(case.sizes)}", value)
    return Finding(f"{said} = {' or '.join(names)}: {_reason(names[0], case.kind)}", value, " or ".join(names))


def _reason(name: str, kind: str) -> str:
    inverse = name.startswith("1/")
    over = name.removeprefix("1/").strip("()")
    if kind == "norm":
        return f"parts over {over} are left out" if inverse else f"what {over} replicates is counted more than once"
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


# ---- sums of parts -------------------------------------------------------------------------------------------------


def weights(parts: Mapping[str, Tensor], run: Tensor, tol: float) -> dict[str, float] | None:
    """w with run = sum of w[name] * parts[name] to `tol`; None where there is none or where the parts do not tell."""
    used = {name: part for name, part in parts.items() if float(part.norm()) > 0}
    if len(used) < 2 or run.numel() < len(used):
        return None
    norms = torch.stack([part.norm() for part in used.values()])
    columns = torch.stack([part.reshape(-1) for part in used.values()], dim=1) / norms
    gram = torch.linalg.eigvalsh(columns.T @ columns)
    if float(gram[0]) < 1e-8 * float(gram[-1]):  # parallel parts: any of them could be the one
        return None
    solution = torch.linalg.lstsq(columns, run.reshape(-1, 1)).solution
    off = float((columns @ solution - run.reshape(-1, 1)).norm())
    if not off <= tol * max(float(run.norm()), float(norms.max())):
        return None
    return {name: float(w) for name, w in zip(used, (solution[:, 0] / norms).tolist(), strict=True)}


def describe_weights(found: Mapping[str, float], tokens: Mapping[str, int], tol: float) -> str:
    """What weights of summands, each of which should be 1, say. tokens: how many each summand stands for."""
    near = max(1e-6, 1e3 * tol)
    means = [found[name] * tokens.get(name, 0) for name in found]
    if len({tokens.get(name) for name in found}) > 1 and means[0] and max(means) - min(means) <= near * means[0]:
        return f"is a mean of means: {_unequal({n: tokens[n] for n in found})}, and each counts the same"
    lost = [name for name, w in found.items() if abs(w) <= near]
    twice = [name for name, w in found.items() if abs(w - 2) <= near]
    right = [name for name, w in found.items() if abs(w - 1) <= near]
    if len(lost) + len(twice) + len(right) == len(found):
        said = [f"lacks the contribution of {_listed(lost)}"] * bool(lost)
        said += [f"counts that of {_listed(twice)} twice"] * bool(twice)
        return " and ".join(said) or "is the sum of the right contributions"
    if len(right) == 0 and len(lost) == len(found) - 1:
        name, w = next((n, w) for n, w in found.items() if abs(w) > near)
        return f"is {w:.6g} x the contribution of {name} alone: the others are missing"
    some = ", ".join(f"{name}: {w:.4g}" for name, w in list(found.items())[:8])
    return f"weighs contributions that should each count once by other weights ({some})"


def _stale(found: Mapping[str, float], tol: float) -> str:
    near = max(1e-6, 1e3 * tol)
    now, before = found.get("now", 0.0), found.get("before", 0.0)
    if abs(now) <= near and abs(before - 1) <= near:
        return "is that of the step before: a stale value"
    if abs(now - 1) <= near and abs(before - 1) <= near:
        return "is the sum of this step's and that of the step before: it was not set to zero between them"
    return f"is {now:.6g} x this step's reference plus {before:.6g} x that of the step before"


# ---- places --------------------------------------------------------------------------------------------------------


def cut_out(whole: Tensor, ranges: Ranges) -> Tensor:
    """The part of `whole` that `ranges` name (a view where each dim has one range)."""
    for dim, held in enumerate(ranges):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in held or ((0, 0),)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return whole


def parts_held(held: Mapping[int, Ranges]) -> dict[Ranges, list[int]]:
    """The different parts that ranks hold, with their ranks; the empty ones left out."""
    found: dict[Ranges, list[int]] = {}
    for rank, ranges in sorted(held.items()):
        if all(sum(stop - start for start, stop in dim) for dim in ranges):
            found.setdefault(ranges, []).append(rank)
    return found


def _by_place(run: Tensor, ref: Tensor, case: Case) -> Finding | None:
    """Which part is wrong, and how: a rank's part, rows or columns."""
    parts = parts_held(case.held)
    if len(parts) > 1:
        ours = {tuple(ranks): (cut_out(run, r), cut_out(ref, r)) for r, ranks in parts.items()}
        wrong = [ranks for ranks, (a, b) in ours.items() if float((a - b).norm()) > case.tol * float(ref.norm())]
        moved = _swapped(ours, wrong, case.tol)
        if moved:
            return Finding(f"holds the right numbers in the wrong places: {moved}")
        factors = {ranks: proportion(*ours[ranks], case.tol) for ranks in wrong}
        if all(f is not None for f in factors.values()):
            said = "; ".join(f"{_ranks(r)} {f:.6g} x" for r, f in list(factors.items())[:8])
            rest = "" if len(wrong) == len(ours) else ", the other parts are right"
            return Finding(f"is scaled by another factor on each part: {said} the reference{rest}")
        if len(wrong) < len(ours):
            names = " and ".join(_ranks(r) for r in wrong[:4])
            inside = describe_box(_box_of(run, ref, case.tol), tuple(ref.shape), {})
            return Finding(f"is wrong only in the part of {names}{inside}")
    where = describe_box(_box_of(run, ref, case.tol), tuple(ref.shape), case.held)
    return Finding(f"is wrong only{where}; the rest agrees") if where else None


def _swapped(
    ours: Mapping[tuple[int, ...], tuple[Tensor, Tensor]], wrong: Sequence[tuple[int, ...]], tol: float
) -> str:
    """`rank 0 has what rank 1 should have, ...` if each wrong part is another rank's right one."""
    moves = []
    for ranks in wrong:
        value = ours[ranks][0]
        source = next(
            (o for o, (_, ref) in ours.items()
             if o != ranks and ref.shape == value.shape and float((value - ref).norm()) <= tol * float(ref.norm())),
            None,
        )  # fmt: skip
        if source is None:
            return ""
        moves.append(f"{_ranks(ranks)} has what {_ranks(source)} should have")
    return ", ".join(moves[:8])


def _box_of(run: Tensor, ref: Tensor, tol: float) -> tuple[tuple[int, int], ...]:
    off = (run - ref).abs()
    return _box(off > max(1e-6 * float(off.max()), tol * float(ref.abs().max())))


def _box(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """Per dim the [start, stop) around all true elements."""
    hits = mask.nonzero()
    return tuple((int(column.min()), int(column.max()) + 1) for column in hits.T) if hits.numel() else ()


def describe_box(box: tuple[tuple[int, int], ...], shape: tuple[int, ...], held: Mapping[int, Ranges]) -> str:
    """` in rows 12:24 of 48`, with the ranks that hold just these; "" where it is all of the tensor."""
    words = ("rows", "columns") if len(shape) <= 2 else tuple(f"dim {d}" for d in range(len(shape)))
    said = [
        f"{words[d]} {start}:{stop} of {shape[d]}" for d, (start, stop) in enumerate(box) if stop - start < shape[d]
    ]
    if not said:
        return ""
    owners = [rank for rank, ranges in held.items() if tuple((r[0][0], r[-1][1]) for r in ranges) == box]
    return f" in {', '.join(said)}" + (f" (what {_ranks(owners)} holds)" if owners else "")


# ---- ranks that should agree ---------------------------------------------------------------------------------------


def agreement(values: Mapping[int, Tensor]) -> list[list[int]]:
    """The ranks, grouped by bitwise equal values."""
    groups: list[tuple[Tensor, list[int]]] = []
    for rank, value in sorted(values.items()):
        for known, ranks in groups:
            if known.shape == value.shape and torch.equal(known, value):
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    return [ranks for _, ranks in groups]


def _ranks_differ(case: Case) -> Finding:
    groups = agreement(case.values)
    over = _separating_axes(groups, case.coords)
    label = "+".join(over) or "the ranks"
    said = f"differs between {' and '.join(_ranks(g) for g in groups[:4])}, which hold the same part"
    one = {tuple(g): case.values[g[0]].double() for g in groups}
    first = next(iter(one.values()))
    ref = cut_out(case.ref.double(), case.held[groups[0][0]]) if groups[0][0] in case.held else case.ref.double()
    if ref.shape == first.shape and len({v.shape for v in one.values()}) == 1:
        total = torch.stack(list(one.values())).sum(0)
        near = case.tol * max(float(ref.norm()), 1e-300)
        for word, value in (("sum", total), ("mean", total / len(one))):
            if float((value - ref).norm()) <= near:
                action = "sum" if word == "sum" else "average"
                return Finding(f"{said}; their {word} is the reference: the {action} over {label} is missing")
        right = [g for g, v in one.items() if float((v - ref).norm()) <= near]
        if right:
            wrong = " and ".join(_ranks(g) for g in one if g not in right)
            return Finding(f"{said}; {_ranks([r for g in right for r in g])} has it right, {wrong} wrong")
        factors = {g: proportion(v, ref, case.tol) for g, v in one.items()}
        if all(f is not None for f in factors.values()):
            each = ", ".join(f"{f:.6g} x the reference on {_ranks(g)}" for g, f in list(factors.items())[:4])
            return Finding(f"{said}: {each}: ranks scale by different factors")
    return Finding(f"{said}: they drifted apart over {label}")


def _separating_axes(groups: Sequence[Sequence[int]], coords: Mapping[int, Mapping[str, int]]) -> list[str]:
    """The axes along which neighbours are in different groups."""
    group = {rank: i for i, ranks in enumerate(groups) for rank in ranks if rank in coords}
    found: dict[str, None] = {}
    for a, b in combinations(group, 2):
        axes = [axis for axis in coords[a] if coords[a][axis] != coords[b][axis]]
        if group[a] != group[b] and len(axes) == 1:
            found[axes[0]] = None
    return list(found)


# ---- numbers -------------------------------------------------------------------------------------------------------

Squares = Mapping[int, Mapping[str, tuple[Ranges, float]]]  # rank -> gradient -> (the part it holds, its square)


def explain_loss(run: float, ref: float, shares: Mapping[str, tuple[float, int]], case: Case) -> Finding:
    """Why a loss is wrong. shares: name of a part of the batch -> (its mean loss, its tokens)."""
    near = max(1e-9, 10 * case.tol) * abs(ref)
    tokens = {name: count for name, (_, count) in shares.items()}
    total = sum(tokens.values())
    if len(shares) > 1 and total:
        means = [loss for loss, count in shares.values() if count]
        if abs(run - sum(means) / len(shares)) <= near or abs(run - sum(means) / len(means)) <= near:
            return Finding(f"is a mean of means: {_unequal(tokens)}, and each counts the same")
        for name, (loss, count) in shares.items():
            if abs(run - loss) <= near:
                return Finding(f"is that of {name} alone: the others are missing")
            if count and abs(run - (ref - loss * count / total)) <= near:
                return Finding(f"lacks the contribution of {name}")
    if total and abs(run - ref * total) <= near * total:
        return Finding(f"is the sum over {total} tokens, not divided by their number", float(total), "tokens")
    return factor_finding(run / ref, case) if ref else Finding("should be zero")


def _unequal(tokens: Mapping[str, int]) -> str:
    some = ", ".join(f"{name} {count}" for name, count in list(tokens.items())[:8])
    return f"its parts hold unequal numbers of tokens ({some})"


def explain_norm(run: float, ref: float, held: Squares, case: Case) -> Finding:
    """Why a gradient norm is wrong. held: the squares of the reference's gradients, by part as the ranks hold them.

    Tried are the norms that wrong sums would give: one rank's alone, everything once a rank, an axis left out or
    counted again, one gradient left out or counted twice.
    """
    near = max(1e-9, 10 * case.tol)
    guesses: list[tuple[str, float]] = [("is the square of the norm: the root is missing", ref**4)]
    for rank, squares in held.items():
        text = f"is the norm of what rank {rank} holds alone: it is not summed over the ranks"
        guesses.append((text, sum(square for _, square in squares.values())))
    every = sum(square for squares in held.values() for _, square in squares.values())
    guesses.append(("counts what several ranks hold once on each of them", every))
    for axis, size in case.sizes.items():
        if size > 1 and all(axis in case.coords.get(rank, ()) for rank in held):
            first = sum(_parts_once(held, case, axis, only_first=True).values())
            guesses.append((f"leaves out what {axis} > 0 holds: it is not summed over {axis}", first))
            again = sum(_parts_once(held, case, axis, only_first=False).values())
            guesses.append((f"counts what {axis} replicates {size} times", again))
    names: dict[str, float] = _parts_once(held, case, "", only_first=False)
    total = ref * ref
    guesses += [(f"leaves out {name}", total - square) for name, square in names.items()]
    guesses += [(f"counts {name} {n} times", total + (n - 1) * names[name])
                for n in sorted({2, *case.sizes.values()} - {1}) for name in names]  # fmt: skip
    for text, square in guesses:
        if abs(square - total) > near * total and abs(run * run - square) <= near * max(square, 1e-300):
            return Finding(text)
    return factor_finding(run / ref, case) if ref else Finding("should be zero")


def _parts_once(held: Squares, case: Case, axis: str, only_first: bool) -> dict[str, float]:
    """Squared norms by name, each part once; of `axis` only coordinate 0, or once at each of its coordinates."""
    seen: set[tuple[str, Ranges, int]] = set()
    total: dict[str, float] = {}
    for rank, squares in held.items():
        place = case.coords[rank][axis] if axis else 0
        for name, (part, square) in squares.items():
            if (name, part, place) not in seen and not (only_first and place):
                seen.add((name, part, place))
                total[name] = total.get(name, 0.0) + square
    return total


def _general(run: Tensor, ref: Tensor) -> str:
    off = float((run - ref).norm()) / max(float(ref.norm()), 1e-300)
    along = float((run * ref).sum()) / max(float(run.norm()) * float(ref.norm()), 1e-300)
    return f"is no multiple of the reference (relative error {off:.2g}, cosine {along:.4f})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
