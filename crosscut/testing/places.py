"""Where a tensor is wrong: which rank's part, which rows; and which ranks differ that should agree. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from crosscut.testing.factors import Case, Finding, Ranges, proportion, ranks_text


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


def by_place(run: Tensor, ref: Tensor, case: Case) -> Finding | None:
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
            said = "; ".join(f"{ranks_text(r)} {f:.6g} x" for r, f in list(factors.items())[:8])
            rest = "" if len(wrong) == len(ours) else ", the other parts are right"
            return Finding(f"is scaled by another factor on each part: {said} the reference{rest}")
        if len(wrong) < len(ours):
            names = " and ".join(ranks_text(r) for r in wrong[:4])
            inside = describe_box(box_of_error(run, ref, case.tol), tuple(ref.shape), {})
            return Finding(f"is wrong only in the part of {names}{inside}")
    where = describe_box(box_of_error(run, ref, case.tol), tuple(ref.shape), case.held)
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
        moves.append(f"{ranks_text(ranks)} has what {ranks_text(source)} should have")
    return ", ".join(moves[:8])


def box_of_error(run: Tensor, ref: Tensor, tol: float) -> tuple[tuple[int, int], ...]:
    """Per dim the [start, stop) around the elements that are off by more than rounding."""
    off = (run - ref).abs()
    return box_of_mask(off > max(1e-6 * float(off.max()), tol * float(ref.abs().max())))


def box_of_mask(mask: Tensor) -> tuple[tuple[int, int], ...]:
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
    return f" in {', '.join(said)}" + (f" (what {ranks_text(owners)} holds)" if owners else "")


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


def ranks_differ(case: Case) -> Finding:
    """Why ranks that hold the same part have different values: a sum or an average that is missing, or who is wrong."""
    groups = agreement(case.values)
    over = _separating_axes(groups, case.coords)
    label = "+".join(over) or "the ranks"
    said = f"differs between {' and '.join(ranks_text(g) for g in groups[:4])}, which hold the same part"
    one = {tuple(g): case.values[g[0]].double() for g in groups}
    first = next(iter(one.values()))
    ref = cut_out(case.ref.double(), case.held[groups[0][0]]) if groups[0][0] in case.held else case.ref.double()
    if ref.shape == first.shape and len({v.shape for v in one.values()}) == 1:
        total = torch.stack(list(one.values())).sum(0)
        near = case.tol * max(float(ref.norm()), 1e-300)
        right = [g for g, v in one.items() if float((v - ref).norm()) <= near]
        some_right = bool(right) and len(right) < len(one)
        # A parameter is no sum: where it began at zero, that of the ranks that made no step adds nothing.
        sums = () if some_right and case.kind == "parameter" else (("sum", total), ("mean", total / len(one)))
        for word, value in sums:
            off = float((value - ref).norm())
            if off <= near and 4 * off <= max(float((v - ref).norm()) for v in one.values()):
                action = "sum" if word == "sum" else "average"
                return Finding(f"{said}; their {word} is the reference: the {action} over {label} is missing")
        if some_right:
            wrong = " and ".join(ranks_text(g) for g in one if g not in right)
            return Finding(f"{said}; {ranks_text([r for g in right for r in g])} has it right, {wrong} wrong")
        factors = {g: proportion(v, ref, case.tol) for g, v in one.items()}
        if all(f is not None for f in factors.values()):
            each = ", ".join(f"{f:.6g} x the reference on {ranks_text(g)}" for g, f in list(factors.items())[:4])
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
