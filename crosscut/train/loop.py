"""The training loop of one rank, and what the ranks write together: metrics, summary, ledgers, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from crosscut.parallel.batch import Batch, local_batch
from crosscut.parallel.distribute import DistributedModel, distribute
from crosscut.train import checkpoint_load, corpus, metrics, report, run_folder
from crosscut.train.checkpoint import Moment, save
from crosscut.train.config import Config
from crosscut.train.data import Data, FloatData, TextData
from crosscut.train.display import Display
from crosscut.train.model import recipe_of
from crosscut.train.optim import decay_group, learning_rate, optimizer_class, set_learning_rate
from crosscut.train.rng import seed_rank
from crosscut.train.together import all_or_none

if TYPE_CHECKING:
    from crosscut.comm.context import Context


class DivergedError(RuntimeError):
    """The loss or the gradient norm is no number any more."""

    exit_code = 1


@dataclass(frozen=True)
class Job:
    """What every rank is told. `eval_only`: measure the validation loss, write nothing.

    record: makes the recorder of a rank (crosscut.watch), which is in its set-up until the first step.
    """

    config: Config
    start: run_folder.Start
    to_stderr: bool = False
    eval_only: bool = False
    record: Callable[[Context, Path], Any] | None = None


def run_rank(ctx: Context, job: Job) -> dict[str, Any]:
    """Train (or evaluate) on this rank; returns the summary (rank 0's has the baselines)."""
    if job.eval_only:
        return Trainer(ctx, job).evaluate_only()
    # Under torchrun each rank has made up a name with its own clock: rank 0's is taken.
    job = replace(job, start=ctx.all_gather_object(job.start, tag="run folder")[0])
    recorder = None if job.record is None else job.record(ctx, job.start.folder)
    try:
        return Trainer(ctx, job, recorder).fit()
    except BaseException as error:
        if recorder is not None:
            recorder.failed(error)
        raise


def data_of(config: Config) -> Data:
    """The data of the config's model: text, or random rows for the deep MLP. Raises ValueError for too little."""
    if config.kind == "mlp":
        return FloatData(config.model.dim, config.train.seed)
    if config.kind == "transformer" and config.model.vocab < 256:
        raise ValueError(f"model.vocab = {config.model.vocab} cannot hold text as bytes; use 256 or more")
    return TextData(corpus.find(config.data.path, config.data.val_fraction), config.train.seq_len, config.train.seed)


class Trainer:
    """One rank of a run: model, optimizer, data, and where it is (`step` optimizer steps, `samples` consumed)."""

    def __init__(self, ctx: Context, job: Job, recorder: Any = None) -> None:
        self.ctx, self.recorder, self.config = ctx, recorder, job.config
        self.cfg = job.config.train
        self.start = job.start
        set_up_torch(job.config)
        self.display = Display(ctx.rank == 0, job.to_stderr, self.cfg.log_every)
        for line in report.introduction(ctx, job.config):
            self.display.line(line)
        recipe = recipe_of(job.config)
        self.data = data_of(job.config)
        self.layout = job.config.layout
        self.model: DistributedModel = distribute(
            recipe.build,
            recipe.dims,
            self.layout,
            ctx,
            loss_fn=recipe.loss_fn,
            batch=self.cfg.global_batch_size,
            seq=job.config.seq,
            seed=self.cfg.seed,
        )
        cls, options = optimizer_class(job.config.optimizer)
        self.optimizer = self.model.optimizer(cls, group_fn=decay_group(job.config.optimizer.weight_decay), **options)
        self.step, self.samples = 0, 0
        self.losses: list[float] = []
        self.seconds = 0.0  # in steps, evaluation and checkpoints apart
        self.before: list[dict[str, Any]] = []  # what each rank of the run that this one goes on from remembered
        self.saved_step = -1
        seed_rank(self.cfg.seed, 0, ctx.rank)

    def fit(self) -> dict[str, Any]:
        """Train to `train.steps`, evaluate, save; returns the summary."""
        self._load()
        with all_or_none(self.ctx):
            if self.ctx.rank == 0:
                run_folder.check_folder(self.start, self.config.run.overwrite)
                run_folder.create(self.start, self.config)
        if self.recorder is not None:
            self.recorder.ring.section("")
        self.metrics = metrics.MetricsFile(self.start.folder / run_folder.METRICS) if self.ctx.rank == 0 else None
        self.first_step = self.step
        val_loss = math.nan
        self.display.start(self.step, self.cfg.steps)
        while self.step < self.cfg.steps:
            row = self.train_step()
            evaluated = self._due(self.cfg.eval_every)
            if evaluated:
                val_loss = self.evaluate()
                row["val_loss"] = val_loss
            if self.metrics is not None:
                self.metrics.write(row)
            self.display.step(row)
            if evaluated and self.step < self.cfg.steps:
                self.display.line(f"step {self.step}: validation loss {val_loss:.4f}")
            if self._due(self.config.run.save_every):
                self.save()
        self.display.stop()
        if math.isnan(val_loss):
            val_loss = self.evaluate()
        self.save()
        return self._finish(val_loss)

    def evaluate_only(self) -> dict[str, Any]:
        """The validation loss of the checkpoint (or of the untrained model) beside the baselines."""
        self._load()
        loss = self.evaluate()
        known = self._baselines()
        self.display.line(report.validation(loss, known))
        return {"step": self.step, "val_loss": loss, **known, "layout": self.layout.describe()}

    def train_step(self) -> dict[str, Any]:
        """One optimizer step; returns its line of metrics.jsonl. Raises DivergedError, on every rank alike."""
        began = time.perf_counter()
        inputs, labels = self.data.batch(self.samples, self.cfg.global_batch_size)
        rate = learning_rate(self.step, self.cfg.steps, self.config.optimizer)
        set_learning_rate(self.optimizer, rate)
        out = self.model.forward_backward(self._cut(inputs, labels))
        norm = float(self.model.clip_grad_norm_(self.config.optimizer.clip_norm or None))
        if not (math.isfinite(out.loss) and math.isfinite(norm)):  # both are the same numbers on every rank
            self._stop_diverged(out.loss, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.recorder is not None:
            self.recorder.ring.step = self.step
        self.samples += self.cfg.global_batch_size
        self.losses.append(out.loss)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        return {
            "step": self.step,
            "loss": out.loss,
            "tokens": self.samples * self.data.tokens_per_sample,
            "tokens_per_s": out.num_tokens / seconds,
            "step_time_s": seconds,
            "grad_norm": norm,
            "lr": rate,
        }

    def evaluate(self) -> float:
        """The mean loss over the validation batches, the same on every rank."""
        total, count = 0.0, 0
        with self._section("evaluation"):
            for inputs, labels in self.data.validation(self.cfg.eval_batches, self.cfg.global_batch_size):
                out = self.model.evaluate(self._cut(inputs, labels))
                total, count = total + out.loss * out.num_tokens, count + out.num_tokens
        return total / max(count, 1)

    def save(self) -> None:
        """A checkpoint of this moment, unless there is one already."""
        if self.saved_step == self.step:
            return
        mine = {"steps": self.step - self.first_step, "counted": self.ctx.ledger.totals("step")}
        mine["predicted"] = self._predicted()
        progress = {"ranks": [mine, *self.before] if self.ctx.rank == 0 else [mine]}
        moment = Moment(self.step, self.samples, self.config.to_toml(comments=False), progress)
        with self._section("save"):
            save(self.start.folder, self.model, self.optimizer, moment)
        self.saved_step = self.step
        self.ctx.ledger.save(self.start.folder / run_folder.LEDGER / f"rank-{self.ctx.rank}.json")
        if self.ctx.rank == 0:
            run_folder.write_summary(self.start.folder, {"status": "running", **self._facts()})

    def _section(self, name: str) -> AbstractContextManager[None]:
        """A part that may take longer without a call than a step may."""
        limit = self.config.run.section_timeout_s
        return nullcontext() if self.recorder is None else self.recorder.section(name, limit)

    def _load(self) -> None:
        if self.start.checkpoint is None:
            return
        index = checkpoint_load.load(self.start.checkpoint, self.model, self.optimizer, self.cfg.seed)
        self.step, self.samples = index.step, index.samples
        self.before = [part for rank in index.body["progress"] for part in rank["ranks"]]
        if self.start.goes_on_in_place:
            self.saved_step = self.step
        self.display.line(f"goes on from {index.path} at step {self.step}")

    def _cut(self, inputs: torch.Tensor, labels: torch.Tensor | None) -> Batch:
        return local_batch(inputs, labels, self.layout, self.ctx)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _stop_diverged(self, loss: float, norm: float) -> None:
        self.display.stop()
        kept = f"checkpoint step-{self.saved_step} is kept" if self.saved_step >= 0 else "there is no checkpoint yet"
        raise DivergedError(
            f"step {self.step + 1}: the loss is {loss} and the gradient norm {norm}; stopped before the weights were "
            f"changed ({kept}). Try a lower optimizer.lr than {self.config.optimizer.lr:g}, or a longer warm-up"
        )

    def _predicted(self) -> metrics.Totals:
        return metrics.predicted_bytes(self.model.plan, self.ctx.coords["pp"], self.step - self.first_step)

    def _baselines(self) -> dict[str, float]:
        if not isinstance(self.data, TextData):
            return {}
        sequences = self.cfg.eval_batches * self.cfg.global_batch_size
        return {f"{name}_loss": loss for name, loss in self.data.baselines(sequences).items()}

    def _facts(self) -> dict[str, Any]:
        return {
            "world_size": self.ctx.world_size,
            "layout": self.layout.describe(),
            "backend": self.ctx.backend,
            "device": self.ctx.device.type,
            "num_parameters": self.model.spec.num_parameters,
            "step": self.step,
            "steps": self.cfg.steps,
            "ledger_steps": self.step - self.first_step,
        }

    def _finish(self, val_loss: float) -> dict[str, Any]:
        ctx = self.ctx
        mine = {"counted": ctx.ledger.totals("step"), "predicted": self._predicted()}
        mine_and_memory = (mine, metrics.peak_memory_bytes(ctx))
        everyone = ctx.all_gather_object(mine_and_memory, tag="summary")
        parts = [part for part, _ in everyone] + self.before
        num_tokens = len(self.losses) * self.cfg.global_batch_size * self.data.tokens_per_sample
        summary = {
            "status": "finished",
            **self._facts(),
            "first_loss": metrics.first_loss(self.start.folder / run_folder.METRICS),
            "last_loss": self.losses[-1] if self.losses else None,
            "val_loss": val_loss,
            **(self._baselines() if ctx.rank == 0 else {}),
            "bytes": metrics.compare(
                metrics.add_totals(part["predicted"] for part in parts),
                metrics.add_totals(part["counted"] for part in parts),
            ),
            "peak_memory_bytes": [memory for _, memory in everyone],
            "tokens_per_s": num_tokens / self.seconds if self.seconds else None,
            "train_time_s": self.seconds,
        }
        if ctx.rank == 0:
            assert self.metrics is not None
            self.metrics.close()
            run_folder.write_summary(self.start.folder, summary)
            with self._section("sample"):
                for line in report.closing(summary, self.start.folder, self.config, len(self.losses)):
                    self.display.line(line)
        if self.recorder is not None:
            self.recorder.ring.end(0)
        return {**summary, "run": str(self.start.folder)}


def set_up_torch(config: Config) -> None:
    """Threads and determinism of this process."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
