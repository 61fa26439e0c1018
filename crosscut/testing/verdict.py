"""Two runs of the same steps, compared tensor by tensor, and a verdict that says what is wrong with the second.

Two correct runs that add numbers in other orders differ by rounding, so tensors are compared norm-wise:
||x - ref|| <= bound. In fp64 the bound is 1e-11 * max(||ref||, 1e-3 * the largest ||ref|| of its kind); the second term
is there because a gradient that is zero in exact arithmetic has no relative error. Below fp64 it is NOISE_FACTOR times
the noise of correct runs, measured (docs/parity.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from crosscut.testing.diagnose import explain, explain_loss, explain_norm
from crosscut.testing.factors import Case, Finding, Ranges
from crosscut.testing.places import cut_out

FP64_BOUND = 1e-11
NOISE_FACTOR = 8.0  # fixed before anything was measured
FLOOR = 1e-3  # of the largest norm of a kind: below it an error counts as if the tensor were this large
LOOSE_FLOOR = 0.02  # the same for a relative bound below fp64: what is zero but for rounding is as large as roundings
DIAGNOSED = 40  # failures that are explained; the rest only follow from the first ones
Key = tuple[str, int, str]  # kind, step, name
Part = tuple[tuple[int, ...], Ranges, Tensor]  # whole shape, the ranges of it that a rank holds, and the values there


@dataclass
class Trace:
    """What a few steps computed: loss, gradient norm (before clipping) and gradients of each; the last parameters,
    or those of each step.

    Of a run on several ranks also: `held`, the part of each rank, of a gradient (by name) and of other tensors (by
    key); `conflicts`, the parts by rank where ranks that hold the same one differ; `outputs` and `output_grads` of the
    first step's boundaries, if they were asked for, in the order of the forward.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    each_params: list[dict[str, Tensor]] = field(default_factory=list)
    held: dict[str, dict[int, Ranges]] = field(default_factory=dict)
    conflicts: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output_grads: dict[str, Tensor] = field(default_factory=dict)
    first_step: int = 0

    def entries(self) -> dict[Key, Tensor]:
        """Everything in order of execution: outputs, loss, gradients in backward order, norm; at the end parameters."""
        found: dict[Key, Tensor] = {("initial", self.first_step, n): x for n, x in self.initial.items()}
        found |= {("output", self.first_step, n): x for n, x in self.outputs.items()}
        for i, (loss, norm, grads) in enumerate(zip(self.losses, self.norms, self.grads, strict=True)):
            step = i + self.first_step
            found["loss", step, "loss"] = torch.tensor(loss, dtype=torch.float64)
            both = {"gradient": grads, "output gradient": self.output_grads if i == 0 else {}}
            for kind, name in self._backward_order(grads, both["output gradient"]):
                found[kind, step, name] = both[kind][name]
            found["norm", step, "grad_norm"] = torch.tensor(norm, dtype=torch.float64)
            if self.each_params:
                found |= {("parameter", step, n): x for n, x in self.each_params[i].items()}
        last = self.first_step + len(self.losses) - 1
        return found | {("parameter", last, n): x for n, x in self.params.items()}

    @staticmethod
    def _backward_order(params: Iterable[str], modules: Iterable[str]) -> list[tuple[str, str]]:
        """The reverse of registration, which stands for the order of the forward: a module's output comes after its
        parameters."""
        last = {m: max((n for n in range(len(names)) if names[n].startswith(m + ".")), default=len(names))
                for names in [list(params)] for m in modules}  # fmt: skip
        order = [((float(i), 0), ("gradient", n)) for i, n in enumerate(params)]
        order += [((float(i), 1), ("output gradient", m)) for m, i in last.items()]
        return [entry for _, entry in sorted(order, reverse=True)]


@dataclass(frozen=True)
class Difference:
    """One compared tensor or number: how far it is off, as a fraction of the bound (above 1: not equal)."""

    name: str
    kind: str  # "loss" | "norm" | "gradient" | "parameter" | "initial" | "output" | "output gradient"
    step: int
    error_over_bound: float


@dataclass(frozen=True)
class Failure(Difference):
    """A difference above its bound, explained. factor: run / reference, where the tensor is an exact multiple."""

    factor: float | None = None
    factor_name: str = ""
    diagnosis: str = ""

    @property
    def label(self) -> str:
        """The tensor as a sentence begins with it."""
        return {
            "loss": "the loss", "norm": "the gradient norm", "gradient": f"{self.name}.grad",
            "parameter": f"{self.name} after the step", "initial": f"{self.name} before the first step",
            "output": f"the output of {self.name}",
            "output gradient": f"the gradient of the output of {self.name}",
        }[self.kind]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.label} {self.diagnosis}" if self.diagnosis else self.label


