"""The explanations, each on tensors made to have just that fault."""

from __future__ import annotations

import pytest
import torch

from crosscut.testing.diagnose import explain, explain_loss, explain_norm, weights
from crosscut.testing.factors import Case, name_factor, proportion
from crosscut.testing.places import agreement

ROWS, COLUMNS = 7, 5


def tensor(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape or (ROWS, COLUMNS), generator=generator, dtype=torch.float64)
    return x + torch.arange(x.numel(), dtype=torch.float64).view(x.shape) / x.numel()


REF, BEFORE, OTHER = tensor(0), tensor(1), tensor(2)
SIZES = {"dp": 2, "tp": 3, "micro_batches": 4}
HALVES = {0: (((0, 4),), ((0, COLUMNS),)), 1: (((4, ROWS),), ((0, COLUMNS),))}
THREE = dict.fromkeys(range(3), (((0, ROWS),), ((0, COLUMNS),)))


def said(run: torch.Tensor, ref: torch.Tensor = REF, **more) -> str:  # type: ignore[no-untyped-def]
    return explain(Case(run, ref, sizes=SIZES, **more)).text


@pytest.mark.parametrize(
    "factor, name",
    [(2, "dp"), (1 / 2, "1/dp"), (3, "tp"), (1 / 3, "1/tp"), (6, "dp*tp"), (1 / 6, "1/(dp*tp)"), (1 / 9, "1/tp^2"),
     (1 / 24, "1/(dp*tp*micro_batches)"), (1 / 12, "1/(tp*micro_batches)")],
)  # fmt: skip
def test_exact_factors_are_named(factor: float, name: str) -> None:
    found = explain(Case(REF * factor, REF, sizes=SIZES))
    assert found.factor == pytest.approx(factor, rel=1e-12)
    assert found.factor_name == name
    assert f"x the reference on every element = {name}: " in found.text


def test_a_factor_that_two_axes_share_is_told_by_what_is_owed() -> None:
    both = {"dp": 2, "tp": 2}
    assert name_factor(0.5, both) == ["1/dp", "1/tp"]
    assert name_factor(0.5, both, ["tp"]) == ["1/tp"]
    assert name_factor(4.0, {"dp": 2, "tp": 2, "micro_batches": 4}) == ["micro_batches"]
    assert name_factor(0.7, both) == []


def test_other_factors_and_signs() -> None:
    assert said(REF * 0.7) == "is 0.7 x the reference on every element, which is no product of dp, tp, micro_batches"
    assert said(-REF).endswith("the sign is wrong")
    assert said(REF * 1.0000042).startswith("is 1.000004 x")
    almost = REF.clone()
    almost[0, 0] += 1e-3
    assert proportion(almost * 2, REF, 1e-9) is None
    assert proportion(REF * 2, torch.zeros_like(REF), 1e-9) is None


def test_nothing_and_nan() -> None:
    assert "no contribution arrived" in said(torch.zeros_like(REF))
    assert "frozen there" in explain(Case(REF, torch.zeros_like(REF))).text
    hole = REF.clone()
    hole[4:] = float("nan")
    assert (
        said(hole, held=HALVES)
        == "holds NaN or infinite values, or nothing at all in rows 4:7 of 7 (what rank 1 holds)"
    )


def test_stale_values() -> None:
    assert "a stale value" in said(BEFORE, before=BEFORE)
    assert said(REF + BEFORE, before=BEFORE).endswith("it was not set to zero between them")
    assert "plus 0.5 x that of the step before" in said(2 * REF + 0.5 * BEFORE, before=BEFORE)


def test_contributions() -> None:
    parts = {f"dp {i}": x for i, x in enumerate((tensor(5), tensor(6), tensor(7)))}
    total = torch.stack(list(parts.values())).sum(0)
    assert said(total - parts["dp 1"], total, parts=parts) == "lacks the contribution of dp 1"
    assert said(total + parts["dp 0"], total, parts=parts) == "counts that of dp 0 twice"
    moved = total + parts["dp 0"] - parts["dp 2"]
    assert said(moved, total, parts=parts) == "lacks the contribution of dp 2 and counts that of dp 0 twice"
    assert said(3 * parts["dp 2"], total, parts=parts).startswith("is 3 x the contribution of dp 2 alone")
    uneven = 1.5 * parts["dp 0"] + 0.5 * parts["dp 1"] + parts["dp 2"]
    assert "by other weights (dp 0: 1.5, dp 1: 0.5, dp 2: 1)" in said(uneven, total, parts=parts)
    tokens = {"dp 0": 2, "dp 1": 3, "dp 2": 7}
    means = sum((4 / tokens[n]) * x for n, x in parts.items())
    assert "is a mean of means" in said(means, total, parts=parts, tokens=tokens)  # type: ignore[arg-type]


def test_parts_that_do_not_tell_are_not_used() -> None:
    assert weights({"a": REF, "b": 2 * REF}, 3 * REF, 1e-9) is None
    assert weights({"a": REF}, REF, 1e-9) is None
    assert weights({"a": REF, "b": BEFORE}, OTHER, 1e-9) is None
    assert weights({"a": tensor(0, 1), "b": tensor(1, 1)}, tensor(2, 1), 1e-9) is None  # more parts than numbers


