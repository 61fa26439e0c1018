"""Does a layout compute the single-device step? Loss, norm, every gradient and updated parameter, by name.

The reference is plain PyTorch on one device: the model's own forward, the loss's own mean over the whole batch, an
ordinary optimizer. The layout runs in the threads world (or any back end) and its shards are put together by logical
name.

Two correct runs in different orders of summation differ by rounding, so tensors are compared norm-wise:
||x - ref|| <= bound * max(||ref||, 1e-3 * the largest ||ref|| of its kind); the second term is there because a gradient
that is zero in exact arithmetic has no relative error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

FP64_BOUND = 1e-11
Ranges = tuple[tuple[tuple[int, int], ...], ...]
Builder = Callable[[], nn.Module]
GlobalBatch = tuple[Tensor, Tensor | None]


@dataclass
class Trace:
    """What a few steps computed: loss, gradient norm (before clipping) and gradients of each; the last parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """One compared tensor or number: how far it is off, as a fraction of the bound (above 1: not equal)."""

    name: str
    kind: str  # "loss" | "norm" | "gradient" | "parameter"
    step: int
    error_over_bound: float


def single_device(
    build: Builder, batches: Sequence[GlobalBatch], loss_fn: LossFn, *, lr: float = 0.1, max_norm: float | None = None,
    seed: int = 0, dtype: torch.dtype = torch.float64,
) -> Trace:  # fmt: skip
    """The reference: one plain module, whole batches, SGD."""
    module = _whole_module(build, seed).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    trace = Trace()
    for inputs, labels in batches:
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        labels = inputs if labels is None else labels
        optimizer.zero_grad()
        loss = loss_fn(module(inputs), labels)
        loss.backward()
        trace.losses.append(float(loss.detach()))
        grads = {name: _grad(p).clone() for name, p in module.named_parameters()}
        trace.grads.append(grads)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm if max_norm is not None else float("inf"))
        trace.norms.append(float(norm))
        optimizer.step()
    trace.params = {name: p.detach().clone() for name, p in module.named_parameters()}
    return trace


