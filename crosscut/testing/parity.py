"""Does a layout compute the single-device step? Loss, norm, every gradient and updated parameter, by name.

The reference is plain PyTorch on one device: the model's own forward, the loss's own mean over the whole batch, an
ordinary optimizer. The layout runs in the threads world (or any back end) and its shards are put together by logical
name. SGD, since Adam would forgive a wrong scale. How two runs are compared: crosscut/testing/verdict.py; how far
correct ones are apart below fp64: crosscut/testing/noise.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.comm.context import Context
from crosscut.comm.launch import spawn
from crosscut.layout.layout import Layout
from crosscut.layout.plan import Plan
from crosscut.layout.spec import Dims
from crosscut.models.init import draw
from crosscut.parallel.batch import IGNORE, local_batch
from crosscut.parallel.distribute import DistributedModel, LossFn, distribute
from crosscut.parallel.supported import DTYPES
from crosscut.testing import probes
from crosscut.testing.factors import MICRO, Ranges
from crosscut.testing.verdict import (
    FP64_BOUND,
    Difference,
    Evidence,
    Key,
    Part,
    Share,
    Trace,
    Verdict,
    compare,
    judge,
    put_together,
)  # fmt: skip

Builder = Callable[[], nn.Module]
GlobalBatch = tuple[Tensor, Tensor | None]


class OneDevice:
    """The reference: one plain module, whole batches, SGD. `step` runs forward, backward and the update.

    A `dtype` narrower than fp32 is that of the module alone. `params`, which the optimizer works on and whose gradients
    add up, and what the loss is made of are fp32 then, as under a layout (Micikevicius et al. 2018, arXiv:1710.03740).
    """

    def __init__(
        self, build: Builder, loss_fn: LossFn, *, lr: float = 0.1, max_norm: float | None = None, seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        self.wide = torch.promote_types(dtype, torch.float32)
        self.module = whole_module(build, seed).to(self.wide)
        self.params = dict(self.module.named_parameters())
        if dtype != self.wide:
            self.params = {n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in self.params.items()}
            self.module.to(dtype)
        self.optimizer = torch.optim.SGD(self.params.values(), lr=lr)
        self.loss_fn, self.max_norm, self.dtype = loss_fn, max_norm, dtype
        self.trace = Trace()

    def cast(self, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
        """Inputs in the run's dtype, and the labels (the inputs for a loss without labels)."""
        inputs = batch[0].to(self.dtype) if batch[0].is_floating_point() else batch[0]
        return inputs, inputs if batch[1] is None else batch[1]

    def backward(self, batch: GlobalBatch, rows: Sequence[Tensor] = ()) -> float:
        """Gradients of the mean loss of the batch: in one piece, or added up over pieces, each of some `rows`."""
        inputs, labels = self.cast(batch)
        self.optimizer.zero_grad()
        if not rows:
            return self._add(inputs, labels, 1.0)
        total = num_terms(labels)
        added = 0.0
        for piece in rows:
            count = num_terms(labels[piece])
            if count:
                added += self._add(inputs[piece], labels[piece], count / total)
        return added

    def _add(self, inputs: Tensor, labels: Tensor, weight: float) -> float:
        """Add the gradients of `weight` times the mean loss of a piece; returns that product."""
        output = self.module(inputs)
        loss = self.loss_fn(output if self.dtype == self.wide else output.to(self.wide), labels) * weight
        loss.backward()
        for p, used in zip(self.params.values(), self.module.parameters(), strict=True):
            if p is not used and used.grad is not None:
                p.grad = used.grad.to(self.wide) if p.grad is None else p.grad + used.grad
                used.grad = None
        return float(loss.detach())

    def grads(self) -> dict[str, Tensor]:
        """A copy of every gradient; zeros where there is none."""
        return {name: _grad(p).clone() for name, p in self.params.items()}

    def step(self, batch: GlobalBatch, rows: Sequence[Tensor] = ()) -> None:
        """One step, recorded in `trace`."""
        self.trace.losses.append(self.backward(batch, rows))
        self.trace.grads.append(self.grads())
        limit = self.max_norm if self.max_norm is not None else float("inf")
        self.trace.norms.append(float(torch.nn.utils.clip_grad_norm_(self.params.values(), limit)))
        self.optimizer.step()
        self.trace.params = {name: p.detach().clone() for name, p in self.params.items()}
        with torch.no_grad():
            for p, used in zip(self.params.values(), self.module.parameters(), strict=True):
                used.copy_(p)


