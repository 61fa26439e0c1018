"""What is wrong with a tensor that should equal another one. Pure functions over tensors: no ranks, no files.

Wrong parallel code leaves signatures. A forgotten or doubled sum is an exact factor (factors.py); a lost micro-batch is
a sum of the other parts; a forgotten `zero_grad` is this step plus the one before; a rank that took another's slice
shows where it is (places.py). `explain` tries them in turn and returns a sentence about the first that fits to
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from crosscut.testing.factors import Case, Finding, Ranges, factor_finding, listed, proportion, widened
from crosscut.testing.places import box_of_mask, by_place, describe_box, ranks_differ


def explain(case: Case) -> Finding:
    """The first explanation of `case.run` that fits, from the most telling to the least."""
    run, ref, tol = case.run.double(), case.ref.double(), case.tol
    if case.values:
        return ranks_differ(case)
    if not bool(run.isfinite().all()):
        where = describe_box(box_of_mask(~run.isfinite()), tuple(ref.shape), case.held)
        return Finding(f"holds NaN or infinite values, or nothing at all{where}")
    scale = float(ref.norm())
    if scale == 0:
        return Finding("is not zero, where the reference is (frozen there, or without a gradient)")
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
    return by_place(run, ref, case) or Finding(_general(run, ref))


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
    near = widened(tol, 1e3)
    means = [found[name] * tokens.get(name, 0) for name in found]
    if len({tokens.get(name) for name in found}) > 1 and means[0] and max(means) - min(means) <= near * means[0]:
        return f"is a mean of means: {_unequal({n: tokens[n] for n in found})}, and each counts the same"
    lost = [name for name, w in found.items() if abs(w) <= near]
    twice = [name for name, w in found.items() if abs(w - 2) <= near]
    right = [name for name, w in found.items() if abs(w - 1) <= near]
    if len(lost) + len(twice) + len(right) == len(found):
        said = [f"lacks the contribution of {listed(lost)}"] * bool(lost)
        said += [f"counts that of {listed(twice)} twice"] * bool(twice)
        return " and ".join(said) or "is the sum of the right contributions"
    if len(right) == 0 and len(lost) == len(found) - 1:
        name, w = next((n, w) for n, w in found.items() if abs(w) > near)
        return f"is {w:.6g} x the contribution of {name} alone: the others are missing"
    some = ", ".join(f"{name}: {w:.4g}" for name, w in list(found.items())[:8])
    return f"weighs contributions that should each count once by other weights ({some})"


def _stale(found: Mapping[str, float], tol: float) -> str:
    near = widened(tol, 1e3)
    now, before = found.get("now", 0.0), found.get("before", 0.0)
    if abs(now) <= near and abs(before - 1) <= near:
        return "is that of the step before: a stale value"
    if abs(now - 1) <= near:
        times = "" if abs(before - 1) <= near else f"{round(before, 6):g} x "
        return f"is the sum of this step's and {times}that of the step before: it was not set to zero between them"
    return f"is {now:.6g} x this step's reference plus {before:.6g} x that of the step before"


# ---- numbers -------------------------------------------------------------------------------------------------------

Squares = Mapping[int, Mapping[str, tuple[Ranges, float]]]  # rank -> gradient -> (the part it holds, its square)


def explain_loss(run: float, ref: float, shares: Mapping[str, tuple[float, int]], case: Case) -> Finding:
    """Why a loss is wrong. shares: name of a part of the batch -> (its mean loss, its tokens)."""
    # What explains a wrong number is nearer to it than the right one is, however noisy both are.
    near = min(widened(case.tol, 10, 1e-9) * abs(ref), abs(run - ref) / 4)
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


def explain_norm(case: Case, held: Squares) -> Finding:
    """Why a gradient norm is wrong. held: the squares of the reference's gradients, by part as the ranks hold them.

    Tried are the norms that wrong sums would give: one rank's alone, everything once a rank, an axis left out or
    counted again, one gradient left out or counted twice.
    """
    run, ref, near = float(case.run), float(case.ref), widened(case.tol, 10, 1e-9)
    own = {rank: sum(square for _, square in squares.values()) for rank, squares in held.items()}
    if case.values:
        if all(abs(float(x) ** 2 - own.get(rank, 0.0)) <= near * float(x) ** 2 for rank, x in case.values.items()):
            return Finding("differs between the ranks: each measured what it holds alone, not summed over the ranks")
        return ranks_differ(case)
    guesses: list[tuple[str, float]] = [("is the square of the norm: the root is missing", ref**4)]
    for rank, square in own.items():
        guesses.append((f"is the norm of what rank {rank} holds alone: it is not summed over the ranks", square))
    guesses.append(("counts what several ranks hold once on each of them", sum(own.values())))
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
        off = min(near * max(square, 1e-300), abs(run * run - total) / 4)
        if abs(square - total) > near * total and abs(run * run - square) <= off:
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
