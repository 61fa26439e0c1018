"""`derive`: (dims table, shapes, layout) -> the plan that the engine executes, the planner prices and `explain` shows.

The steps, each in its own file: sizes of dims and cuts of parameters (params.py), pipeline stages (stages.py),
boundaries and their actions (sites.py), gradient sums and the check of every placement (grads.py), rules (emit.py).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from crosscut.layout.decisions import decide
from crosscut.layout.emit import Emitter, gradient_rules, padded
from crosscut.layout.errors import LayoutError
from crosscut.layout.grads import Placed, check, sum_axes
from crosscut.layout.layout import Layout
from crosscut.layout.params import Sizes, check_divides, dim_sizes, plan_params
from crosscut.layout.placements import LEAD
from crosscut.layout.plan import LossPlan, ParamPlan, Plan, Rule, TiedPlan, block_of
from crosscut.layout.sites import find_drafts, lead_dims, make_site, outside
from crosscut.layout.spec import ModelSpec
from crosscut.layout.stages import Stages, find_stages


def derive(spec: ModelSpec, layout: Layout, *, batch: int, seq: int | None = None) -> Plan:
    """Derive everything that `layout` makes of `spec`.

    batch: rows (samples) of the global batch of one step; seq: tokens a row, None for a model without that dim.
    Returns a Plan: where each parameter lives, what happens at each boundary, and every communication of a step with
    its bytes. The placement of every boundary value and of its gradient has then been checked. Raises LayoutError, one
    line, for what does not divide, is not declared, or would read a partial value as whole.
    """
    check_batch(layout, batch)
    sizes = Sizes(
        {**dim_sizes(spec), "batch": batch // layout.micro_batches, **({"seq": seq} if seq is not None else {})}
    )
    _refuse(spec, layout, sizes, seq)
    lead = lead_dims(seq)
    stages = find_stages(spec, layout)
    params = plan_params(spec, layout, sizes, stages)
    if seq is not None:
        check_divides("seq", seq, layout.axes_of("seq"), layout)

    placed: list[Placed] = []
    trains = {p.name: params[p.tied_to or p.name].requires_grad for p in spec.params}
    for draft in find_drafts(spec, params, lead):
        upstream = any(trains[p.name] for p in spec.params[: draft.first])
        site, axes = make_site(draft, params, layout, stages, upstream or stages.of(draft.module) > 0)
        placed.append((draft, site, axes))
    owner = {p.name: one for one in placed for p in one[0].params}
    params = {n: replace(p, sum_axes=sum_axes(p, owner.get(n), lead, layout)) for n, p in params.items()}
    for p in params.values():
        same = [a for a in p.store_axes if a not in p.sum_axes]
        if p.requires_grad and same:
            raise LayoutError(
                f"[store] {same[0]} cuts no data that parameter {p.name} acts on: each of its ranks has the whole "
                f"gradient, which would be added {layout.mesh.size(same[0])} times; cut batch over {same[0]} too"
            )
    for p in params.values():  # the names of a tied parameter act at two places and must agree
        if p.tied_to is not None and p.sum_axes != params[p.tied_to].sum_axes:
            raise LayoutError(
                f"parameter {p.name} is tied to {p.tied_to}, but their gradients are summed over {p.sum_axes} and "
                f"{params[p.tied_to].sum_axes}; cut both alike"
            )

    final_dims = _final_dims(spec, placed, lead, sizes)
    loss = _loss_plan(spec, final_dims, layout)
    check(spec, params, placed, lead, loss, final_dims, layout)

    emitter = Emitter(layout, sizes)
    hidden = _hidden_shape(emitter, placed, stages, lead, layout)
    tied = _tied(spec, params, stages, layout)
    rules = tuple(
        tuple(_stage_rules(pp, emitter, placed, params, stages, loss, final_dims, hidden, tied, trains))
        for pp in range(layout.mesh.size("pp"))
    )
    return Plan(
        spec, layout, batch, seq, params, tuple(site for _, site, _ in placed), loss, stages.layer_stages,
        stages.before, stages.after, stages.layers, hidden, tied,
        decide(spec, layout, sizes, stages, params, seq), _groups(layout, params, placed, loss), rules,
    )  # fmt: skip


def check_batch(layout: Layout, batch: int) -> None:
    """Raise LayoutError unless the global batch divides into micro-batches and then over the batch axes."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise LayoutError(f"global batch {batch!r} must be a whole number of at least 1")
    ranks, m = layout.mesh.size(layout.batch_axes), layout.micro_batches
    if batch % (ranks * m):
        label = layout.mesh.label(layout.batch_axes) or "dp"
        whole = ranks * m
        near = [n for n in (batch // whole * whole, (batch // whole + 1) * whole) if n]
        raise LayoutError(
            f"global batch {batch} is not divisible by {label}={ranks} x micro_batches={m} = {whole}; "
            f"use a batch of {' or '.join(map(str, near))}"
        )


def _refuse(spec: ModelSpec, layout: Layout, sizes: Sizes, seq: int | None) -> None:
    """What a layout can say but a derivation does not know yet."""
    if seq is not None and (isinstance(seq, bool) or not isinstance(seq, int) or seq < 1):
        raise LayoutError(f"seq {seq!r} must be a whole number of at least 1")
    if seq is not None:
        for axis in layout.axes_of("seq"):
            if not any(axis in layout.axes_of(d) for d in ("heads", "mlp", "vocab") if d in sizes.of):
                raise LayoutError(
                    f"seq over {axis}={layout.mesh.size(axis)} is context parallelism, which cannot be derived yet; "
                    f"use {axis}=1, or cut seq over the axis that cuts heads (--sp)"
                )
    if "experts" in sizes.of and layout.axes_of("experts"):
        axes = layout.axes_of("experts")
        raise LayoutError(
            f"experts over {layout.mesh.label(axes)}={layout.mesh.size(axes)} is expert parallelism, which cannot be "
            f"derived yet; leave experts out of [cuts]"
        )


def _final_dims(spec: ModelSpec, placed: list[Placed], lead: tuple[str, ...], sizes: Sizes) -> tuple[str, ...]:
    """The dims of what the model gives out. The last boundary's, unless an uncut parameter acts after it."""
    last = spec.params[-1]
    if placed and any(p.name == last.name for p in placed[-1][0].params):
        return placed[-1][1].out_dims
    row = spec.dims.row(last.name)
    return (*lead, row[0].text) if row else lead


def _loss_plan(spec: ModelSpec, final_dims: tuple[str, ...], layout: Layout) -> LossPlan:
    cuts = dict(zip(final_dims, outside(final_dims, layout), strict=True))
    features = final_dims[-1]
    vocab = cuts[features] if spec.loss == "cross_entropy" and features not in LEAD else ()
    labels = layout.mesh.ordered({a for d in LEAD for a in cuts.get(d, ())})
    seq_axes = tuple(a for a in cuts.get("seq", ()) if a in labels)
    return LossPlan(spec.loss, vocab, labels, seq_axes)


def _hidden_shape(
    emitter: Emitter, placed: list[Placed], stages: Stages, lead: tuple[str, ...], layout: Layout
) -> tuple[int, ...]:
    """The local shape of what goes from stage to stage; () without a pipeline. Raises LayoutError where a stage would
    end on a value that is cut along its features."""
    if stages.num_stages == 1:
        return ()
    hidden = (*lead, "embed")
    for stage in range(stages.num_stages - 1):
        inside = [site for _, site, _ in placed if site.stage == stage]
        if not inside:
            continue
        out_dims = inside[-1].out_dims
        kept = {a for d, axes in zip(out_dims, outside(out_dims, layout), strict=True) if d not in LEAD for a in axes}
        if kept:
            raise LayoutError(
                f"pp={layout.mesh.size('pp')}: stage {stage} ends with {inside[-1].module!r}, whose output stays cut "
                f"over {layout.mesh.label(tuple(kept))}; a stage must hold whole pairs of columns and rows"
            )
    return emitter.local_shape(hidden)


def _tied(spec: ModelSpec, params: dict[str, ParamPlan], stages: Stages, layout: Layout) -> tuple[TiedPlan, ...]:
    """The weights that two pp coordinates hold under two names."""
    pp, out = layout.mesh.size("pp"), []
    for p in spec.params:
        if p.tied_to is None:
            continue
        names = (p.tied_to, p.name)
        held = tuple(stages.of(n) % pp for n in names)
        if len(params[p.name].stages) > 2:
            stages_ = params[p.name].stages
            raise LayoutError(f"parameter {p.tied_to} is held by stages {stages_}; a tied weight may be on two")
        if held[0] != held[1]:
            first, second = sorted(zip(held, names, strict=True))
            out.append(TiedPlan((first[1], second[1]), (first[0], second[0]), f"tied {p.tied_to}/step"))
    return tuple(out)


def _stage_rules(
    pp: int, emitter: Emitter, placed: list[Placed], params: dict[str, ParamPlan], stages: Stages, loss: LossPlan,
    final_dims: tuple[str, ...], hidden: tuple[int, ...], tied: tuple[TiedPlan, ...], trains: dict[str, bool],
) -> list[Rule]:  # fmt: skip
    layout, ranks = emitter.layout, emitter.layout.mesh.size("pp")
    rules: list[Rule] = []
    last = (stages.num_stages - 1) % ranks == pp
    rules += emitter.transfer_rules(pp, hidden)
    for draft, site, _ in placed:
        if site.stage % ranks != pp:
            continue
        into = site.stage > 0 or any(trains[n] for n in list(trains)[: draft.first])
        own = any(trains[p.name] for p in draft.params)
        columns = any(trains[p.name] for p in draft.params if p.kind == "linear.weight" and params[p.name].axis_cuts[0])
        full = layout.recompute.policy == "full" and stages.layer_of(site.module) is not None
        rules += emitter.site_rules(site, into, into or own, layout.recompute.regather and columns, full)
    if last:
        rules += emitter.loss_rules(loss, final_dims)
    called: dict[str, list[str]] = {}
    for name, p in params.items():  # a tied parameter is one tensor on a stage, whatever its names there
        if stages.of(name) % ranks == pp:
            called.setdefault(p.tied_to or name, []).append(name)
    held = {root: params[root] for root in called}
    rules += gradient_rules(layout, held, _backward_goes_through(called, trains, pp))
    for one in tied:
        p = params[one.names[0]]
        if pp in one.stages and trains[one.names[0]]:
            count = layout.mesh.size(p.store_optimizer)
            shape = (prod(padded(p, count)) // count,) if p.store_optimizer else p.local_shape
            name, dtype = one.tag.removesuffix("/step"), layout.precision.reduce
            note = f"= {one.names[1]}"
            rules.append(emitter.rule(name, "step", "all_reduce", ("pp",), shape, dtype, 1, note=note))
    rules += emitter.once_rules(loss, last)
    return rules


def _backward_goes_through(called: dict[str, list[str]], trains: dict[str, bool], pp: int) -> dict[str, bool]:
    """Whether backward runs through the block of each parameter of a stage: something in it, or before it, is trained.

    called: the names of each on this stage. A stage after the first always sends a gradient back.
    """
    own = {name for names in called.values() for name in names}
    first = next((i for i, name in enumerate(trains) if trains[name] and name in own), len(trains))
    last = {block_of([name]): i for i, name in enumerate(trains)}
    last[""] = len(trains) - 1  # the rest of the model is in use from end to end
    return {root: pp > 0 or first <= last[block_of(names)] for root, names in called.items()}


def _groups(
    layout: Layout, params: dict[str, ParamPlan], placed: list[Placed], loss: LossPlan
) -> tuple[tuple[str, ...], ...]:
    """Every axis set over which some rank communicates, each of size > 1, the same list for every rank."""
    mesh = layout.mesh
    found: set[tuple[str, ...]] = {(a,) for a in mesh.axes}
    for _, site, _ in placed:
        found |= {action.axes for action in (*site.entry, *site.exit)}
    for p in params.values():
        rest = tuple(a for a in p.sum_axes if a not in p.store_optimizer)
        found |= {p.sum_axes, p.store_optimizer, rest, *p.axis_cuts}
    found |= {loss.vocab_axes, loss.label_axes, mesh.axes}
    ordered = {mesh.ordered(axes) for axes in found}
    return tuple(sorted((a for a in ordered if a), key=lambda axes: (len(axes), [mesh.axes.index(x) for x in axes])))
