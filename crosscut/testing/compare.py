"""Two folders that `capture` wrote, compared: does one training program compute the steps of another?

Loss, gradients and updated parameters are put together from what each rank held and judged as a layout's are. Below
fp64 the bound comes from a second correct run, or is a relative one by dtype.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from crosscut.testing.capturing import FORMAT_VERSION, INDEX
from crosscut.testing.factors import RANKS, Ranges
from crosscut.testing.verdict import (
    Evidence,
    Failure,
    Part,
    Share,
    Trace,
    Verdict,
    judge,
    noise_bounds,
    put_together,
    relative_bounds,
)  # fmt: skip

RTOL = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}  # by the narrowest dtype of parameters
KINDS = ("gradient", "parameter")


@dataclass(frozen=True)
class Capture:
    """A capture folder, read: its index of each step, and the steps as a trace."""

    folder: str
    indices: tuple[Mapping[str, Any], ...]
    trace: Trace
    has_losses: bool
    has_norms: bool

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return int(self.indices[0]["world_size"])

    @property
    def dtype(self) -> str:
        """The narrowest dtype of the parameters, or of what modules compute in."""
        found = {entry["dtype"] for entry in self.indices[0]["tensors"]["parameter"].values()}
        found |= set(self.indices[0].get("computes", ()))
        return max(found & set(RTOL), key=lambda name: RTOL[name], default="float32")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of each parameter."""
        return {name: tuple(e["shape"]) for name, e in self.indices[0]["tensors"]["parameter"].items()}


@dataclass(frozen=True)
class Compared:
    """The verdict on `run` against `ref`, and by what bound (in words)."""

    ref: Capture
    run: Capture
    verdict: Verdict
    bound: str


def compare_captures(
    ref: str | Path, run: str | Path, *, noise: str | Path | None = None, rtol: float | None = None
) -> Compared:
    """Judge the capture folder `run` by the one at `ref`.

    noise: a third folder, of a second correct run: the bound is then a multiple of its distance from `ref`. rtol: the
    bound, relative to each tensor's norm; by default RTOL of the narrowest dtype. Raises ValueError for a folder that
    is no capture or not a whole one, and for captures of different models or steps.
    """
    if noise is not None and rtol is not None:
        raise ValueError("--noise and --rtol both set the bound; give one")
    if rtol is not None and not 0 < rtol < float("inf"):
        raise ValueError(f"--rtol {rtol:g}: must be above 0 and finite")
    for path in (run, noise):
        if path is not None and Path(path).exists() and Path(ref).exists() and Path(ref).samefile(path):
            raise ValueError(f"{ref} and {path} are one folder, which proves nothing; give two runs")
    ours, theirs = read_capture(ref), read_capture(run)
    check_comparable(ours, theirs)
    _require_finite(ours)
    others, widest = [theirs], 0.0
    if noise is not None:
        other = read_capture(noise)
        check_comparable(ours, other)
        _require_finite(other)
        others.append(other)
        _align(ours, others)
        eps = torch.finfo(getattr(torch, ours.dtype)).eps
        bounds = noise_bounds(ours.trace, [other.trace], eps)
        bound = f"8 x the distance of {other.folder} from {ours.folder}, per tensor"
    else:
        _align(ours, others)
        narrow = max(ours.dtype, theirs.dtype, key=lambda name: RTOL[name])
        widest = RTOL["bfloat16"] / RTOL[narrow] if rtol is None and narrow == "float32" else 0.0
        rtol, why = (RTOL[narrow], f"the default for {narrow}") if rtol is None else (rtol, "--rtol")
        bounds = relative_bounds(ours.trace, rtol)
        bound = f"{rtol:g} of each tensor's norm ({why})"
    return Compared(ours, theirs, judge(ours.trace, theirs.trace, bounds, _evidence(ours, theirs, widest)), bound)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_capture(folder: str | Path) -> Capture:
    """Read a capture folder. Raises ValueError, one line, for what is no capture, half of one, or a newer format."""
    root = Path(folder)
    if not root.is_dir():
        is_file = " is a file; give the folder that crosscut.testing.capture wrote"
        raise ValueError(f"{folder}{is_file if root.exists() else ': there is no such folder'}")
    found = [p for p in root.glob("step-*") if p.name[5:].isdecimal() and (p / INDEX).is_file()]
    steps = sorted(found, key=lambda p: int(p.name[5:]))
    if not steps:
        if list(root.glob(".step-*.tmp")) or list(root.glob("step-*")):
            raise ValueError(f"{folder}: half written (the run was stopped before its first capture was whole)")
        raise ValueError(f"{folder}: no capture in it; crosscut.testing.capture(model, optimizer, folder) writes one")
    indices = tuple(_read_index(path) for path in steps)
    trace = Trace(first_step=int(steps[0].name[5:]))
    for path, index in zip(steps, indices, strict=True):
        try:
            _add_step(trace, path, index)
        except (LookupError, TypeError, AttributeError, SafetensorError) as error:  # noqa: PERF203
            raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}); run it again") from None
    trace.params = trace.each_params[-1]
    has_losses = all(any(value is not None for value, _ in index["losses"]) for index in indices)
    has_norms = all(any(value is not None for value in index["grad_norms"]) for index in indices)
    return Capture(str(folder).rstrip("/"), indices, trace, has_losses, has_norms)


