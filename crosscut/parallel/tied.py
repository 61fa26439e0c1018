"""A weight that two pipeline stages share: each has a part of its gradient, summed once a step between the two."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from crosscut.comm.context import Context
from crosscut.comm.group import Group
from crosscut.layout.plan import Plan
from crosscut.parallel.data import sum_over
from crosscut.parallel.store import Store
from crosscut.parallel.supported import DTYPES


class TiedEnds:
    """The groups of two between stages that share a weight. Collective to make: every rank helps to make all."""

    def __init__(self, plan: Plan, ctx: Context) -> None:
        self._plan, self._ctx = plan, ctx
        self._groups: dict[tuple[int, int], Group] = {}  # this rank's, by the two stages
        mesh = plan.layout.mesh
        for stages in sorted({tied.stages for tied in plan.tied}):
            if stages == (0, mesh.size("pp") - 1) and mesh.size("pp") == 2:
                self._groups[stages] = ctx.group("pp")
                continue
            for column in mesh.partition(("pp",)):
                pair = ctx.new_group(sorted(column[s] for s in stages), "pp")
                if ctx.rank in pair.ranks:
                    self._groups[stages] = pair

    def sum(self, params: Mapping[str, nn.Parameter], store: Store) -> None:
        """Sum the gradients, or what `store` has reduced of them, with the other end. params: those of this rank."""
        for tied in self._plan.tied:
            name = next((n for n in tied.names if n in params), None)
            if name is None or not params[name].requires_grad or self._ctx.coords["pp"] not in tied.stages:
                continue
            held = params[name]
            if name not in store.shards and held.grad is None:
                held.grad = torch.zeros_like(held)
            grad = store.reduced(name) if name in store.shards else held.grad
            assert grad is not None
            sum_over(self._groups[tied.stages], grad, DTYPES[self._plan.layout.precision.reduce], tied.tag)