@dataclass(frozen=True)
class Verdict:
    """Equal, or what is not: `differences` of everything compared, `failures` in order of execution."""

    differences: tuple[Difference, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every compared number lies within its bound."""
        return not self.failures

    @property
    def worst(self) -> Difference:
        """The largest error over its bound."""
        return max(self.differences, key=lambda d: d.error_over_bound)

    def sentence(self) -> str:
        """One sentence about the first divergence (or that there is none)."""
        if self.equal:
            w = self.worst
            return f"equal: the largest error is {w.error_over_bound:.2g} of its bound ({w.kind} {w.name})"
        first = self.failures[0]
        return f"the first to diverge, at step {first.step}: {first}"

    def to_json(self) -> dict[str, Any]:
        """equal, worst and failures. A number that JSON cannot hold is null."""
        worst = self.worst
        return {
            "equal": self.equal,
            "worst": {"name": worst.name, "kind": worst.kind, "error_over_bound": finite(worst.error_over_bound)},
            "failures": [
                {**asdict(f), "error_over_bound": finite(f.error_over_bound), "diagnosis": str(f)}
                for f in self.failures
            ],
        }


def finite(value: float) -> float | None:
    """`value`, or None for nan and infinity."""
    return value if abs(value) < inf else None


@dataclass(frozen=True)
class Share:
    """A part of the batch by itself: its mean loss, its tokens, and what it adds to each gradient of the whole."""

    loss: float
    tokens: int
    grads: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """What the explanations may use beside the tensors: see `diagnose.Case`. owed: by parameter. shares(step): the
    parts of the batch by name, for the first failing step. more(failures): what else is to be said of the first."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    owed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coords: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    shares: Callable[[int], Mapping[str, Share]] | None = None
    more: Callable[[Sequence[Failure]], str] | None = None


def put_together(ranks: Sequence[Mapping[str, Part]]) -> tuple[
    dict[str, Tensor], dict[str, dict[int, Tensor]], dict[str, dict[int, Ranges]]
]:  # fmt: skip
    """(whole tensors, the parts by rank of those on which ranks differ, who holds what), from each rank's parts.

    What no rank holds stays NaN.
    """
    whole: dict[str, Tensor] = {}
    held: dict[str, dict[int, Ranges]] = {}
    first: dict[tuple[str, Ranges], Tensor] = {}
    odd: set[str] = set()
    for rank, parts in enumerate(ranks):
        for name, (shape, ranges, local) in parts.items():
            held.setdefault(name, {})[rank] = ranges
            known = first.setdefault((name, ranges), local)
            if known is local:
                empty = float("nan") if local.is_floating_point() else 0
                target = whole.setdefault(name, torch.full(shape, empty, dtype=local.dtype))
                target[_index(ranges)] = local
            elif not torch.equal(known, local):
                odd.add(name)
    conflicts = {}
    for name in sorted(odd):
        same: dict[Ranges, dict[int, Tensor]] = {}
        for rank, parts in enumerate(ranks):
            if name in parts:
                same.setdefault(parts[name][1], {})[rank] = parts[name][2]
        conflicts[name] = next(v for v in same.values() if any(not torch.equal(x, next(iter(v.values()))) for x in
                                                               v.values()))  # fmt: skip
    return whole, conflicts, held


def _index(ranges: Ranges) -> tuple[Tensor, ...]:
    """Open-mesh index of the product of ranges."""
    flat = [torch.cat([torch.arange(a, b) for a, b in dim] or [torch.arange(0)]) for dim in ranges]
    return tuple(x.view([-1 if i == d else 1 for i in range(len(flat))]) for d, x in enumerate(flat))


def scales(ref: Mapping[Key, Tensor], floor: float = FLOOR) -> dict[Key, float]:
    """The size that an error is measured against: the norm, but at least `floor` of the largest of its kind and
    step."""
    norms = {key: float(x.double().norm()) for key, x in ref.items()}
    largest: dict[tuple[str, int], float] = {}
    for (kind, step, _), norm in norms.items():
        largest[kind, step] = max(largest.get((kind, step), 0.0), norm)
    return {key: max(norm, floor * largest[key[:2]], 1e-300) for key, norm in norms.items()}


def relative_bounds(ref: Trace, rtol: float) -> dict[Key, float]:
    """The bound of each tensor: rtol of its scale."""
    floor = FLOOR if rtol <= FP64_BOUND else LOOSE_FLOOR
    return {key: rtol * scale for key, scale in scales(ref.entries(), floor).items()}


def noise_bounds(ref: Trace, others: Sequence[Trace], eps: float) -> dict[Key, float]:
    """NOISE_FACTOR times the largest distance of `others` (correct runs) from `ref`, per tensor; at least that of one
    rounding, `eps` of the scale, since a number can be hit by chance."""
    entries = ref.entries()
    out = {}
    runs = [run.entries() for run in others]
    for key, scale in scales(entries).items():
        spread = max(float((run[key].double() - entries[key].double()).norm()) for run in runs)
        out[key] = NOISE_FACTOR * max(spread, eps * scale)
    return out


def compare(ref: Trace, run: Trace, bound: float | Mapping[Key, float] = FP64_BOUND) -> list[Difference]:
    """Every compared thing with its error over the bound, in order of execution. bound: relative to the scale, or the
    bound of each tensor. What only one side has raises AssertionError."""
    bounds = relative_bounds(ref, bound) if isinstance(bound, float) else bound
    ours, theirs = ref.entries(), run.entries()
    if set(ours) != set(theirs):
        raise AssertionError(f"the runs differ in names: {sorted(set(ours) ^ set(theirs))[:8]}")
    found = []
    for key, a in ours.items():
        b = theirs[key]
        error = float((b.double() - a.double()).norm()) / bounds[key] if a.shape == b.shape else inf
        if key in run.conflicts or error != error:
            error = inf
        kind, step, name = key
        found.append(Difference(name, kind, step, error))
    return found


def judge(ref: Trace, run: Trace, bound: float | Mapping[Key, float], evidence: Evidence) -> Verdict:
    """Compare, and explain what is off: the failures of the first failing step, in order of execution."""
    bounds = relative_bounds(ref, bound) if isinstance(bound, float) else bound
    differences = compare(ref, run, bounds)
    wrong = [d for d in differences if not d.error_over_bound <= 1]
    if not wrong:
        return Verdict(tuple(differences))
    step = min(d.step for d in wrong)
    shares = evidence.shares(step) if evidence.shares else {}
    ours, theirs = ref.entries(), run.entries()
    size = scales(ours)
    failures: list[Failure] = []
    for d in wrong:
        failure = Failure(d.name, d.kind, d.step, d.error_over_bound)
        if d.step == step and len(failures) < DIAGNOSED:
            key = (d.kind, d.step, d.name)
            # Where a tensor lies within its bound it counts as exact; a factor must hold to about that.
            tol = min(max(bounds[key] / size[key], 1e-10), 0.05)
            said = _explain(d, ours, theirs, ref, run, evidence, shares, tol)
            failure = replace(failure, factor=said.factor, factor_name=said.factor_name, diagnosis=said.text)
        failures.append(failure)
    if evidence.more is not None and (more := evidence.more(failures)):
        failures[0] = replace(failures[0], diagnosis=f"{failures[0].diagnosis}; {more}")
    return Verdict(tuple(differences), tuple(failures))


def _explain(
    d: Difference, ours: Mapping[Key, Tensor], theirs: Mapping[Key, Tensor], ref: Trace, run: Trace, evidence: Evidence,
    shares: Mapping[str, Share], tol: float,
) -> Finding:  # fmt: skip
    key = (d.kind, d.step, d.name)
    case = Case(
        theirs[key], ours[key], d.kind, evidence.sizes, evidence.owed.get(d.name, ()), run.held.get(d.name, {}),
        run.conflicts.get(key, {}), evidence.coords, ours.get((d.kind, d.step - 1, d.name)),
        {label: s.grads[d.name] for label, s in shares.items() if d.name in s.grads and d.kind == "gradient"},
        {label: s.tokens for label, s in shares.items()}, tol,
    )  # fmt: skip
    if case.run.shape != case.ref.shape:
        return Finding(f"has shape {tuple(case.run.shape)}, the reference {tuple(case.ref.shape)}")
    if d.kind == "loss" and not case.values:
        losses = {label: (s.loss, s.tokens) for label, s in shares.items()}
        return explain_loss(float(case.run), float(case.ref), losses, case)
    if d.kind == "norm":
        return explain_norm(case, _squares(ref.grads[d.step - ref.first_step], run.held, float(case.ref)))
    return explain(case)


def _squares(
    grads: Mapping[str, Tensor], held: Mapping[str, Mapping[int, Ranges]], norm: float
) -> dict[int, dict[str, tuple[Ranges, float]]]:
    """rank -> gradient -> (the part it holds, the square of its norm), scaled so that all parts make up `norm`: the
    gradients may have been clipped since it was measured."""
    whole = sum(float(g.double().norm()) ** 2 for g in grads.values())
    scale = norm * norm / whole if whole else 0.0
    squares: dict[int, dict[str, tuple[Ranges, float]]] = {}
    for name, g in grads.items():
        for rank, ranges in (held.get(name) or {0: tuple(((0, n),) for n in g.shape)}).items():
            square = float(cut_out(g, ranges).double().norm()) ** 2 * scale
            squares.setdefault(rank, {})[name] = (ranges, square)
    return squares
