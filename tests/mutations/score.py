"""Plants every bug of bugs.py, one at a time, and says who found it and whether its factor was named.

Run: python -m tests.mutations.score [NAME ...]
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from crosscut.comm.errors import CommError, RankError
from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.parallel import distribute as engine
from crosscut.parallel.supported import DTYPES
from crosscut.testing import matrix
from crosscut.testing.noise import noisy_reference
from crosscut.testing.parity import check_parity
from crosscut.testing.verdict import FP64_BOUND
from tests.mutations.bugs import BUGS, Bug


@dataclass(frozen=True)
class Result:
    """found: "checker", "parity", "error" or "" (it escaped). named: whether what it must say was said."""

    bug: Bug
    found: str
    text: str
    named: bool
    error_over_bound: float = float("inf")

    @property
    def good(self) -> bool:
        return bool(self.found) and self.named


def try_bug(bug: Bug, dtype: str = "fp64", seed: bool = True) -> Result:
    """Run two steps with the bug in place (seed=False: without it)."""
    kind = bug.model.get("kind", "transformer")
    layout = Layout.of(bug.mesh, compute=dtype, **bug.options)
    sizes = matrix.sizes_for(kind, layout)
    sizes.update({k: v for k, v in bug.model.items() if k != "kind"})
    cfg: Any = MLPConfig(**sizes) if kind == "mlp" else TransformerConfig(**sizes)
    build, spec, loss_fn = matrix.model_of(cfg)
    data = matrix.batches_for(kind, cfg, layout, steps=2, rows_each=2)
    options: dict[str, Any] = {"max_norm": 0.05}
    bound: Any = FP64_BOUND
    ref = None
    if dtype != "fp64":
        ref, bound = noisy_reference(build, data, loss_fn, DTYPES[dtype], **options)
    patch = pytest.MonkeyPatch()
    engine.derive.cache_clear()
    try:
        if seed:
            bug.seed(patch)
        verdict, _ = check_parity(
            build, spec.dims, data, layout, loss_fn=loss_fn, ref=ref, bound=bound, bucket_bytes=400, **options
        )
    except (LayoutError, CommError, RankError, AssertionError) as error:
        found = "checker" if isinstance(error, (LayoutError, RankError)) and "LayoutError" in repr(error) else "error"
        return Result(bug, found, str(error), bool(re.search(bug.says, str(error))))
    finally:
        patch.undo()
        getattr(engine.derive, "cache_clear", lambda: None)()
    if verdict.equal:
        return Result(bug, "", verdict.sentence(), False, verdict.worst.error_over_bound)
    first = [f for f in verdict.failures if f.step == verdict.failures[0].step]
    text = next((str(f) for f in first if bug.says and re.search(bug.says, str(f))), verdict.sentence())
    return Result(bug, "parity", text, bool(re.search(bug.says, text)), verdict.worst.error_over_bound)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    results = [try_bug(bug) for bug in BUGS if not names or bug.name in names]
    for r in results:
        mark = "ESCAPED" if not r.found else "not named" if not r.named else r.found
        print(f"{mark:10} {r.bug.kind:15} {r.bug.name}: {r.text[:230]}")
    named = [r for r in results if r.bug.says]
    caught = sum(bool(r.found) for r in results)
    print(f"caught {caught}/{len(results)}, named {sum(r.named for r in named)}/{len(named)}")
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
