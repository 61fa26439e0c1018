"""What the boundaries of a model give out in its first step, and the gradients of that: where a forward first goes
wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.layout.plan import Plan
from crosscut.layout.sites import outside
from crosscut.parallel.distribute import DistributedModel
from crosscut.testing.verdict import Part


class Probes:
    """Hooks on modules that keep a copy of each output (one a micro-batch, in order) and of its gradient."""

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self.grads: dict[str, dict[int, Tensor]] = {}
        self._hooks = [m.register_forward_hook(self._hook(name)) for name, m in (modules or {}).items()]

    def _hook(self, name: str) -> Any:
        outputs, grads = self.outputs.setdefault(name, []), self.grads.setdefault(name, {})

        def keep(_: nn.Module, args: Any, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            index = len(outputs)
            outputs.append(x.detach().clone())
            if x.requires_grad:
                x.register_hook(lambda grad: grads.__setitem__(index, grad.detach().clone()))

        return keep

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def whole(self) -> dict[str, dict[str, Tensor]]:
        """`outputs` and `output_grads` of a run in one piece."""
        outputs = {n: x[0] for n, x in self.outputs.items() if x}
        return {"outputs": outputs, "output_grads": {n: g[0] for n, g in self.grads.items() if g}}

    def parts(self, plan: Plan, coords: Mapping[str, int]) -> dict[str, dict[str, Part]]:
        """`outputs` and `output_grads` of a rank, each with where it is in the whole batch's."""
        layout, sites = plan.layout, {site.module: site for site in plan.sites}
        outputs, grads = {}, {}
        for name, found in self.outputs.items():
            micro = found[: layout.micro_batches]  # a recomputed forward comes after them
            if len(micro) < layout.micro_batches:
                continue
            shape, ranges = [], []
            for d, axes in enumerate(outside(sites[name].out_dims, layout)):
                index, count = 0, 1
                for axis in axes:  # outermost first
                    index, count = index * layout.mesh.size(axis) + coords[axis], count * layout.mesh.size(axis)
                width, times = micro[0].size(d), layout.micro_batches if d == 0 else 1
                shape.append(width * count * times)
                ranges.append(tuple(((m * count + index) * width, (m * count + index + 1) * width)
                                    for m in range(times)))  # fmt: skip
            outputs[name] = (tuple(shape), tuple(ranges), torch.cat(micro))
            if len(self.grads[name]) >= layout.micro_batches:
                ordered = [self.grads[name][m] for m in range(layout.micro_batches)]
                grads[name] = (tuple(shape), tuple(ranges), torch.cat(ordered))
        return {"outputs": outputs, "output_grads": grads}


def of_module(module: nn.Module, plan: Plan) -> Probes:
    """Probes on the boundaries of a whole model."""
    return Probes({site.module: module.get_submodule(site.module) for site in plan.sites})


def of_rank(model: DistributedModel) -> Probes:
    """Probes on the boundaries that a rank's stage holds; none where the sequence is cut in another order than it
    runs (context parallelism)."""
    if model.layout.mesh.size("cp") > 1:
        return Probes()
    held, mesh = dict(model.module.named_modules()), model.layout.mesh
    ours = [s.module for s in model.plan.sites if s.stage % mesh.size("pp") == model.ctx.coords["pp"]]
    return Probes({name: held[name] for name in ours if name in held})
