"""What a derivation knows of a model: its parameters, and the dims table that names their dims and its boundaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TypeVar

from crosscut.layout.cuts import DIM_NAMES
from crosscut.layout.errors import LayoutError, nearest

KINDS = ("linear.weight", "linear.bias", "embedding.weight", "other")
LOSSES = ("cross_entropy", "mean")
T = TypeVar("T")

UNNAMED = "_"  # a dim without a name: never cut


@dataclass(frozen=True)
class Part:
    """One part of a tensor dim: a product of factors, e.g. heads*head_dim. `label` names a part of a fused dim."""

    label: str
    factors: tuple[str, ...]


@dataclass(frozen=True)
class DimExpr:
    """One tensor dim of a row: a name, a product (`heads*head_dim`) or a fusion (`q:heads*head_dim + k:...`)."""

    text: str
    parts: tuple[Part, ...]

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> DimExpr:
        """From its text. Raises LayoutError when it is not of one of the three forms."""
        parts = []
        for piece in re.sub(r"\s+", "", text).split("+"):
            label, colon, body = piece.rpartition(":")
            factors = tuple(body.split("*"))
            if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", f) for f in factors) or (colon and not label):
                raise LayoutError(f'dim {text!r} is not a name, a product a*b, or a fusion "q:a*b + k:c*b"')
            parts.append(Part(label, factors))
        return cls(re.sub(r"\s+", "", text).replace("+", " + "), tuple(parts))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it, each once."""
        return tuple(dict.fromkeys(f for part in self.parts for f in part.factors if f != UNNAMED))

    def part_sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The size of each part."""
        return tuple(prod(sizes[f] for f in part.factors) for part in self.parts)


@dataclass(frozen=True)
class Boundary:
    """The named dims of the hidden value that goes into a module and of the one that comes out."""

    in_dims: tuple[str, ...]
    out_dims: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Boundary:
        """From `"batch seq embed -> batch seq embed"`."""
        before, arrow, after = text.partition("->")
        ins, outs = _words(before), _words(after)
        if not arrow or not ins or not outs or "->" in after:
            raise LayoutError(f'boundary {text!r} is not of the form "batch seq embed -> batch seq embed"')
        return cls(ins, outs)


Row = tuple[DimExpr, ...]


@dataclass(frozen=True, init=False)
class Dims:
    """The dims table of a model.

    `table` maps a name pattern (`*` matches one component of a dotted name) to a parameter's dims, a tuple of
    expressions or one string (`("heads*head_dim", "embed")`, `"embed"`), or to a boundary: a `Boundary` or a string
    with an arrow (`"batch seq embed -> batch seq embed"`). `sizes` gives the sizes of dims that shapes alone do not
    tell (heads). `layers` is the name of the ModuleList of layers; by default the one family of numbered modules.
    `before` and `after` name the modules that run before and after the layers; by default those registered before and
    after. Raises LayoutError, one line, for an unknown dim (with the nearest) or a row that cannot be read.
    """

    params: tuple[tuple[str, Row], ...]
    boundaries: tuple[tuple[str, Boundary], ...]
    sizes: Mapping[str, int] = field(hash=False)
    layers: str | None
    before: tuple[str, ...] | None
    after: tuple[str, ...] | None

    def __init__(
        self,
        table: Mapping[str, str | tuple[str, ...] | Boundary] | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        layers: str | None = None,
        before: Iterable[str] | None = None,
        after: Iterable[str] | None = None,
    ) -> None:
        known = (*DIM_NAMES, *(sizes or {}))
        params: list[tuple[str, Row]] = []
        boundaries: list[tuple[str, Boundary]] = []
        for pattern, value in (table or {}).items():
            if isinstance(value, str) and "->" in value:
                value = Boundary.parse(value)
            if isinstance(value, Boundary):
                _check_names(pattern, (*value.in_dims, *value.out_dims), known)
                boundaries.append((pattern, value))
                continue
            texts = _words(re.sub(r"\s*\+\s*", "+", value)) if isinstance(value, str) else tuple(value)
            row = tuple(DimExpr.parse(t) for t in texts)
            _check_names(pattern, tuple(n for e in row for n in e.names), known)
            params.append((pattern, row))
        for name, size in (sizes or {}).items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(f"dims table: sizes[{name!r}] = {size!r} must be a whole number of at least 1")
        for key, value_ in (
            ("params", tuple(params)),
            ("boundaries", tuple(boundaries)),
            ("sizes", dict(sizes or {})),
            ("layers", layers),
            ("before", None if before is None else tuple(before)),
            ("after", None if after is None else tuple(after)),
        ):
            object.__setattr__(self, key, value_)

    def row(self, name: str) -> Row | None:
        """The row of the parameter `name`, from the pattern with the fewest stars; None without one."""
        return _lookup(name, self.params)

    def boundary(self, module: str) -> Boundary | None:
        """The boundary that the table declares for the module `module`, or None."""
        return _lookup(module, self.boundaries)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: whole shape, what kind of module it belongs to, and the parameter whose other name it is."""

    name: str
    shape: tuple[int, ...]
    kind: str  # one of KINDS
    module: str  # the module that owns it, as in named_modules()
    tied_to: str | None = None
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        """Numbers in the whole parameter (1 for a 0-d one)."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """A model as a derivation sees it. `params` in registration order, every name of a tied parameter included."""

    name: str
    params: tuple[ParamSpec, ...]
    dims: Dims
    input_dims: tuple[str, ...]
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise LayoutError(f"unknown loss {self.loss!r}{nearest(self.loss, LOSSES)}")
        names = [p.name for p in self.params]
        for p in self.params:
            if p.kind not in KINDS:
                raise LayoutError(f"parameter {p.name}: unknown kind {p.kind!r}{nearest(p.kind, KINDS)}")
            if p.tied_to is not None and p.tied_to not in names:
                raise LayoutError(f"parameter {p.name} is tied to {p.tied_to!r}, which the model does not have")

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters, tied ones counted once."""
        return sum(p.numel for p in self.params if p.tied_to is None)


def matches(pattern: str, name: str) -> bool:
    """Whether the dotted `name` fits `pattern`, where `*` stands for one component."""
    ours, theirs = pattern.split("."), name.split(".")
    return len(ours) == len(theirs) and all(p in ("*", n) for p, n in zip(ours, theirs, strict=True))


def _lookup(name: str, rows: tuple[tuple[str, T], ...]) -> T | None:
    found = [(pattern.split(".").count("*"), i) for i, (pattern, _) in enumerate(rows) if matches(pattern, name)]
    if not found:
        return None
    fewest = min(stars for stars, _ in found)
    best = [i for stars, i in found if stars == fewest]
    if len(best) > 1:
        raise LayoutError(f"dims table: rows {rows[best[0]][0]!r} and {rows[best[1]][0]!r} both fit {name!r}; keep one")
    return rows[best[0]][1]


def _words(text: str) -> tuple[str, ...]:
    return tuple(w for w in re.split(r"[\s,()]+", text) if w)


def _check_names(pattern: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known and name != UNNAMED:
            raise LayoutError(f"dims table, row {pattern!r}: unknown dim {name!r}{nearest(name, known)}")
