"""The crosscut runs that faults are injected into: a deep MLP under a layout, in a loop of its own."""

import random
import time
from dataclasses import dataclass

import torch

import crosscut
from crosscut.models.mlp import mean_square
from tests.parallel.models import feature_batches, mlp

from .inject import RANDOM
from .programs import STEPS, Slow


@dataclass
class Run:
    """A layout on a back end; `calls`: the loop makes calls of its own beside those of the engine."""

    mesh: str
    backend: str = "shm"
    zero: int = 0
    calls: bool = False

    def __call__(self, inject, folder):
        crosscut.spawn(_engine, self, inject, folder, backend=self.backend)


def _engine(ctx, run, inject, folder):
    build, dims = mlp("gather")
    layout = crosscut.Layout.of(run.mesh, zero=run.zero, micro_batches=2)
    model = crosscut.distribute(build, dims, layout, ctx, loss_fn=mean_square)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    (x, _), *_ = feature_batches(24, 24)
    slow = inject.has("slow", "uniform")
    if slow and "pp" in run.mesh:  # what is slow is the link that a rank sends activations over
        group = ctx.group("pp")
        group._backend = Slow(group._backend, 1.5 if inject.slow() > 1 else 1.0)
    for step in range(24 if slow else STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        if slow and "pp" not in run.mesh:
            time.sleep(0.040 * inject.slow())
        model.forward_backward(crosscut.local_batch(x, None, layout, ctx))
        if fault != "skip":
            model.clip_grad_norm_(1.0)
        if fault == "extra":
            ctx.barrier()
        if fault != "no step":
            optimizer.step()
        optimizer.zero_grad()
        if run.calls:
            _calls(ctx.group("dp"), fault)
        if inject.has(*RANDOM) and random.random() < 0.5:
            ctx.barrier()
        if step % 2 and ctx.rank == 0:
            (folder / "saved").write_text(str(step + 1))
    ctx.barrier()


def _calls(group, fault):
    """What a loop adds up for its report, by hand."""
    group.broadcast(torch.ones(3), src=1 if fault == "root" else 0, kind="control")
    shape = (9,) if fault == "shape" else (2, 3) if fault == "view" else (6,)
    x = torch.ones(shape, dtype=torch.int32 if fault == "dtype" else torch.float32)
    if fault == "branch":
        group.broadcast(x, kind="control")
    else:
        for part in (torch.ones(6), x) if fault == "swap" else (x, torch.ones(6)):
            tag = "tokens" if part is x else "loss"
            group.all_reduce(part, "max" if fault == "op" and part is x else "sum", kind="control", tag=tag)
    rows = [2] * group.size
    if fault == "splits":
        rows[0], rows[2] = 1, 3
    group.all_to_all(torch.ones(sum(rows)), rows, [2] * group.size, kind="control")
