"""Placements of a value and of its gradient over one mesh axis, the algebra of the actions, and the checker's walk.

Over one axis a value is replicated (the same on every rank), cut along a dim, or partial (each rank holds a summand).
Its gradient is one of the three as well. Four pairs occur:

    WHOLE    value replicated, gradient replicated     the residual stream
    SHARED   value replicated, gradient partial        what ranks that hold different columns read
    CUT(d)   value cut along d, gradient cut along d
    OWED     value partial, gradient replicated        what rows give out

Every action is a step from one pair to another, and so is every cut weight. The walk below starts from the pair that
the boundary declares outside, follows entry, weights and exit, and must arrive at the pair that it declares after it.
A partial value or gradient that meets anything but the reduction it is owed stops the walk: that is a LayoutError.
"""

from __future__ import annotations

from dataclasses import dataclass

from crosscut.layout.errors import LayoutError
from crosscut.layout.plan import Action, Site

LEAD = ("batch", "seq")
FEATURES = "features"  # the last dim of a hidden value, whatever its name


@dataclass(frozen=True)
class Replicated:
    """The same on every rank of the axis."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Cut:
    """Divided along `dim`: batch, seq or FEATURES."""

    dim: str

    def __str__(self) -> str:
        return f"cut along {self.dim}"


@dataclass(frozen=True)
class Partial:
    """A summand: the value is the sum over the ranks of the axis."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicated | Cut | Partial


@dataclass(frozen=True)
class Flow:
    """The placement of a value and of its gradient over one axis."""

    value: Placement
    grad: Placement

    def __str__(self) -> str:
        return f"{self.value} (gradient {self.grad})"


WHOLE = Flow(Replicated(), Replicated())
SHARED = Flow(Replicated(), Partial())
OWED = Flow(Partial(), Replicated())


def cut(dim: str) -> Flow:
    """The pair of a value that is cut along `dim`, as its gradient then is."""
    return Flow(Cut(dim), Cut(dim))


def dim_kind(name: str) -> str:
    """batch and seq by name; every other dim of a hidden value is its features."""
    return name if name in LEAD else FEATURES


def step(flow: Flow, action: Action, dim: str | None) -> Flow | None:
    """What `action` makes of `flow` (dim: the kind of dim it gathers, scatters or slices); None if it does not apply.

    Forward it acts on the value; backward it takes the gradient of its result and must give the gradient of `flow`.
    """
    along = cut(dim) if dim is not None else None
    table: dict[str, tuple[Flow | None, Flow | None]] = {
        "enter": (WHOLE, SHARED),  # identity / all_reduce
        "leave": (OWED, WHOLE),  # all_reduce / identity
        "gather": (along, SHARED),  # all_gather / reduce_scatter
        "gather_replicated": (along, WHOLE),  # all_gather / own slice
        "scatter_sum": (OWED, along),  # reduce_scatter / all_gather
        "slice": (SHARED, along),  # own slice / nothing: zeros elsewhere, so the gradient before it is partial
    }
    before, after = table[action.fn]
    if action.fn == "slice" and not action.needs_grad and flow == WHOLE:
        return after  # ids: no gradient that could be partial
    return after if before is not None and flow == before else None


@dataclass(frozen=True)
class Inside:
    """What acts between a site's entry and exit, over one axis."""

    columns: bool = False  # Linear weights whose outputs are cut
    rows: bool = False  # Linear weights whose inputs are cut
    vocab: bool = False  # an Embedding whose rows are cut


def walk(site: Site, axis: str, start: Flow, inside: Inside, end: Flow) -> Flow:
    """Follow one site over one axis from `start` to `end`; returns the pair that uncut parameters inside act on.

    Raises LayoutError naming the site, the axis and what is missing.
    """
    flow = start
    for action in site.entry:
        if axis in action.axes:
            flow = _apply(site, "entry", axis, flow, action, site.in_dims)
    if inside.vocab:
        if flow.value != Replicated():
            raise _error(
                site, axis, f"the ids are {flow.value}, but a vocab-cut look-up needs all of them on every rank"
            )
        flow = OWED
    acted = flow
    if inside.columns:
        if flow == WHOLE:
            raise _error(
                site, axis, "each rank's columns give a partial gradient of the input and nothing sums it: "
                "`enter` (all_reduce in backward) is missing at the entry"
            )  # fmt: skip
        if isinstance(flow.value, Cut):
            raise _error(
                site, axis, f"the columns read an input that is {flow.value} as if it were whole: "
                f"`gather` along {flow.value.dim} is missing at the entry"
            )  # fmt: skip
        if flow != SHARED:
            raise _error(site, axis, f"the columns read a value that is {flow}")
        flow = acted = cut(FEATURES)
    if inside.rows:
        if flow != cut(FEATURES):
            raise _error(site, axis, f"the rows need an input cut along its features, but it is {flow.value}")
        flow = OWED
    for action in site.exit:
        if axis in action.axes:
            flow = _apply(site, "exit", axis, flow, action, site.out_dims)
    if flow != end:
        raise _error(site, axis, _missing(flow, end))
    return acted


def _apply(site: Site, where: str, axis: str, flow: Flow, action: Action, dims: tuple[str, ...]) -> Flow:
    dim = None if action.dim is None else dim_kind(dims[action.dim])
    after = step(flow, action, dim)
    if after is None:
        along = f" along {dim}" if dim else ""
        raise _error(site, axis, f"`{action.fn}`{along} at the {where} meets a value that is {flow}")
    return after


def _missing(flow: Flow, end: Flow) -> str:
    if flow.value == Partial():
        fix = "`leave` (all_reduce)" if end == WHOLE else "`scatter_sum` (reduce_scatter)"
        return f"the output is a partial sum and is read as whole: {fix} is missing at the exit"
    if flow == SHARED:
        return "the gradient of the output is partial and nothing sums it: the exit must reduce it"
    if isinstance(flow.value, Cut) and end == WHOLE:
        return (
            f"the output is {flow.value} and is read as whole: `gather_replicated` (all_gather) is missing at the exit"
        )
    return f"the output is {flow}, but the table declares it {end}"


def _error(site: Site, axis: str, what: str) -> LayoutError:
    return LayoutError(f"boundary {site.module!r} over {axis}: {what}")
