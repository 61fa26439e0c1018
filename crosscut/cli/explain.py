"""`crosscut explain`: the mesh, who holds what, what each cut resolved to, and every communication of one step.

No process is started and torch is not imported (except for a model of one's own, which is built on meta). With a run
folder instead of a config, the communications that its ranks counted stand beside the derived ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.cli.config_flags import LAYOUT_FLAGS, add_config_arguments, overrides_of, world_size_of
from crosscut.cli.output import add_json_argument, write_json
from crosscut.cli.target import Target, target_of
from crosscut.layout.errors import LayoutError
from crosscut.layout.plan import Plan, add_up
from crosscut.layout.rules import derive

if TYPE_CHECKING:
    from crosscut.cli.counted import Counted

SCHEMA = "crosscut.explain"


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="show every communication a layout implies, without running anything",
        description="Show what a layout makes of a model: the mesh, who holds what, what each cut resolved to and "
        "why, and every communication of one step with its bytes. Nothing is run. With a run folder in the place of "
        "CONFIG, what its ranks counted stands beside it; exit code 1 if that differs.",
    )
    add_config_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank: its slices and its communications")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Explain; 0, or 1 when a run counted something else than was derived."""
    folder = Path(args.config) if args.config is not None and Path(args.config).is_dir() else None
    target = _target(args, folder)
    plan = derive(target.spec, target.layout, batch=target.batch, seq=target.seq)
    stages = _stages(plan, args.rank)
    counted = None
    if folder is not None:
        from crosscut.cli.counted import read_counts

        counted = read_counts(folder, plan)
    if args.json:
        write_json(args.json, SCHEMA, as_json(plan, stages, counted))
    if args.json != "-":
        from crosscut.cli.explain_view import show

        show(plan, stages, rank=args.rank, counted=counted, origin=target.layout_origin)
    return 0 if counted is None or counted.equal(stages) else 1


def _target(args: argparse.Namespace, folder: Path | None) -> Target:
    overrides = overrides_of(args, LAYOUT_FLAGS)
    if folder is None:
        return target_of(args.config, overrides, world_size_of(args))
    given = sorted(overrides)
    if given:
        raise ValueError(f"{folder} is a run: it has its own model and layout; drop --{given[0].replace('_', '-')}")
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{folder} is no run folder: it has no config.toml")
    layout = folder / "layout.toml"
    return target_of(str(folder / "config.toml"), {"layout": str(layout)} if layout.is_file() else {}, None)


def _stages(plan: Plan, rank: int | None) -> tuple[int, ...]:
    """The pp coordinates to show: all, or that of one rank."""
    mesh = plan.layout.mesh
    if rank is None:
        return tuple(range(mesh.size("pp")))
    if not 0 <= rank < mesh.world_size:
        raise LayoutError(f"--rank {rank}: the mesh {mesh.describe()} has ranks 0..{mesh.world_size - 1}")
    return (mesh.coords(rank)["pp"],)


def as_json(plan: Plan, stages: tuple[int, ...], counted: Counted | None) -> dict[str, Any]:
    """Everything the text shows, uncollapsed.

    `rows`: the rules of one rank of each pipeline stage (`stage` is its pp coordinate; without pp every rank has the
    same). `totals`: the rows added up by axis and op; `totals_by_stage` one rank each; `world_totals` all ranks.
    """
    layout, ranks = plan.layout, plan.layout.mesh.size("pp")
    rows = []
    for pp in stages:
        for r in plan.rules(pp):
            row = {
                "stage": pp, "site": r.site, "phase": r.phase, "where": r.where, "op": r.op, "axis": r.axis,
                "calls": r.calls, "bytes": r.bytes, "shape": list(r.shape), "dtype": r.dtype, "tag": r.tag,
                "note": r.note,
            }  # fmt: skip
            if counted is not None:
                row |= counted.of_rule(plan, pp, r)
            rows.append(row)
    parameters = [
        {
            "name": p.name, "dims": list(p.dims), "shape": list(p.shape), "local_shape": list(p.local_shape),
            "axis_cuts": [list(a) for a in p.axis_cuts], "sum_axes": list(p.sum_axes),
            "stages": sorted({s % ranks for s in p.stages}), "tied_to": p.tied_to, "layer": p.layer,
            "store": {"optimizer": list(p.store_optimizer), "gradients": list(p.store_gradients),
                      "parameters": list(p.store_parameters)},
        }
        for p in plan.params.values()
        if {s % ranks for s in p.stages} & set(stages)
    ]  # fmt: skip
    body: dict[str, Any] = {
        "model": {"name": plan.spec.name, "num_parameters": plan.num_parameters},
        "batch": plan.batch,
        "seq": plan.seq,
        "mesh": layout.mesh.sizes,
        "world_size": layout.mesh.world_size,
        "layout": layout.to_dict(),
        "rows": rows,
        "totals": add_up([r for pp in stages for r in plan.rules(pp)]),
        "totals_by_stage": [{"stage": pp, "totals": plan.totals(pp)} for pp in stages],
        "world_totals": plan.world_totals(),
        "parameters": parameters,
        "boundaries": [
            {
                "module": s.module, "in_dims": list(s.in_dims), "out_dims": list(s.out_dims), "stage": s.stage % ranks,
                "entry": [_action(a.fn, a.axes, a.dim) for a in s.entry],
                "exit": [_action(a.fn, a.axes, a.dim) for a in s.exit],
            }
            for s in plan.sites
            if s.stage % ranks in stages
        ],
        "decisions": [
            {"dim": d.dim, "axes": list(d.axes), "resolved": d.resolved, "why": d.why} for d in plan.decisions
        ],
    }  # fmt: skip
    if counted is not None:
        body["counted"] = counted.as_json(stages)
    return json.loads(json.dumps(body))  # plain lists and dicts only


def _action(fn: str, axes: tuple[str, ...], dim: int | None) -> dict[str, Any]:
    return {"fn": fn, "axes": list(axes), "dim": dim}
