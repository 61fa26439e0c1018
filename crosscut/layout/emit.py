"""Rules from a derived plan: every communication of one step, with its shape, dtype, calls and bytes.

One function a row of the rule table. Bytes are what one rank hands to the call (see `plan.Rule`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from crosscut.layout.layout import Layout
from crosscut.layout.params import Sizes, check_divides
from crosscut.layout.plan import Action, LossPlan, ParamPlan, Rule, Site
from crosscut.layout.sites import outside
from crosscut.layout.spec import DimExpr
from crosscut.layout.store import DTYPES


@dataclass(frozen=True)
class Emitter:
    """What every rule needs: the layout and the size of each dim for one micro-batch over all ranks."""

    layout: Layout
    sizes: Sizes

    def rule(
        self, site: str, phase: str, op: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str, calls: int,
        where: str = "", note: str = "",
    ) -> Rule:  # fmt: skip
        """A rule of `calls` equal calls, each handing over a tensor of `shape`."""
        size = 0 if op == "recv" else prod(shape) * DTYPES[dtype] * calls
        return Rule(site, phase, op, self.layout.mesh.label(axes), shape, dtype, calls, size, where, note)

    def local_shape(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        """The local shape of a hidden value outside boundaries. Raises LayoutError if a dim does not divide."""
        shape = []
        for name, axes in zip(dims, outside(dims, self.layout), strict=True):
            size = self.sizes.size(DimExpr.parse(name))
            check_divides(name, size, axes, self.layout)
            shape.append(size // self.layout.mesh.size(axes))
        return tuple(shape)

    def site_rules(self, site: Site, back_in: bool, back_out: bool, regather: bool, recompute: bool) -> Iterator[Rule]:
        """A boundary's rules. back_in, back_out: whether its input and its output carry a gradient."""
        entry, exit_ = [], []
        forward: list[Rule] = []

        def one(phase: str, op: str, action: Action, shape: tuple[int, ...], where: str, note: str = "") -> Rule:
            dtype, m = self.layout.precision.compute, self.layout.micro_batches
            return self.rule(site.module, phase, op, action.axes, shape, dtype, m, where, note)

        shape = list(self.local_shape(site.in_dims)) if site.entry else []
        for a in site.entry:
            back = back_in and a.needs_grad
            if a.fn == "gather" and a.dim is not None:
                shape[a.dim] *= self.layout.mesh.size(a.axes)
                forward.append(one("forward", "all_gather", a, tuple(shape), "entry"))
                if regather:
                    again = "the input again: only its own slice was kept"
                    entry.append(one("backward", "all_gather", a, tuple(shape), "entry", again))
                if back:
                    entry.append(one("backward", "reduce_scatter", a, tuple(shape), "entry"))
            elif a.fn == "enter" and back:
                entry.append(one("backward", "all_reduce", a, tuple(shape), "entry"))
        for a, before, after in self._exit_shapes(site):
            if a.fn in ("leave", "scatter_sum"):
                forward.append(one("forward", "all_reduce" if a.fn == "leave" else "reduce_scatter", a, before, "exit"))
            elif a.fn in ("gather", "gather_replicated"):
                forward.append(one("forward", "all_gather", a, after, "exit"))
            if a.fn == "scatter_sum" and back_out:
                exit_.append(one("backward", "all_gather", a, before, "exit"))
            elif a.fn == "gather" and back_out:
                exit_.append(one("backward", "reduce_scatter", a, after, "exit"))
        yield from forward
        if recompute:
            yield from (replace(r, phase="recompute") for r in forward)
        yield from (*exit_, *entry)  # backward runs from the exit to the entry

    def _exit_shapes(self, site: Site) -> Iterator[tuple[Action, tuple[int, ...], tuple[int, ...]]]:
        """(action, shape before, shape after) of each exit action, found backwards from the declared output."""
        shape = list(self.local_shape(site.out_dims)) if site.exit else []
        out: list[tuple[Action, tuple[int, ...], tuple[int, ...]]] = []
        for a in reversed(site.exit):
            after = tuple(shape)
            if a.dim is not None:
                count = self.layout.mesh.size(a.axes)
                shape[a.dim] = shape[a.dim] * count if a.fn in ("scatter_sum", "slice") else shape[a.dim] // count
            out.append((a, tuple(shape), after))
        return reversed(out)

    def loss_rules(self, loss: LossPlan, final_dims: tuple[str, ...]) -> Iterator[Rule]:
        """The vocab-cut cross-entropy, once a micro-batch on the last stage."""
        if loss.vocab_axes:
            shape = (prod(self.local_shape(final_dims)[:-1]),)
            yield self.rule(
                "loss", "forward", "all_reduce", loss.vocab_axes, shape, self.layout.precision.scalar,
                3 * self.layout.micro_batches, note="max, sum of exp, target",
            )  # fmt: skip

    def transfer_rules(self, pp: int, hidden: tuple[int, ...]) -> Iterator[Rule]:
        """Activations to the next stage and gradients back, once a micro-batch at each stage boundary of this rank."""
        ranks, m, dtype = self.layout.mesh.size("pp"), self.layout.micro_batches, self.layout.precision.compute
        for first in range(self.layout.num_stages - 1):
            name = f"stage {first} -> {first + 1}"
            for phase, source, target in (("forward", first, first + 1), ("backward", first + 1, first)):
                if source % ranks == pp:
                    yield self.rule(name, phase, "send", ("pp",), hidden, dtype, m)
                if target % ranks == pp:
                    yield self.rule(name, phase, "recv", ("pp",), hidden, dtype, m)

    def once_rules(self, loss: LossPlan, last: bool) -> Iterator[Rule]:
        """Token count, reported loss and squared gradient norm: one number each, once a step."""
        mesh, scalar = self.layout.mesh, self.layout.precision.scalar
        if loss.label_axes:
            what = "valid tokens" if loss.kind == "cross_entropy" else "samples"
            yield self.rule("loss", "step", "all_reduce", loss.label_axes, (), "int64", 1, note=what)
            if last:
                yield self.rule("loss", "step", "all_reduce", loss.label_axes, (), scalar, 1, note="reported")
        if mesh.size("pp") > 1:
            note = "reported"
            yield self.rule("loss", "step", "broadcast", ("pp",), (), scalar, 1, note=note)
        everyone = mesh.ordered(mesh.axes)
        if everyone:
            yield self.rule("clip", "step", "all_reduce", everyone, (), scalar, 1, note="squared norm")