def single_device(build: Builder, batches: Sequence[GlobalBatch], loss_fn: LossFn, **options: Any) -> Trace:
    """The steps of the reference. options: lr, max_norm, seed, dtype."""
    run = OneDevice(build, loss_fn, **options)
    for batch in batches:
        run.step(batch)
    return run.trace


def under_layout(
    build: Builder, dims: Dims, layout: Layout, batches: Sequence[GlobalBatch], loss_fn: LossFn, *, lr: float = 0.1,
    max_norm: float | None = None, seed: int = 0, backend: str = "threads", bucket_bytes: int = 25_000_000,
    probe: bool = False, launch: Callable[..., list[Any]] = spawn,
) -> tuple[Trace, list[RankReport]]:  # fmt: skip
    """The same steps under `layout`: the trace with whole tensors by logical name, and what each rank reports.

    probe: also the initial parameters, what the boundaries gave out in the first step, and its gradients. launch: what
    starts the ranks, `spawn` or the `run` of a `WorkerPool`.
    """
    reports = launch(
        _rank_steps, build, dims, layout, batches, loss_fn, lr, max_norm, seed, bucket_bytes, probe,
        world_size=layout.mesh.world_size, backend=backend,
    )  # fmt: skip
    return assemble(reports), reports


@dataclass
class RankReport:
    """One rank's part of a trace, with the plan that says what the parts are of, and its ledger's step totals."""

    plan: Plan
    coords: dict[str, int]
    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    params: dict[str, Tensor]
    ranges: dict[str, Ranges]  # of what each of these holds of the whole
    counted: dict[str, dict[str, int]]  # axis -> op -> bytes over all steps
    by_tag: dict[str, dict[tuple[str, str], tuple[int, int]]]  # tag -> (axis, op) -> (calls, bytes)
    probed: dict[str, dict[str, Part]] = field(default_factory=dict)  # with `probe`: initial, outputs, output_grads

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """`tensors` (this rank's gradients or parameters) by logical name, with where they are in the whole ones."""
        found = {}
        for name, local in tensors.items():
            param = self.plan.params[name]
            found[param.tied_to or name] = (param.shape, self.ranges[name], local)
        return found


def _rank_steps(
    ctx: Context, build: Builder, dims: Dims, layout: Layout, batches: Sequence[GlobalBatch], loss_fn: LossFn,
    lr: float, max_norm: float | None, seed: int, bucket_bytes: int, probe: bool = False,
) -> RankReport:  # fmt: skip
    rows, seq = batches[0][0].size(0), batches[0][0].size(1) if not batches[0][0].is_floating_point() else None
    model = distribute(
        build, dims, layout, ctx, loss_fn=loss_fn, seed=seed, bucket_bytes=bucket_bytes, batch=rows, seq=seq
    )
    optimizer = model.optimizer(torch.optim.SGD, lr=lr)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()} if probe else {}
    taken = probes.of_rank(model) if probe else probes.Probes()
    losses, norms, grads = [], [], []
    for inputs, labels in batches:
        optimizer.zero_grad()
        losses.append(model.forward_backward(local_batch(inputs, labels, layout, ctx)).loss)
        taken.close()
        grads.append({name: _grad(p).clone() for name, p in model.named_parameters()})
        norms.append(float(model.clip_grad_norm_(max_norm)))
        optimizer.step()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    ranges = {name: model.held_ranges(name) for name in params}
    report = RankReport(
        model.plan, dict(ctx.coords), losses, norms, grads, params, ranges, ctx.ledger.totals("step"),
        ctx.ledger.by_tag("step"),
    )  # fmt: skip
    if probe:
        report.probed = {"initial": report.parts(initial), **taken.parts(model.plan, ctx.coords)}
    return report


