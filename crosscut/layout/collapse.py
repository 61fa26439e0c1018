"""Many equal lines as one: `layers.0.attn` to `layers.3.attn` become `layers.0-3.attn`, pipeline ranks a range."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from crosscut.layout.plan import ParamPlan, Plan, Rule

TRANSFER = re.compile(r"stage (\d+) -> (\d+)")


@dataclass(frozen=True)
class RuleLine:
    """Equal rules of one rank as one line. `rule.site` is a pattern with `*`; `calls` and `bytes` are sums over it."""

    rule: Rule
    sites: tuple[str, ...]  # the sites of all stages, in order
    stages: tuple[int, ...]  # the pp coordinates of the ranks that have it
    tags: tuple[tuple[str, ...], ...]  # the ledger tags it stands for, for each of `stages`

    @property
    def site(self) -> str:
        """The sites in one word: `layers.0-3.attn`, `stage 0 -> 1 -> 2`."""
        return join_names(self.sites, self.rule.site)


@dataclass
class _Sum:
    rule: Rule
    calls: int | None
    bytes: int
    sites: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)


def collapse_rules(plan: Plan, stages: Iterable[int]) -> list[RuleLine]:
    """The rules of the ranks at these pp coordinates, equal ones together, in the order of a step."""
    found: dict[tuple[object, ...], list[tuple[int, _Sum]]] = {}
    for pp in stages:
        for key, total in _one_rank(plan, pp).items():
            found.setdefault((*key, total.calls, total.bytes), []).append((pp, total))
    lines = []
    for held in found.values():
        first = held[0][1]
        rule = replace(first.rule, site=pattern(first.rule.site, plan.layers), calls=first.calls, bytes=first.bytes)
        sites = tuple(dict.fromkeys(s for _, total in held for s in total.sites))
        tags = tuple(tuple(dict.fromkeys(total.tags)) for _, total in held)
        lines.append(RuleLine(rule, sites, tuple(pp for pp, _ in held), tags))
    return [line for phase in ("forward", "recompute", "backward", "step") for line in _in_order(lines, phase)]


def _in_order(lines: list[RuleLine], phase: str) -> list[RuleLine]:
    """The lines of one phase; backward runs from the last site to the first; a stage receives first and sends last."""
    mine = [line for line in lines if line.rule.phase == phase]
    sites = list(dict.fromkeys(line.rule.site for line in mine))
    if phase == "backward":
        sites.reverse()
    ordered = [line for site in sites for line in mine if line.rule.site == site]
    return sorted(ordered, key=lambda line: {"recv": 0, "send": 2}.get(line.rule.op, 1))


def _one_rank(plan: Plan, pp: int) -> dict[tuple[object, ...], _Sum]:
    """Rules that differ only in the layer or the stage they name, added up."""
    sums: dict[tuple[object, ...], _Sum] = {}
    for r in plan.rules(pp):
        key = (
            pattern(r.site, plan.layers),
            r.phase,
            r.op,
            r.axis,
            r.where,
            r.shape if r.calls else (),
            r.dtype,
            r.note,
        )
        total = sums.setdefault(key, _Sum(r, 0 if r.calls is not None else None, 0))
        if r.calls is not None and total.calls is not None:
            total.calls += r.calls
        total.bytes += r.bytes
        total.sites.append(r.site)
        total.tags.append(r.tag)
    return sums


def pattern(name: str, layers: str | None) -> str:
    """`layers.3.attn` -> `layers.*.attn`, `stage 0 -> 1` -> `stage *`; other names as they are."""
    if TRANSFER.fullmatch(name):
        return "stage *"
    if layers is not None and name.startswith(layers + "."):
        index, dot, rest = name[len(layers) + 1 :].partition(".")
        if index.isdigit():
            return f"{layers}.*{dot}{rest}"
    return name


def join_names(names: Iterable[str], shape: str) -> str:
    """Names of one pattern (`shape`) in one word, their numbers as ranges."""
    names = list(names)
    if len(names) == 1:
        return names[0]
    moves = [m for n in names if (m := TRANSFER.fullmatch(n))]
    if moves:
        chain = sorted({int(g) for m in moves for g in m.groups()})
        if len(chain) == len(moves) + 1 and len(chain) <= 4:
            return "stage " + " -> ".join(map(str, chain))
        return f"stages {ranges(int(m.group(1)) for m in moves)} -> next"
    before, _, after = shape.partition("*")
    numbers = [int(n[len(before) : len(n) - len(after)]) for n in names]
    return f"{before}{ranges(numbers)}{after}"


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2,5"`."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


@dataclass(frozen=True)
class ParamLine:
    """Parameters that differ only in their layer, as one line."""

    name: str
    count: int
    param: ParamPlan  # the first of them
    stages: tuple[int, ...]  # the pp coordinates that hold some of them


def collapse_params(plan: Plan, stages: Iterable[int]) -> list[ParamLine]:
    """The parameters held by ranks at these pp coordinates, equal ones together, in registration order."""
    wanted, ranks = set(stages), len(plan.rules_by_stage)
    found: dict[tuple[object, ...], list[ParamPlan]] = {}
    for name, p in plan.params.items():
        if not wanted & {s % ranks for s in p.stages}:
            continue
        key = (
            pattern(name, plan.layers), p.dims, p.shape, p.local_shape, p.axis_cuts, p.sum_axes, p.tied_to,
            p.store_optimizer, p.store_gradients, p.store_parameters, p.requires_grad,
        )  # fmt: skip
        found.setdefault(key, []).append(p)
    lines = []
    for held in found.values():
        stages_ = tuple(sorted({s % ranks for p in held for s in p.stages} & wanted))
        lines.append(
            ParamLine(
                join_names([p.name for p in held], pattern(held[0].name, plan.layers)), len(held), held[0], stages_
            )
        )
    return lines
