"""What can be known before anything starts: does the layout fit, is there text, is there room, what will be sent."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crosscut.layout.plan import ParamPlan, Plan
from crosscut.layout.store import DTYPES
from crosscut.train import corpus, run_folder
from crosscut.train.checkpoint_index import Index
from crosscut.train.config import Config
from crosscut.train.display import megabytes, number
from crosscut.train.model import plan_of

STATES = {"adamw": 2, "sgd": 1}  # numbers kept a parameter by the optimizer


@dataclass(frozen=True)
class Preflight:
    """The findings. `text`: None for a model that takes no text."""

    config: Config
    start: run_folder.Start
    plan: Plan
    text: corpus.Corpus | None
    checkpoint_bytes: int
    num_checkpoints: int
    free_bytes: int


def check(config: Config, start: run_folder.Start, *, launched: bool = False, check_folder: bool = True) -> Preflight:
    """Everything that would stop the run later raises ValueError here; nothing is started or written.

    `launched`: this process is one of several ranks already (torchrun), on a host that may not hold all of them.
    `check_folder`: also whether the run folder may be used.
    """
    from crosscut.comm.choose import choose_backend
    from crosscut.parallel.supported import refuse_unsupported

    plan = plan_of(config)
    refuse_unsupported(config.layout)
    if not launched:
        choose_backend(config.run.backend, config.run.device, config.layout.mesh.world_size)
    text = None
    if config.kind != "mlp":
        if config.kind == "transformer" and config.model.vocab < 256:
            raise ValueError(f"model.vocab = {config.model.vocab} cannot hold text as bytes; use 256 or more")
        text = corpus.find(config.data.path, config.data.val_fraction)
        text.require(config.train.seq_len)
    if start.checkpoint is not None:  # its content is digested later, by the ranks
        index = Index.open(start.checkpoint)
        for name in index.body["files"]:
            index.check_file(name, content=False)
        index.check_parameters(plan.params)
    if check_folder:
        run_folder.check_folder(start, config.run.overwrite)
    every = config.run.save_every
    num_checkpoints = (config.train.steps // every if every else 0) + (not every or config.train.steps % every > 0)
    numbers = sum(math.prod(p.shape) for p in plan.params.values() if p.tied_to is None)
    checkpoint_bytes = numbers * DTYPES[config.layout.precision.master] * (1 + states(config))
    place = next(path for path in (start.folder, *start.folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < checkpoint_bytes * num_checkpoints:
        raise ValueError(
            f"{num_checkpoints} checkpoints of {megabytes(checkpoint_bytes)} do not fit on the disk of {start.folder}: "
            f"{megabytes(free)} are free; raise run.save_every or free some"
        )
    return Preflight(config, start, plan, text, checkpoint_bytes, num_checkpoints, free)


def states(config: Config) -> int:
    """How many numbers the optimizer keeps for each parameter."""
    if config.optimizer.name == "sgd" and config.optimizer.momentum == 0:
        return 0
    return STATES[config.optimizer.name]


def state_bytes(found: Preflight, pp: int) -> dict[str, int]:
    """Bytes that the fullest rank at pp coordinate `pp` keeps from step to step, by kind. In mixed precision the
    parameters are those that the optimizer works on and, where whole ones are kept, the narrow ones beside them."""
    layout = found.config.layout
    width, narrow = DTYPES[layout.precision.master], DTYPES[layout.precision.compute]
    held = [p for p in found.plan.params.values() if _on(p, pp, layout.mesh.size("pp"))]
    names = {p.name for p in held}
    held = [p for p in held if p.tied_to not in names]  # one tensor under two names

    def kept(param: ParamPlan, axes: tuple[str, ...]) -> int:
        share = math.prod(layout.mesh.size(axis) for axis in axes)
        rows, *rest = param.local_shape or (1,)
        return -(-rows // share) * math.prod(rest)

    if narrow == width:
        parameters = sum(kept(p, p.store_parameters) for p in held) * width
    else:
        parameters = sum(kept(p, p.store_axes) for p in held) * width
        parameters += sum(kept(p, ()) for p in held if not p.store_parameters) * narrow
    return {
        "parameters": parameters,
        "gradients": sum(kept(p, p.store_gradients) for p in held) * width,
        "optimizer": sum(kept(p, p.store_optimizer) for p in held) * width * states(found.config),
    }


def _on(param: ParamPlan, pp: int, size: int) -> bool:
    return any(stage % size == pp for stage in param.stages)


def step_bytes(plan: Plan, pp: int) -> dict[str, dict[str, int]]:
    """{axis: {op: bytes}} that one rank at pp coordinate `pp` hands over in a step."""
    out: dict[str, dict[str, int]] = {}
    for rule in plan.rules(pp):
        if rule.bytes:
            ops = out.setdefault(rule.axis, {})
            ops[rule.op] = ops.get(rule.op, 0) + rule.bytes
    return out


def lines(found: Preflight) -> Iterator[str]:
    """The findings for a person."""
    config, plan, mesh = found.config, found.plan, found.config.layout.mesh
    rows, batch_axes = config.train.global_batch_size, config.layout.batch_axes
    cut = math.prod(mesh.size(axis) for axis in batch_axes) * config.layout.micro_batches
    yield f"layout    {config.layout.describe()}: {mesh.world_size} ranks; the model divides"
    yield f"model     {plan.spec.name}, {number(plan.spec.num_parameters)} parameters"
    yield f"batch     {rows} rows a step: {rows // cut} a rank and micro-batch"
    if found.text is not None:
        text = found.text
        yield (
            f"text      {text.source}: {megabytes(text.train_bytes)} in {len(text.train_files)} files to train on, "
            f"{megabytes(text.val_bytes)} in {len(text.val_files)} to validate"
        )
    yield (
        f"disk      {found.num_checkpoints} checkpoints of {megabytes(found.checkpoint_bytes)}; "
        f"{megabytes(found.free_bytes)} free"
    )
    yield f"folder    {found.start.folder}"
    for pp in range(mesh.size("pp")):
        who = f"a rank of stage {pp}" if mesh.size("pp") > 1 else "each rank"
        kinds = ", ".join(f"{kind} {megabytes(size)}" for kind, size in state_bytes(found, pp).items())
        yield f"memory    {who}: {kinds}"
        for axis, ops in step_bytes(plan, pp).items():
            sent = ", ".join(f"{op} {number(size)}" for op, size in ops.items())
            yield f"bytes     {who}, {axis}, a step: {sent}"


def as_json(found: Preflight) -> dict[str, Any]:
    """The findings for a program: `rows` holds one row an axis and op of each pp coordinate."""
    size = found.config.layout.mesh.size("pp")
    return {
        "layout": found.config.layout.describe(),
        "world_size": found.config.layout.mesh.world_size,
        "num_parameters": found.plan.spec.num_parameters,
        "train_bytes": found.text.train_bytes if found.text else None,
        "val_bytes": found.text.val_bytes if found.text else None,
        "checkpoint_bytes": found.checkpoint_bytes,
        "free_bytes": found.free_bytes,
        "run": str(found.start.folder),
        "state_bytes": [state_bytes(found, pp) for pp in range(size)],
        "rows": [
            {"pp": pp, "axis": axis, "op": op, "bytes": count}
            for pp in range(size)
            for axis, ops in step_bytes(found.plan, pp).items()
            for op, count in ops.items()
        ],
    }