def padded(p: ParamPlan, count: int) -> tuple[int, ...]:
    """The local shape of a parameter whose dim 0 is divided into `count` equal pieces of ceil(dim 0 / count) rows."""
    return (-(-p.local_shape[0] // count) * count, *p.local_shape[1:]) if p.local_shape else ()


def gradient_rules(layout: Layout, params: Mapping[str, ParamPlan], backward: Mapping[str, bool]) -> Iterator[Rule]:
    """Gradient sums and the gathers of stored parameters, of the parameters that one pp coordinate holds.

    backward: whether backward goes through the block that a parameter is in.

    Whole gradients: one all_reduce over all axes of the sum. Stored ones: reduce_scatter over the store axes, then
    all_reduce of the shard over the others. Buckets are the engine's choice: `calls` is None.
    """
    reduce, compute, m = layout.precision.reduce, layout.precision.compute, layout.micro_batches
    sums = _Sums(layout)
    for p in params.values():
        store = p.store_optimizer
        count = layout.mesh.size(store)
        whole = prod(padded(p, count)) if store else prod(p.local_shape)
        if p.store_parameters:
            again = layout.store.reshard == "use"
            times = m if again else 1
            sums.add("parameters", "forward", "all_gather", store, compute, whole * times)
            if again and backward[p.name]:
                sums.add("parameters", "backward", "all_gather", store, compute, whole * times)
        if not p.requires_grad:
            continue
        if not store:
            sums.add("gradients", "step", "all_reduce", p.sum_axes, reduce, whole)
            continue
        # ZeRO-2 and 3 give up whole gradients after each micro-batch; a pipeline holds them until the last.
        each = m if p.store_gradients and layout.mesh.size("pp") == 1 else 1
        sums.add("gradients", "step", "reduce_scatter", store, reduce, whole * each)
        rest = tuple(a for a in p.sum_axes if a not in store)
        sums.add("gradients", "step", "all_reduce", rest, reduce, whole // count)
        if not p.store_parameters:
            sums.add("parameters", "step", "all_gather", store, compute, whole)
    yield from sums.rules()


class _Sums:
    """Adds up numbers a step by (site, phase, op, axes, dtype), in order of first use."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.numbers: dict[tuple[str, str, str, str, str], int] = {}

    def add(self, site: str, phase: str, op: str, axes: tuple[str, ...], dtype: str, numbers: int) -> None:
        label = self.layout.mesh.label(axes)
        if label:
            key = (site, phase, op, label, dtype)
            self.numbers[key] = self.numbers.get(key, 0) + numbers

    def rules(self) -> Iterator[Rule]:
        for (site, phase, op, label, dtype), numbers in self.numbers.items():
            yield Rule(site, phase, op, label, (numbers,), dtype, None, numbers * DTYPES[dtype])
