"""The evidence for the bounds below fp64 (the tables of docs/parity.md): thousands of correct runs, and the mutations.

Run: python -m tests.testing.noise_evidence [RUNS [DTYPE]]      (RUNS a model, default 500: about three minutes; fp32)

Correct runs: the one-device step with rows in other random orders, in other numbers of pieces, with products split
otherwise than in the runs that set the bound; then layouts of the small matrix. Each tensor's error is a fraction of
its bound.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from crosscut.layout.layout import Layout
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.parallel.supported import DTYPES
from crosscut.testing import matrix
from crosscut.testing.noise import ORDERS, noisy_reference, reordered
from crosscut.testing.verdict import NOISE_FACTOR, compare


def correct_runs(runs: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, list[float]]]:
    """(model, the error of every tensor of every run as a fraction of its bound)."""
    found = []
    layout = Layout.of("dp=2", micro_batches=4)
    for kind, turn in (("transformer", 0), ("transformer", 2), ("transformer", 4), ("mlp", 0), ("mlp", 1)):
        sizes = {**matrix.sizes_for(kind, layout, turn)}
        cfg: Any = MLPConfig(**sizes) if kind == "mlp" else TransformerConfig(**sizes)
        build, _, loss_fn = matrix.model_of(cfg)
        data = matrix.batches_for(kind, cfg, layout, 2, rows_each=2)
        ref, bounds = noisy_reference(build, data, loss_fn, dtype)
        errors = []
        for i in range(runs):
            pieces, split = 1 + i % 9, 1 + i % 5
            run = reordered(build, data, loss_fn, dtype, len(ORDERS) + i, pieces, split)
            errors += [d.error_over_bound for d in compare(ref, run, bounds)]
        found.append((f"{kind} {turn}", errors))
    return found


def layouts(seeds: int, dtype: str) -> list[float]:
    """The largest error over its bound of each layout of the small matrix, for some seeds."""
    found = []
    for seed in range(seeds):
        for row in matrix.run_matrix(matrix.small(), dtype=dtype, seed=seed):
            if row.outcome != "refused":
                assert row.outcome == "equal", (row.cell, row.why)
                assert row.verdict is not None
                found.append(row.verdict.worst.error_over_bound)
    return found


def mutations(dtype: str) -> list[tuple[str, float]]:
    """(bug, the largest error over its bound), the smallest first."""
    from tests.mutations.bugs import BUGS
    from tests.mutations.score import try_bug

    results = [try_bug(bug, dtype=dtype) for bug in BUGS]
    return sorted(
        ((r.bug.name, r.error_over_bound) for r in results if r.found in ("parity", "")), key=lambda pair: pair[1]
    )


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def main(runs: int, dtype: str) -> None:
    torch.set_num_threads(1)
    print(f"k = {NOISE_FACTOR:g}, {dtype}\n")
    print("| correct runs | runs | tensors | median | 99.9% | largest |")
    print("|---|---|---|---|---|---|")
    for name, errors in correct_runs(runs, DTYPES[dtype]):
        print(f"| {name}, one device, reordered | {runs:,} | {len(errors):,} | {quantile(errors, 0.5):.3f} | "
              f"{quantile(errors, 0.999):.3f} | {max(errors):.3f} |")  # fmt: skip
    worst = layouts(3, dtype)
    print(f"| layouts of the small matrix, 3 seeds (the largest of each) | {len(worst)} | - | "
          f"{quantile(worst, 0.5):.3f} | {quantile(worst, 0.999):.3f} | {max(worst):.3f} |")  # fmt: skip
    found = mutations(dtype)
    print(f"\n{len(found)} mutations that only parity sees: the smallest largest errors are")
    for name, error in found[:5]:
        print(f"| {name} | {error:.3g} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500, sys.argv[2] if len(sys.argv) > 2 else "fp32")
