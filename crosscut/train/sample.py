"""Text from a trained model: one process, byte by byte."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from crosscut.train import toml
from crosscut.train.checkpoint_index import INDEX, CheckpointError, Index, newest, saved_steps
from crosscut.train.checkpoint_load import read_parameters
from crosscut.train.config import Config, load_config
from crosscut.train.data import generator
from crosscut.train.model import recipe_of

SEPARATOR_BYTE = 0  # what stands between files in the training text: the model's word for beginning and end


def find(run: Path, step: int | None = None) -> Path:
    """The checkpoint folder of a run: of `step`, else the newest; `run` may itself be one. Raises ValueError."""
    if (run / INDEX).exists():
        return run
    if not run.is_dir():
        raise ValueError(f"{run}: no such run folder")
    if step is None:
        found = newest(run)
        if found is None:
            raise ValueError(f"{run}: no checkpoint in it")
        return found
    steps = saved_steps(run)
    if step not in steps:
        raise ValueError(f"{run}: no checkpoint of step {step}; it has {', '.join(map(str, steps)) or 'none'}")
    return steps[step]


def load_model(checkpoint: Path) -> tuple[nn.Module, Config]:
    """The whole trained model on the CPU, in eval mode, and the config it was trained with."""
    index = Index.open(checkpoint)
    where = f"{checkpoint}/{INDEX}"
    config = load_config(where, tables=toml.parse(index.body["config"], where))
    if config.kind == "mlp":
        raise CheckpointError(f"{checkpoint}: the deep MLP writes no text")
    model = recipe_of(config).build()
    values = read_parameters(checkpoint)
    model.load_state_dict(values, strict=not list(model.buffers()))
    return model.eval(), config


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, max_bytes: int, *, window: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """`prompt` continued by at most `max_bytes` bytes, until the model ends the file.

    model: ids (1, S) -> logits (1, S, V). `window`: the sequence length it was trained with; it sees no more than that
    at a time. temperature 0 takes the likeliest byte; the same seed writes the same text.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature} must be 0 or more, and finite")
    draws = generator(seed, "sample")
    ids = [SEPARATOR_BYTE, *prompt]
    for _ in range(max_bytes):
        logits: Tensor = model(torch.tensor([ids[-window:]]))[0, -1, :256].double()
        if temperature == 0:
            following = int(logits.argmax())
        else:
            following = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws))
        if following == SEPARATOR_BYTE:
            break
        ids.append(following)
    return bytes(ids[1:])


def sample_run(
    run: Path, prompt: str, max_bytes: int, temperature: float = 0.8, seed: int = 0, step: int | None = None
) -> str:
    """Text of the run's newest checkpoint (or that of `step`): prompt and continuation."""
    model, config = load_model(find(run, step))
    text = generate(model, prompt.encode(), max_bytes, window=config.train.seq_len, temperature=temperature, seed=seed)
    return text.decode("utf-8", errors="replace")