def assemble(reports: Sequence[RankReport]) -> Trace:
    """Whole tensors from all ranks' parts; `conflicts` where ranks that hold the same part differ."""
    first = reports[0]
    trace = Trace(first.losses, first.norms)
    for kind, name in (("loss", "loss"), ("norm", "grad_norm")):
        for step in range(len(first.losses)):
            values = {r: (x.losses if kind == "loss" else x.norms)[step] for r, x in enumerate(reports)}
            if len(set(values.values())) > 1:
                trace.conflicts[kind, step, name] = {r: torch.tensor(v, dtype=torch.float64) for r, v in values.items()}

    def whole(kind: str, step: int, ranks: Sequence[Mapping[str, Part]]) -> dict[str, Tensor]:
        tensors, conflicts, held = put_together(ranks)
        trace.conflicts |= {(kind, step, name): values for name, values in conflicts.items()}
        trace.held = {**held, **trace.held}
        return tensors

    order = [name for name, p in first.plan.params.items() if p.tied_to is None]
    for step in range(len(first.grads)):
        found = whole("gradient", step, [r.parts(r.grads[step]) for r in reports])
        trace.grads.append({name: found[name] for name in order if name in found})
    params = whole("parameter", len(first.grads) - 1, [r.parts(r.params) for r in reports])
    trace.params = {name: params[name] for name in order if name in params}
    for what, kind in (("initial", "initial"), ("outputs", "output"), ("output_grads", "output gradient")):
        setattr(trace, what, whole(kind, 0, [r.probed.get(what, {}) for r in reports]))
    return trace


def check_parity(
    build: Builder, dims: Dims, batches: Sequence[GlobalBatch], layout: Layout, *, loss_fn: LossFn,
    ref: Trace | None = None, bound: float | Mapping[Key, float] = FP64_BOUND, **options: Any,
) -> tuple[Verdict, list[RankReport]]:  # fmt: skip
    """Run the steps under `layout` and judge them; on failure run once more, to see where the forward diverges.

    ref: the reference, if it has been run before. options: those of `under_layout`.
    """
    shared: dict[str, Any] = {k: options[k] for k in ("lr", "max_norm", "seed") if k in options}
    ref = ref or single_device(build, batches, loss_fn, **shared)
    run, reports = under_layout(build, dims, layout, batches, loss_fn, **options)
    evidence = evidence_of(reports, build, batches, layout, loss_fn, shared)
    verdict = judge(ref, run, bound, evidence)
    if not verdict.equal and verdict.failures[0].step == 0 and isinstance(bound, float):
        again = OneDevice(build, loss_fn, **shared)
        initial = {name: p.detach().clone() for name, p in again.module.named_parameters()}
        taken = probes.of_module(again.module, reports[0].plan)
        again.step(batches[0])
        taken.close()
        more, _ = under_layout(build, dims, layout, batches[:1], loss_fn, probe=True, **options)
        run.conflicts |= {key: v for key, v in more.conflicts.items() if key not in run.conflicts}
        run.held = {**more.held, **run.held}
        seen = {"initial": initial, **taken.whole()}
        probed = replace(ref)
        for what, values in seen.items():  # a boundary that no gradient reaches has none to compare
            common = [name for name in getattr(more, what) if name in values]
            setattr(run, what, {name: getattr(more, what)[name] for name in common})
            setattr(probed, what, {name: values[name] for name in common})
        verdict = judge(probed, run, bound, evidence)
    return verdict, reports


