"""The lines before and after training, for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from crosscut.train.config import Config
from crosscut.train.display import duration, number
from crosscut.train.sample import sample_run

if TYPE_CHECKING:
    from crosscut.comm.context import Context


def introduction(ctx: Context, config: Config) -> Iterator[str]:
    """Device and threads, back end, layout; each with why."""
    threads, why = ctx.threads, ctx.threads_why
    if config.run.threads:
        threads, why = config.run.threads, "run.threads"
    if ctx.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(ctx.device)} a rank"
    else:
        device = "cpu: " + ("asked for" if config.run.device == "cpu" else "no NVIDIA GPU that torch can use")
    yield f"device    {device}; {threads} CPU thread{'s' * (threads > 1)} a rank ({why})"
    yield f"back end  {ctx.backend}: {ctx.backend_why}"
    if ctx.check_why and ctx.world_size > 1:
        yield f"checked   the ranks compare every call before data move: {ctx.check_why}"
    source = config.origins.get("mesh", "the default: one rank")
    yield f"layout    {config.layout.describe()}, {ctx.world_size} rank{'s' * (ctx.world_size > 1)}: from {source}"
    store = config.layout.store
    if store.zero and not config.layout.mesh.ordered(store.optimizer):
        yield f"store     zero={store.zero} changes nothing: {'+'.join(store.optimizer)} has one rank"


def printable(text: str) -> str:
    """`text` without what would move a terminal's cursor: control characters become a dot."""
    return "".join(char if char.isprintable() or char == "\t" else "·" for char in text)


def validation(loss: float, baselines: Mapping[str, float]) -> str:
    """The validation loss beside what counting reaches."""
    line = f"validation loss {loss:.4f}"
    if "bigram_loss" in baselines:
        line += (
            f" nats a byte (counting bytes reaches {baselines['unigram_loss']:.4f}, "
            f"counting pairs of bytes {baselines['bigram_loss']:.4f})"
        )
    return line


def closing(summary: Mapping[str, Any], folder: Path, config: Config, num_steps: int) -> Iterator[str]:
    """What came of it: speed and loss, bytes by axis, a sample, where the run is."""
    if num_steps:
        yield (
            f"{num_steps} steps in {duration(summary['train_time_s'])}, {number(summary['tokens_per_s'])} tokens/s; "
            f"loss {summary['first_loss']:.4f} at the first step, {summary['last_loss']:.4f} at the last"
        )
    else:
        yield f"nothing to train: at step {summary['step']} of {summary['steps']}; raise train.steps to go on"
    yield validation(summary["val_loss"], {key: value for key, value in summary.items() if key.endswith("gram_loss")})
    for axis, ops in summary["bytes"].items():
        for op, pair in ops.items():
            equal = pair["predicted"] == pair["counted"]
            verdict = "as predicted" if equal else f"but {number(pair['predicted'])} were predicted"
            yield f"bytes     {axis} {op}: {number(pair['counted'])} over all ranks and steps, {verdict}"
    if config.run.sample_bytes and config.kind == "transformer":
        text = sample_run(folder, "", config.run.sample_bytes, config.run.temperature, config.train.seed)
        yield "a sample of what it writes:"
        yield from (f"  | {printable(row)}" for row in text.split("\n"))
    yield f'run       {folder}  (crosscut sample {folder} --prompt "def ")'
