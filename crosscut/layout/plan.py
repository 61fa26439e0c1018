"""The result of a derivation: what the engine executes, the planner prices and `explain` shows.

Everything here is frozen data. No torch: a plan can be made, printed and compared on a machine without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosscut.layout.layout import Layout
    from crosscut.layout.spec import ModelSpec

Range = tuple[int, int]  # [start, stop) along one tensor dim
Ranges = tuple[tuple[Range, ...], ...]  # per tensor dim, the ranges held, in order: the local tensor is these in a row


def own_rows(rows: int, index: int, count: int) -> Range:
    """The [start, stop) of `rows` rows that piece `index` of `count` holds, as torch.chunk cuts: ceil(rows / count)
    each, the last ones fewer or none."""
    each = -(-rows // count)
    return min(index * each, rows), min((index + 1) * each, rows)


def block_of(names: Iterable[str]) -> str:
    """The module whose parameters are gathered together, for a parameter of these names: up to the first number in
    them ("layers.3" of "layers.3.attn.q.weight"), the same in all; "" for the rest of the model."""
    found = set()
    for name in names:
        parts = name.split(".")[:-1]
        stop = next((i for i, part in enumerate(parts) if part.isdigit()), -1) + 1
        while stop and stop < len(parts) and parts[stop].isdigit():  # a list of lists
            stop += 1
        found.add(".".join(parts[:stop]))
    return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class Action:
    """One placement change at one end of a boundary: the name of an autograd pair (comm/pairs.py) and over which axes.

    fn: `enter`, `leave`, `gather` (backward: reduce_scatter), `gather_replicated` (backward: own slice), `scatter_sum`
    or `slice`. `dim` is the tensor dim that is gathered, scattered or sliced (negative counts from the end); None for
    `enter` and `leave`. `needs_grad` is False where the value carries no gradient (token ids), so nothing is sent back.
    """

    fn: str
    axes: tuple[str, ...]
    dim: int | None = None
    needs_grad: bool = True


@dataclass(frozen=True)
class Site:
    """A boundary module with the actions at its entry (in order) and exit (in order), and the row biases added after.

    `module` is the name as in `named_modules()`. `in_dims`, `out_dims`: the named dims of the hidden value.
    """

    module: str
    in_dims: tuple[str, ...]
    out_dims: tuple[str, ...]
    entry: tuple[Action, ...] = ()
    exit: tuple[Action, ...] = ()
    row_biases: tuple[str, ...] = ()  # parameter names; added once, after the exit's reduction
    stage: int = 0


@dataclass(frozen=True)
class ParamPlan:
    """Where one parameter lives and what its gradient owes.

    ``axis_cuts[d]`` names the axes that cut tensor dim d (outermost first). ``parts[d]`` are the [start, stop) ranges
    of the parts of a fused dim (one part that spans the dim if it is not fused): each part is cut on its own, so a rank
    may hold several ranges of one dim.
    """

    name: str
    dims: tuple[str, ...]  # the table's row, one expression a tensor dim; () when the table has no row
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axis_cuts: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[Range, ...], ...]
    stages: tuple[int, ...]  # the pipeline stages that hold it: one, or two for tied ends
    sum_axes: tuple[str, ...]  # its gradient is summed over these, as one group, once a step
    store_optimizer: tuple[str, ...] = ()
    store_gradients: tuple[str, ...] = ()
    store_parameters: tuple[str, ...] = ()
    tied_to: str | None = None  # the name of the parameter that this name is another name of
    requires_grad: bool = True
    layer: int | None = None  # index in the ModuleList of layers, if it is in one

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Every axis that cuts some dim of it."""
        return tuple(a for axes in self.axis_cuts for a in axes)

    @property
    def store_axes(self) -> tuple[str, ...]:
        """The axes over which its rows are divided between uses: those of the optimizer's store, if it is trained or
        is kept cut itself."""
        return self.store_optimizer if self.requires_grad or self.store_parameters else ()

    def stored_ranges(self, coords: Mapping[str, int], sizes: Mapping[str, int]) -> Ranges:
        """What the rank at `coords` keeps of it under its store: its share of dim 0 of the local tensor (see
        `own_rows`). Without a store, or for a 0-d parameter, all of `ranges`."""
        held = self.ranges(coords, sizes)
        if not self.store_axes or not held:
            return held
        index, count = 0, 1
        for axis in self.store_axes:  # outermost first
            index, count = index * sizes[axis] + coords[axis], count * sizes[axis]
        first, last = own_rows(sum(stop - start for start, stop in held[0]), index, count)
        return (_part_of(held[0], first, last), *held[1:])

    def ranges(self, coords: Mapping[str, int], sizes: Mapping[str, int]) -> Ranges:
        """Per tensor dim, the [start, stop) ranges of the whole parameter that the rank at `coords` holds, in order."""
        out: list[tuple[Range, ...]] = []
        for axes, parts in zip(self.axis_cuts, self.parts, strict=True):
            index, count = 0, 1
            for axis in axes:  # outermost first
                index, count = index * sizes[axis] + coords[axis], count * sizes[axis]
            held = []
            for start, stop in parts:
                width = (stop - start) // count
                held.append((start + index * width, start + (index + 1) * width))
            out.append(tuple(held))
        return tuple(out)