def evidence_of(
    reports: Sequence[RankReport], build: Builder, batches: Sequence[GlobalBatch], layout: Layout, loss_fn: LossFn,
    options: Mapping[str, Any],
) -> Evidence:  # fmt: skip
    """What the explanations may use: axis sizes, what each gradient is summed over, the share of each part of the
    batch."""
    mesh, micro = layout.mesh, layout.micro_batches
    label = mesh.label(layout.batch_axes) or "dp"
    count = mesh.size(layout.batch_axes)

    def shares(step: int) -> dict[str, Share]:
        run = OneDevice(build, loss_fn, **options)
        for batch in batches[:step]:
            run.step(batch)
        inputs, labels = run.cast(batches[step])
        total = num_terms(labels)
        found = {}
        for i, rows in enumerate(torch.arange(len(inputs)).split(len(inputs) // (micro * count))):
            words = [f"{label} {i % count}"] * (count > 1) + [f"micro-batch {i // count}"] * (micro > 1)
            tokens = num_terms(labels[rows])
            loss = run.backward(batches[step], [rows]) * total / max(tokens, 1)
            found[" ".join(words)] = Share(loss, tokens, run.grads())
        return found

    sizes = {axis: mesh.size(axis) for axis in mesh.axes if mesh.size(axis) > 1} | {MICRO: micro}
    owed = {name: p.sum_axes for name, p in reports[0].plan.params.items()}
    coords = {rank: r.coords for rank, r in enumerate(reports)}
    return Evidence(sizes, owed, coords, shares if micro * count > 1 else None)


def assert_parity(
    build_model: Builder, dims: Dims, batch: GlobalBatch | Sequence[GlobalBatch], layout: Layout, *, loss_fn: LossFn,
    steps: int = 3, dtype: str = "fp64", **options: Any,
) -> list[RankReport]:  # fmt: skip
    """Raise AssertionError, saying what is wrong, unless `layout` computes the steps of one device.

    batch: one global batch (inputs, labels or None), used `steps` times, or a sequence of them, one a step. dtype:
    "fp64", or "fp32" or "bf16" (compared to fp64 by the noise of correct runs). options: lr, max_norm, seed, backend,
    bucket_bytes. Returns what each rank reported. Raises ValueError (LayoutError) for a layout that does not fit.
    """
    if isinstance(batch, tuple) and isinstance(batch[0], Tensor):
        batch = [batch] * steps
    layout = layout.adjusted(compute=dtype)
    batches: Any = batch
    if dtype != "fp64":
        from crosscut.testing.noise import noisy_reference

        shared = {k: options[k] for k in ("lr", "max_norm", "seed") if k in options}
        options["ref"], options["bound"] = noisy_reference(build_model, batches, loss_fn, DTYPES[dtype], **shared)
    verdict, reports = check_parity(build_model, dims, batches, layout, loss_fn=loss_fn, **options)
    if not verdict.equal:
        lines = "\n".join(f"  {f} ({f.error_over_bound:.3g} x the bound)" for f in verdict.failures[:8])
        raise AssertionError(
            f"{layout.mesh.describe()} is not the single-device step ({len(verdict.failures)} of "
            f"{len(verdict.differences)} differ)\n{verdict.sentence()}\n{lines}"
        )
    return reports


def whole_module(build: Builder, seed: int) -> nn.Module:
    """The model with the initial weights that every layout starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
    table = getattr(module, "init_table", None)
    if table is not None:
        inits = table()
        with torch.no_grad():
            for name, p in module.named_parameters():
                shape = tuple(p.shape)
                p.copy_(draw(name, shape, tuple(((0, n),) for n in shape), inits[name], seed))
    return module


def num_terms(labels: Tensor) -> int:
    """How many terms the mean of a loss has: valid tokens, or rows for float labels. Counted here once more, so that an
    engine that counts wrongly is found out."""
    return len(labels) if labels.is_floating_point() else int((labels != IGNORE).sum())


def _grad(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.detach()


__all__ = [
    "FP64_BOUND",
    "IGNORE",
    "Difference",
    "DistributedModel",
    "Ranges",
    "Trace",
    "assemble",
    "assert_parity",
    "check_parity",
    "compare",
    "single_device",
    "under_layout",
]