def under_layout(
    build: Builder, dims: Dims, layout: Layout, batches: Sequence[GlobalBatch], loss_fn: LossFn, *, lr: float = 0.1,
    max_norm: float | None = None, seed: int = 0, backend: str = "threads", bucket_bytes: int = 25_000_000,
) -> tuple[Trace, list[RankReport]]:  # fmt: skip
    """The same steps under `layout`: the trace with whole tensors by logical name, and what each rank reports."""
    reports = spawn(
        _rank_steps, build, dims, layout, batches, loss_fn, lr, max_norm, seed, bucket_bytes,
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


def _rank_steps(
    ctx: Context, build: Builder, dims: Dims, layout: Layout, batches: Sequence[GlobalBatch], loss_fn: LossFn,
    lr: float, max_norm: float | None, seed: int, bucket_bytes: int,
) -> RankReport:  # fmt: skip
    rows, seq = batches[0][0].size(0), batches[0][0].size(1) if not batches[0][0].is_floating_point() else None
    model = distribute(
        build, dims, layout, ctx, loss_fn=loss_fn, seed=seed, bucket_bytes=bucket_bytes, batch=rows, seq=seq
    )
    optimizer = model.optimizer(torch.optim.SGD, lr=lr)
    losses, norms, grads = [], [], []
    for inputs, labels in batches:
        optimizer.zero_grad()
        losses.append(model.forward_backward(local_batch(inputs, labels, layout, ctx)).loss)
        grads.append({name: _grad(p).clone() for name, p in model.named_parameters()})
        norms.append(float(model.clip_grad_norm_(max_norm)))
        optimizer.step()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    ranges = {name: model.held_ranges(name) for name in params}
    return RankReport(
        model.plan, dict(ctx.coords), losses, norms, grads, params, ranges,
        ctx.ledger.totals("step"), ctx.ledger.by_tag("step"),
    )  # fmt: skip


def assemble(reports: Sequence[RankReport]) -> Trace:
    """Whole tensors from all ranks' parts. Raises AssertionError where ranks that hold the same part differ."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.losses != first.losses or report.norms != first.norms:
            raise AssertionError(
                f"rank {rank} reports loss or norm {report.losses}, {report.norms}; rank 0 {first.losses}, "
                f"{first.norms}"
            )
    grads = [_put_together(reports, [r.grads[step] for r in reports]) for step in range(len(first.grads))]
    return Trace(first.losses, first.norms, grads, _put_together(reports, [r.params for r in reports]))


def _put_together(reports: Sequence[RankReport], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    seen: dict[tuple[str, Ranges], tuple[int, Tensor]] = {}
    covered: dict[str, int] = {}
    for rank, (report, held) in enumerate(zip(reports, parts, strict=True)):
        for name, local in held.items():
            param = report.plan.params[name]
            logical = param.tied_to or name
            ranges = report.ranges[name]
            if (logical, ranges) in seen:
                other, value = seen[logical, ranges]
                if not torch.equal(value, local):
                    raise AssertionError(f"{name}: ranks {other} and {rank} hold the same part and differ")
                continue
            seen[logical, ranges] = (rank, local)
            target = whole.setdefault(logical, torch.full(param.shape, float("nan"), dtype=local.dtype))
            target[_index(ranges)] = local
            covered[logical] = covered.get(logical, 0) + local.numel()
    for name, count in covered.items():
        if count != whole[name].numel():
            raise AssertionError(f"{name}: the ranks hold {count} of {whole[name].numel()} elements")
    return whole


def _index(ranges: Ranges) -> tuple[Tensor, ...]:
    """Open-mesh index of the product of ranges."""
    ndim = len(ranges)
    out = []
    for d, held in enumerate(ranges):
        flat = torch.cat([torch.arange(a, b) for a, b in held] or [torch.arange(0)])  # a shard may hold no rows
        out.append(flat.view([-1 if i == d else 1 for i in range(ndim)]))
    return tuple(out)


def compare(ref: Trace, run: Trace, bound: float = FP64_BOUND) -> list[Difference]:
    """Every compared thing with its error over the bound: losses, norms, gradients of each step, parameters."""
    found = []
    for step, (a, b) in enumerate(zip(ref.losses, run.losses, strict=True)):
        found.append(Difference("loss", "loss", step, abs(b - a) / (bound * max(abs(a), 1e-300))))
    for step, (a, b) in enumerate(zip(ref.norms, run.norms, strict=True)):
        found.append(Difference("grad_norm", "norm", step, abs(b - a) / (bound * max(abs(a), 1e-300))))
    last = len(ref.grads) - 1
    for step, (grads, others) in enumerate(zip(ref.grads, run.grads, strict=True)):
        found += _tensors("gradient", step, grads, others, bound)
    return found + _tensors("parameter", last, ref.params, run.params, bound)


def _tensors(
    kind: str, step: int, ref: Mapping[str, Tensor], run: Mapping[str, Tensor], bound: float
) -> list[Difference]:
    if set(ref) != set(run):
        raise AssertionError(f"{kind}s differ in names: {sorted(set(ref) ^ set(run))}")
    largest = max(float(t.norm()) for t in ref.values())
    out = []
    for name, a in ref.items():
        error = float((run[name] - a).norm())
        scale = bound * max(float(a.norm()), 1e-3 * largest, 1e-300)
        out.append(Difference(name, kind, step, error / scale if error == error else float("inf")))
    return out


def assert_parity(
    build: Builder, dims: Dims, batches: Sequence[GlobalBatch], layout: Layout, *, loss_fn: LossFn,
    bound: float = FP64_BOUND, **options: Any,
) -> list[RankReport]:  # fmt: skip
    """Raise AssertionError naming the worst tensors unless `layout` computes the single-device steps, in fp64."""
    reference = {k: options[k] for k in ("lr", "max_norm", "seed") if k in options}
    ref = single_device(build, batches, loss_fn, **reference)
    run, reports = under_layout(build, dims, layout.adjusted(compute="fp64"), batches, loss_fn, **options)
    wrong = [d for d in compare(ref, run, bound) if not d.error_over_bound <= 1]
    if wrong:
        wrong.sort(key=lambda d: -d.error_over_bound)
        lines = "\n".join(
            f"  {d.kind} {d.name} at step {d.step}: {d.error_over_bound:.3g} x the bound" for d in wrong[:8]
        )
        raise AssertionError(f"{layout.mesh} is not the single-device step ({len(wrong)} differ):\n{lines}")
    return reports


def _whole_module(build: Builder, seed: int) -> nn.Module:
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


def _grad(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.detach()


__all__ = [
    "FP64_BOUND",
    "IGNORE",
    "Difference",
    "DistributedModel",
    "Trace",
    "assert_parity",
    "compare",
    "single_device",
    "under_layout",
]