def test_places() -> None:
    part = REF.clone()
    part[4:] *= 1 / 3
    assert said(part, held=HALVES).startswith("is scaled by another factor on each part: rank 1 0.333333 x")
    wrong = REF.clone()
    wrong[4:6] = OTHER[4:6]
    assert said(wrong, held=HALVES) == "is wrong only in the part of rank 1 in rows 4:6 of 7"
    assert said(wrong) == "is wrong only in rows 4:6 of 7; the rest agrees"
    corner = REF.clone()
    corner[1:3, 2:4] = 0
    assert said(corner) == "is wrong only in rows 1:3 of 7, columns 2:4 of 5; the rest agrees"
    even = tensor(3, 6, 5)
    held = {0: (((0, 3),), ((0, 5),)), 1: (((3, 6),), ((0, 5),))}
    swapped = torch.cat([even[3:], even[:3]])
    text = said(swapped, even, held=held)
    assert text.startswith(
        "holds the right numbers in the wrong places: rank 0 has what rank 1 should have, rank 1 has"
    )
    assert "cosine" in said(OTHER)


def test_ranks_that_differ() -> None:
    one, two = tensor(8), tensor(9)
    coords = {0: {"dp": 0, "tp": 0}, 1: {"dp": 0, "tp": 1}, 2: {"dp": 1, "tp": 0}, 3: {"dp": 1, "tp": 1}}
    held = dict.fromkeys(range(4), THREE[0])
    values = {0: one, 1: two, 2: one, 3: two}
    text = said(one, one + two, values=values, held=held, coords=coords)
    assert text.startswith(
        "differs between ranks 0,2 and ranks 1,3, which hold the same part; their sum is the reference"
    )
    assert text.endswith(": the sum over tp is missing")
    text = said(one, (one + two) / 2, values=values, held=held, coords=coords)
    assert text.endswith("their mean is the reference: the average over tp is missing")
    text = said(REF, REF, values={0: REF, 1: REF, 2: OTHER}, held=THREE)
    assert text.endswith("ranks 0,1 has it right, rank 2 wrong")
    still = {0: REF, 1: torch.zeros_like(REF)}  # a rank that made no step, of a bias that began at zero
    assert said(REF, REF, values=still, held=THREE, kind="parameter").endswith("rank 0 has it right, rank 1 wrong")
    assert said(REF, REF, values=still, held=THREE).endswith("the sum over the ranks is missing")
    assert "different factors" in said(REF, REF, values={0: REF * 2, 1: REF * 5}, held=THREE)
    assert "drifted apart over the ranks" in said(REF, REF, values={0: OTHER, 1: BEFORE}, held=THREE)
    assert agreement({0: one, 1: two, 2: one.clone()}) == [[0, 2], [1]]


def test_losses() -> None:
    shares = {"dp 0": (2.0, 10), "dp 1": (3.0, 30)}
    ref = (2.0 * 10 + 3.0 * 30) / 40
    case = Case(torch.tensor(0.0), torch.tensor(ref), "loss", SIZES)
    assert "is a mean of means" in explain_loss(2.5, ref, shares, case).text
    assert explain_loss(3.0, ref, shares, case).text == "is that of dp 1 alone: the others are missing"
    assert explain_loss(ref - 0.5, ref, shares, case).text == "lacks the contribution of dp 0"
    assert "not divided by their number" in explain_loss(ref * 40, ref, shares, case).text
    assert explain_loss(ref * 2, ref, shares, case).factor_name == "dp"


def test_norms() -> None:
    squares = {"a": 3.0, "b": 5.0, "c": 7.0}
    whole = {0: {n: (THREE[0], s) for n, s in squares.items()}}
    ref = sum(squares.values()) ** 0.5

    def text(square: float, held=whole, coords=None, values=None) -> str:  # type: ignore[no-untyped-def]
        run, right = torch.tensor(square**0.5, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
        return explain_norm(Case(run, right, "norm", SIZES, coords=coords or {}, values=values or {}), held).text

    assert text(12.0) == "leaves out a"
    assert text(22.0) == "counts c 2 times"
    assert "root is missing" in text(15.0**2)
    two = {r: {n: (THREE[0], s) for n, s in squares.items()} for r in range(2)}
    at = {0: {"dp": 0, "tp": 0}, 1: {"dp": 1, "tp": 0}}
    assert "once on each of them" in text(30.0, two, at)
    cut = {0: {"a": (HALVES[0], 3.0), "b": (THREE[0], 2.5)}, 1: {"c": (HALVES[1], 7.0), "b": (THREE[0], 2.5)}}
    cut[0]["b"] = cut[1]["b"] = (THREE[0], 5.0)
    assert "what rank 1 holds alone" in text(12.0, {0: cut[0], 1: cut[1]}, at)
    values = {r: torch.tensor(sum(s for _, s in cut[r].values()) ** 0.5, dtype=torch.float64) for r in cut}
    assert text(8.0, cut, at, values).startswith("differs between the ranks: each measured what it holds alone")


def test_norms_that_miss_or_repeat_an_axis() -> None:
    coords = {r: {"dp": r // 2, "tp": r % 2} for r in range(4)}
    part = {r: (((r, r + 1),),) for r in range(4)}
    quarters = {r: {"a": (part[r], float(2**r))} for r in range(4)}  # cut over both: 1 + 2 + 4 + 8
    halves = {
        r: {"a": (part[r % 2], (3.0, 5.0)[r % 2]), "c": (part[0], 7.0)} for r in range(4)
    }  # a over tp, c over none

    def text(square: float, total: float, held) -> str:  # type: ignore[no-untyped-def]
        run, ref = (torch.tensor(x**0.5, dtype=torch.float64) for x in (square, total))
        return explain_norm(Case(run, ref, "norm", {"dp": 2, "tp": 2}, coords=coords), held).text

    assert text(1.0 + 4.0, 15.0, quarters) == "leaves out what tp > 0 holds: it is not summed over tp"
    assert text(1.0 + 2.0, 15.0, quarters) == "leaves out what dp > 0 holds: it is not summed over dp"
    assert text(30.0, 15.0, halves) == "counts what dp replicates 2 times"
    assert text(3.0 + 5.0 + 2 * 7.0, 15.0, halves) == "counts what tp replicates 2 times"