def _part_of(ranges: tuple[Range, ...], first: int, last: int) -> tuple[Range, ...]:
    """The ranges of local rows [first, last) of a dim that holds `ranges`."""
    out, offset = [], 0
    for start, stop in ranges:
        a, b = max(first - offset, 0), min(last - offset, stop - start)
        if a < b:
            out.append((start + a, start + b))
        offset += stop - start
    return tuple(out)


@dataclass(frozen=True)
class LossPlan:
    """How the loss is made whole. All axis tuples hold only axes of size > 1."""

    kind: str  # "cross_entropy" | "mean" (the mean over samples of the user's function)
    vocab_axes: tuple[str, ...] = ()  # the logits' last dim is cut over these
    label_axes: tuple[str, ...] = ()  # axes that cut the labels the loss sees: token count and reported loss
    label_seq_axes: tuple[str, ...] = ()  # this rank's labels must still be cut along seq by these (SP, vocab uncut)


@dataclass(frozen=True)
class Rule:
    """One derived communication of one rank: per step, `calls` times, `bytes` in all.

    `bytes` is what one rank hands to the calls of a step together: all_reduce, broadcast, reduce S; all_gather S_out;
    reduce_scatter S_in; all_to_all what is sent, own part included; send S; recv 0; barrier 0. `shape` is the shape of
    one call's tensor. For bucketed gradients `calls` is None (the engine's bucket size decides) and `bytes` is the sum.
    Every rule is executed: predicted = counted.
    """

    site: str  # "layers.0.attn", "embed", "loss", "gradients", "clip", "stage 0 -> 1", ...
    phase: str  # "forward" | "recompute" | "backward" | "step"
    op: str
    axis: str  # label: "tp", or "dp+tp" for a group over several axes
    shape: tuple[int, ...]
    dtype: str  # "fp32", "int64", ...
    calls: int | None
    bytes: int
    where: str = ""  # "entry" | "exit" | ""
    note: str = ""

    @property
    def tag(self) -> str:
        """The name by which the ledger knows this rule's calls."""
        return f"{self.site}/{self.phase}" + (f"/{self.where}" if self.where else "")


@dataclass(frozen=True)
class Decision:
    """What one cut resolved to, and why: a line of `explain`."""

    dim: str
    axes: tuple[str, ...]
    resolved: str
    why: str


@dataclass(frozen=True)
class TiedPlan:
    """A weight that two pipeline stages hold: once a step, after its last gradient, they sum it between them."""

    names: tuple[str, ...]  # its names in the model, the first stage's first
    stages: tuple[int, int]  # the pp coordinates that hold them
    tag: str  # of the rule


@dataclass(frozen=True)
class Plan:
    """A model under a layout, derived: see `crosscut.layout.rules.derive`."""

    spec: ModelSpec
    layout: Layout
    batch: int  # global batch, in rows (samples)
    seq: int | None  # tokens a row; None for models without the dim
    params: Mapping[str, ParamPlan]  # by name, in the module's registration order; tied names included
    sites: tuple[Site, ...]  # every boundary of every stage, in execution order
    loss: LossPlan
    layer_stages: tuple[int, ...]  # the pipeline stage (global: 0 .. pp*virtual_stages-1) of each layer
    before: tuple[str, ...]  # modules that run before the layers (first stage)
    after: tuple[str, ...]  # modules that run after the layers (last stage)
    layers: str | None = None  # name of the ModuleList of layers
    hidden_shape: tuple[int, ...] = ()  # local shape of the value that goes from stage to stage, for one micro-batch
    tied: tuple[TiedPlan, ...] = ()  # only those whose stages differ
    decisions: tuple[Decision, ...] = ()
    group_axes: tuple[tuple[str, ...], ...] = ()  # every axis set (each of size > 1) over which some rank of some stage
    #   communicates, in one order for all ranks: the groups that must exist
    rules_by_stage: tuple[tuple[Rule, ...], ...] = field(default=(), repr=False)

    def rules(self, pp: int = 0) -> tuple[Rule, ...]:
        """The rules of one step for a rank whose pp coordinate is `pp` (all such ranks have the same)."""
        return self.rules_by_stage[pp]

    def totals(self, pp: int = 0) -> dict[str, dict[str, int]]:
        """Axis label -> op -> bytes of one step on one rank whose pp coordinate is `pp`."""
        return add_up(self.rules_by_stage[pp])

    def world_totals(self) -> dict[str, dict[str, int]]:
        """Axis label -> op -> bytes of one step, summed over all ranks."""
        each = self.layout.mesh.world_size // len(self.rules_by_stage)
        whole = add_up([r for rules in self.rules_by_stage for r in rules])
        return {axis: {op: size * each for op, size in ops.items()} for axis, ops in whole.items()}

    @property
    def num_parameters(self) -> int:
        """Numbers in the whole model, a tied parameter counted once."""
        return sum(prod(p.shape) for p in self.params.values() if p.tied_to is None)

    def stage_params(self, pp: int = 0) -> dict[str, ParamPlan]:
        """The parameters that a rank of pp coordinate `pp` holds, each once; a tied one under its first name."""
        ranks = len(self.rules_by_stage)
        return {n: p for n, p in self.params.items() if p.tied_to is None and pp in {s % ranks for s in p.stages}}


def add_up(rules: Iterable[Rule]) -> dict[str, dict[str, int]]:
    """Axis label -> op -> bytes of `rules` together."""
    totals: dict[str, dict[str, int]] = {}
    for rule in rules:
        ops = totals.setdefault(rule.axis, {})
        ops[rule.op] = ops.get(rule.op, 0) + rule.bytes
    return totals