def _read_index(path: Path) -> Mapping[str, Any]:
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        if index["schema"] != "crosscut.capture":
            raise KeyError("schema")
        version, files = int(index["format_version"]), dict(index["files"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path / INDEX}: not the index of a capture") from None
    if version > FORMAT_VERSION:
        raise ValueError(f"{path}: format_version {version} is newer than this crosscut reads ({FORMAT_VERSION})")
    for name, size in files.items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise ValueError(f"{path / name}: missing or cut short; the capture is not whole, run it again")
    return index


def _add_step(trace: Trace, path: Path, index: Mapping[str, Any]) -> None:
    from safetensors import safe_open

    step = index["step"]
    files = {name: safe_open(path / name, framework="pt") for name in index["files"]}
    for kind in KINDS:
        ranks: list[dict[str, Part]] = [{} for _ in range(index["world_size"])]
        for name, entry in index["tensors"][kind].items():
            for piece in entry["pieces"]:
                ranges: Ranges = tuple(tuple((a, b) for a, b in dim) for dim in piece["ranges"])
                local = files[piece["file"]].get_tensor(piece["key"])
                for rank in piece["ranks"]:
                    ranks[rank][name] = (tuple(entry["shape"]), ranges, local)
        whole, conflicts, held = put_together(ranks)
        whole = {name: whole[name] for name in index["tensors"][kind]}
        trace.conflicts |= {(kind, step, name): values for name, values in conflicts.items()}
        trace.held = {**held, **trace.held}
        (trace.grads if kind == "gradient" else trace.each_params).append(whole)
    terms = [(value, 1 if tokens is None else tokens) for value, tokens in index["losses"] if value is not None]
    total = sum(tokens for _, tokens in terms)
    trace.losses.append(sum(value * tokens for value, tokens in terms if tokens) / max(total, 1))
    norms = {rank: value for rank, value in enumerate(index["grad_norms"]) if value is not None}
    trace.norms.append(next(iter(norms.values()), float("nan")))
    values = list(norms.values())
    if values and max(values) - min(values) > 1e-6 * max(values):
        trace.conflicts["norm", step, "grad_norm"] = {r: torch.tensor(v, dtype=torch.float64) for r, v in norms.items()}


# ---- comparing ------------------------------------------------------------------------------------------------------


def check_comparable(ref: Capture, run: Capture) -> None:
    """Raise ValueError unless both hold the same steps of the same model."""
    steps = [[index["step"] for index in one.indices] for one in (ref, run)]
    if steps[0] != steps[1]:
        raise ValueError(f"{ref.folder} holds steps {steps[0]}, {run.folder} {steps[1]}; capture the same number")
    ours, theirs = ref.shapes(), run.shapes()
    odd = sorted(set(ours) ^ set(theirs))
    if odd:
        has, lacks = (ref, run) if odd[0] in ours else (run, ref)
        raise ValueError(
            f"different models: {has.folder} has parameter {odd[0]}, {lacks.folder} has not ({len(odd)} names differ); "
            f"where names differ, give capture(names=...)"
        )
    for name, shape in ours.items():
        if theirs[name] != shape:
            raise ValueError(f"different models: {name} is {shape} in {ref.folder}, {theirs[name]} in {run.folder}")


def _require_finite(ref: Capture) -> None:
    for what, numbers in (("the loss", ref.trace.losses), ("the gradient norm", ref.trace.norms)):
        given = ref.has_losses if what == "the loss" else ref.has_norms
        for step, value in enumerate(numbers if given else (), ref.trace.first_step):
            if not isfinite(value):
                raise ValueError(
                    f"{ref.folder}: {what} is {value} at step {step}, and nothing can be judged by it; give a right run"
                )
    for what, steps in ((".grad", ref.trace.grads), ("", ref.trace.each_params)):
        for step, tensors in enumerate(steps, ref.trace.first_step):
            bad = next((name for name, value in tensors.items() if not value.isfinite().all()), None)
            if bad is not None:
                raise ValueError(
                    f"{ref.folder}: {bad}{what} holds NaN or infinite values at step {step}, and nothing can be judged "
                    f"by it; give a run that is right"
                )


def _align(ref: Capture, others: Sequence[Capture]) -> None:
    """Compare what all have: losses and norms only if every folder has them, a missing gradient as zeros."""
    every = (ref, *others)
    for one in others:
        _as_shares(one, ref)
    for one in every:
        trace = one.trace
        for i, grads in enumerate(trace.grads):
            for other in every:
                for name, value in other.trace.grads[i].items():
                    grads.setdefault(name, torch.zeros_like(value))
            trace.grads[i] = {name: grads[name] for name in trace.each_params[i] if name in grads}
            if not all(c.has_losses for c in every):
                trace.losses[i] = 0.0
            if not all(c.has_norms for c in every):
                trace.norms[i] = float(torch.stack([g.double().norm() for g in grads.values()]).norm()) if grads else 0
                trace.conflicts.pop(("norm", i + trace.first_step, "grad_norm"), None)


def _as_shares(run: Capture, ref: Capture) -> None:
    """Losses without numbers of tokens are the ranks' means, or their shares: what they add up to is the loss then."""
    for i, index in enumerate(run.indices):
        values = [value for value, _ in index["losses"] if value is not None]
        if all(tokens is None for _, tokens in index["losses"]) and len(values) > 1:
            mean, right = run.trace.losses[i], ref.trace.losses[i]
            run.trace.losses[i] = min(mean, sum(values), key=lambda loss: abs(loss - right))


def _evidence(ref: Capture, run: Capture, widest: float) -> Evidence:
    """What explains differences. widest: up to this multiple of their bounds they may be those of bf16 under autocast,
    of which nothing can be seen in a capture."""
    places = run.indices[0]["places"]
    sizes = {axis: size for place in places for axis, (_, size) in place.items()}
    if ref.world_size != run.world_size and RANKS not in sizes and run.world_size > max(sizes.values(), default=1):
        sizes[RANKS] = run.world_size
    coords = {rank: {axis: at for axis, (at, _) in place.items()} for rank, place in enumerate(places)}

    def shares(step: int) -> dict[str, Share]:
        index = run.indices[step - run.trace.first_step]
        found = {
            f"rank {r}": Share(v, n) for r, (v, n) in enumerate(index["losses"]) if v is not None and n is not None
        }
        return found if len(found) > 1 else {}

    def more(failures: Sequence[Failure]) -> str:
        first = failures[0]
        said = []
        kinds = {f.kind for f in failures if f.step == first.step}
        if kinds == {"loss"}:
            said.append("all else agrees, so capture was given another number: loss=(mean of the tokens, num_tokens)")
        if first.kind == "gradient" and not any(
            bool(g.any()) for g in run.trace.grads[first.step - ref.trace.first_step].values()
        ):
            said.append("every gradient is zero: call capture before optimizer.zero_grad()")
        elif first.step == run.trace.first_step and (start := _other_start(ref, run)):
            said.append(start)
        if first.kind == "gradient" and " is the reference" in first.diagnosis and "parameter" not in kinds:
            said.append(
                "the updated parameters agree all the same: if the optimizer reduces gradients by itself, leave the "
                "reduced ones in .grad for capture"
            )
        tokens = {name: share.tokens for name, share in shares(first.step).items()}
        if first.kind == "gradient" and "no multiple" in first.diagnosis and len(set(tokens.values())) > 1:
            some = ", ".join(f"{name} {n}" for name, n in list(tokens.items())[:8])
            said.append(
                f"the losses agree, and the ranks hold unequal numbers of tokens ({some}): averaging over ranks then "
                "makes a mean of means; weigh each rank's loss by its tokens x ranks / all tokens"
            )
        if kinds != {"loss"} and max(f.error_over_bound for f in failures) <= widest:
            said.append(
                "all differences are small: if the runs compute in bf16 (autocast), give --rtol 0.05 or --noise"
            )
        norm = next((f for f in failures if f.kind == "norm" and f.step == first.step), None)
        if norm is not None and norm is not first and norm.diagnosis.startswith("differs"):
            said.append(str(norm))  # what was captured is what clipping left: the norm is the cause
        return "; ".join(said)

    return Evidence(sizes, {}, coords, shares, more)


def _other_start(ref: Capture, run: Capture) -> str:
    """What is to be said of the weights before the first step, if they cannot have been the same in both runs, or if
    those of `run` are not updated.

    Plain SGD can be undone; another optimizer's first step moves an element by a few lr at most.
    """
    if ref.trace.first_step or any(len(c.indices[0]["optimizer"]["lr"]) != 1 for c in (ref, run)):
        return ""

    def start(one: Capture, name: str, p: Tensor) -> tuple[Tensor, float]:
        said, grad = one.indices[0]["optimizer"], one.trace.grads[0].get(name)
        lr, eps = said["lr"][0], torch.finfo(p.dtype).eps if p.is_floating_point() else 0.0
        if said["class"] == "SGD" and not said.get("weight_decay") and not said.get("nesterov"):
            step = torch.zeros_like(p).double() if grad is None else lr * grad.double()
            return p.double() + step, 8 * eps * float(p.double().norm() + step.norm())
        return p.double(), 3 * lr * p.numel() ** 0.5

    other = ""
    for name, now in run.trace.each_params[0].items():
        if ("gradient", 0, name) in run.trace.conflicts:
            continue
        before = ref.trace.each_params[0][name]
        a, slack = start(ref, name, before)
        for rank, mine in run.trace.conflicts.get(("parameter", 0, name), {0: now}).items():
            b, more = start(run, name, mine) if mine.shape == now.shape else (a, 0.0)
            if float((a - b).norm()) <= 1e-4 * float(a.norm()) + slack + more:
                continue
            moved, off = float((a - before.double()).norm()), float((a - mine.double()).norm())
            if not off <= slack + more + 1e-3 * moved:
                where = f"on rank {rank} " if ("parameter", 0, name) in run.trace.conflicts else ""
                return f"the runs start {where}from different weights ({name}): give both the same"
            other = other or "these are the weights before the step: call capture after optimizer.step()"
    return other
