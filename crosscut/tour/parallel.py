"""One step of a small deep MLP under data, tensor or pipeline parallelism, rank by rank, and on one device.

The ranks run the engine (`distribute`); the one device runs plain PyTorch. Both start from the same weights and batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crosscut.comm.context import Context
from crosscut.comm.launch import spawn
from crosscut.comm.ledger import Ledger
from crosscut.layout.layout import Layout
from crosscut.models.config import MLPConfig
from crosscut.models.dims import mlp_dims
from crosscut.models.mlp import MLP, mean_square
from crosscut.parallel.batch import local_batch
from crosscut.parallel.distribute import distribute
from crosscut.parallel.pipeline import Lists, build
from crosscut.testing.parity import FP64_BOUND, Difference, RankReport, Trace, assemble, compare, single_device

LEARNING_RATE = 0.1
NUM_LAYERS = 4


@dataclass(frozen=True)
class Sent:
    """What one rank handed to one kind of call, counted and predicted. `what`: the rule's site and phase."""

    what: str
    op: str
    axis: str
    calls: int
    bytes: int
    predicted_bytes: int


@dataclass(frozen=True)
class RankStep:
    """One rank's step. rows: the rows of the batch it computed on; own_loss: their loss, if it has whole layers."""

    rows: tuple[int, ...]
    own_loss: float | None
    report: RankReport
    sent: tuple[Sent, ...]

    def held(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """Per tensor dim the [start, stop) of parameter `name` that the rank holds; None if it holds nothing of it."""
        if name not in self.report.params:
            return None
        param = self.report.plan.params[name]
        ranges = param.ranges(self.report.coords, self.report.plan.layout.mesh.sizes)
        return tuple((dim[0][0], dim[-1][1]) for dim in ranges)


@dataclass(frozen=True)
class Step:
    """The step of every rank (`ranks`), put together (`whole`), and on one device; `lists`: the schedule, under pp."""

    name: str
    backend: str
    cfg: MLPConfig
    layout: Layout
    batch: int
    ranks: tuple[RankStep, ...]
    whole: Trace
    one_device: Trace
    differences: tuple[Difference, ...]
    lists: Lists | None

    @property
    def is_equal(self) -> bool:
        """Whether every compared number lies within the bound."""
        return all(d.error_over_bound <= 1 for d in self.differences)

    def largest(self, kind: str) -> float:
        """The largest relative difference of a kind: "loss", "norm", "gradient" or "parameter"."""
        return max(d.error_over_bound for d in self.differences if d.kind == kind) * FP64_BOUND


def sizes(name: str, world_size: int, micro_batches: int, form: str) -> tuple[MLPConfig, Layout, int]:
    """(model, layout, rows of the batch) of the tour: small, and dividing by the world size."""
    layers = -(-NUM_LAYERS // world_size) * world_size if name == "pp" else NUM_LAYERS
    dim = -(-8 // world_size) * world_size if name == "tp" else 8
    micro = micro_batches if name == "pp" else 1
    batch = 2 * (world_size if name == "dp" else micro if name == "pp" else 4)
    layout = Layout.of({name: world_size}, micro_batches=micro, compute="fp64")
    return MLPConfig(dim=dim, layers=layers, form=form if name == "tp" else "gather"), layout, batch


def run(
    name: str,
    world_size: int,
    backend: str = "threads",
    *,
    form: str = "gather",
    schedule: str = "1f1b",
    micro_batches: int = 4,
) -> Step:
    """Run the tour `name` ("dp", "tp" or "pp") in fp64 on `world_size` ranks and on one device.

    form: how tp cuts the MLP, "gather" (gather after every layer) or "pairs". schedule, micro_batches: of pp. Raises
    ValueError for what the layout or the schedule refuses.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} must be at least 1")
    lists = build(schedule, world_size, micro_batches) if name == "pp" else None  # an unknown name fails here
    cfg, layout, batch = sizes(name, world_size, micro_batches, form)
    if name == "pp":
        layout = layout.adjusted(schedule=schedule)
    inputs = torch.randn(batch, cfg.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ranks = spawn(_rank_step, cfg, layout, inputs, world_size=world_size, backend=backend)
    whole = assemble([rank.report for rank in ranks])
    one_device = single_device(partial(MLP, cfg), [(inputs, None)], mean_square, lr=LEARNING_RATE)
    differences = tuple(compare(one_device, whole))
    return Step(name, backend, cfg, layout, batch, tuple(ranks), whole, one_device, differences, lists)


def _rank_step(ctx: Context, cfg: MLPConfig, layout: Layout, inputs: Tensor) -> RankStep:
    """One optimizer step on this rank, and everything the tour tells of it."""
    model = distribute(partial(MLP, cfg), mlp_dims(cfg), layout, ctx, loss_fn=mean_square, bucket_bytes=0)
    optimizer = model.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
    batch = local_batch(inputs, None, layout, ctx)
    row_numbers = local_batch(torch.arange(inputs.size(0)), None, layout, ctx)
    rows = tuple(int(row) for micro in row_numbers.micro for row in micro.inputs)
    own_loss = None
    if layout.mesh.size("dp") == ctx.world_size > 1:
        with torch.no_grad():  # all layers are here, whole: the rank can tell the loss of its own rows
            own_loss = float(mean_square(model.module(batch.micro[0].inputs)))
    earlier = ctx.ledger.copy()
    loss = model.forward_backward(batch).loss
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = float(model.clip_grad_norm_(None))
    optimizer.step()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    counted = ctx.ledger - earlier
    ranges = {name: model.held_ranges(name) for name in params}
    report = RankReport(
        model.plan, ctx.coords, [loss], [norm], [grads], params, ranges, counted.totals("step"), counted.by_tag("step")
    )
    return RankStep(rows, own_loss, report, _sent(report, counted))


def _sent(report: RankReport, counted: Ledger) -> tuple[Sent, ...]:
    """What was counted beside what was predicted, by site, phase and op; a gradient's own name is left out."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for tag, ops in counted.by_tag("step").items():
        for (axis, op), (calls, num_bytes) in ops.items():
            row = rows.setdefault((_what(tag), op, axis), [0, 0, 0])
            row[0] += calls
            row[1] += num_bytes
    for rule in report.plan.rules(report.coords["pp"]):
        rows.setdefault((_what(rule.tag), rule.op, rule.axis), [0, 0, 0])[2] += rule.bytes
    return tuple(Sent(what, op, axis, *numbers) for (what, op, axis), numbers in rows.items())


def _what(tag: str) -> str:
    """`layers.1/forward/exit` -> `layers forward`, `gradients/step` -> `gradients`: a row of what is printed."""
    site, phase = tag.split("/")[:2]
    site = {"clip": "gradient norm"}.get(site, "layers" if site.startswith("layers") else site)
    return f"{site} {phase}" if phase in ("forward", "backward") else site


def to_json(step: Step) -> dict[str, Any]:
    """The body of `--json`: one of `rows` a rank; `one_device` and `differences` (relative) beside them."""
    rows = [
        {
            "rank": rank,
            "coords": r.report.coords,
            "batch_rows": list(r.rows),
            "own_loss": r.own_loss,
            "loss": r.report.losses[0],
            "grad_norm": r.report.norms[0],
            "parameters": {name: r.held(name) for name in r.report.params},
            "gradient_norms": norms(r.report.grads[0]),
            "sent": [asdict(sent) for sent in r.sent],
        }
        for rank, r in enumerate(step.ranks)
    ]
    return {
        "layout": step.layout.describe(),
        "backend": step.backend,
        "model": asdict(step.cfg),
        "global_batch_size": step.batch,
        "rows": rows,
        "one_device": {
            "loss": step.one_device.losses[0],
            "grad_norm": step.one_device.norms[0],
            "gradient_norms": norms(step.one_device.grads[0]),
        },
        "differences": {kind: step.largest(kind) for kind in ("loss", "norm", "gradient", "parameter")},
        "bound": FP64_BOUND,
        "equal": step.is_equal,
    }


def norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The 2-norm of each tensor."""
    return {name: float(x.norm()) for name, x in tensors.items()}
