"""What this engine cannot execute yet, refused by name. Such a layout can still be explained and priced."""

from __future__ import annotations

import torch

from crosscut.layout.layout import Layout

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def refuse_unsupported(layout: Layout) -> None:
    """Raise ValueError naming what the layout asks for and the engine cannot do."""
    for axis in ("cp",):
        if layout.mesh.size(axis) > 1:
            raise ValueError(
                f"mesh axis {axis}={layout.mesh.size(axis)} cannot be executed yet (explain shows it); use dp, tp "
                f"and pp"
            )
    if layout.recompute.policy != "none" or layout.recompute.regather:
        raise ValueError(f'recompute policy {layout.recompute.policy!r} cannot be executed yet; use policy = "none"')
    for key, dtype in (("compute", layout.precision.compute), ("reduce", layout.precision.reduce)):
        if dtype not in DTYPES:  # fp16
            raise ValueError(
                f"precision {key}={dtype!r} cannot be executed yet: small gradients vanish in it, and the loss is not "
                f"scaled; use bf16"
            )
