"""What a person sees while a run trains: a progress bar on a terminal, plain lines elsewhere. No torch."""

from __future__ import annotations

import sys
import time
from typing import IO, Any


def number(value: float) -> str:
    """Digits grouped: 2,164,992."""
    return f"{value:,.0f}"


def megabytes(num_bytes: float) -> str:
    """`8.7 MB` (1 MB = 1e6 bytes), in B, kB, MB or GB as fits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Display:
    """The lines of one rank. Ranks other than 0 have `active=False` and show nothing.

    `to_stderr`: stdout is kept for JSON. Steps are a progress bar on a terminal, elsewhere a line every `log_every`.
    """

    def __init__(self, active: bool, to_stderr: bool, log_every: int) -> None:
        self.active, self.log_every = active, log_every
        self.stream: IO[str] = sys.stderr if to_stderr else sys.stdout
        self._progress: Any = None
        self._task: Any = None
        self._last = (0.0, 0)  # when the last line was shown, and its step
        self._total = 0

    def line(self, text: str = "") -> None:
        """One line; above the bar while there is one."""
        if not self.active:
            return
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def start(self, step: int, total: int) -> None:
        """Steps `step` to `total` are about to be trained."""
        self._last, self._total = (time.perf_counter(), step), total
        if not (self.active and self.stream.isatty()):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  norm {task.fields[norm]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=self.stream),
        )
        self._task = self._progress.add_task("", total=total, completed=step, loss="-", speed="-", norm="-")
        self._progress.start()

    def step(self, row: dict[str, Any]) -> None:
        """A step is done; `row` is its line of metrics.jsonl."""
        if not self.active:
            return
        done = row["step"]
        if self._progress is not None:
            fields = {
                "loss": f"{row['loss']:.3f}",
                "speed": number(row["tokens_per_s"]),
                "norm": f"{row['grad_norm']:.2f}",
            }
            self._progress.update(self._task, completed=done, **fields)
        elif done % self.log_every == 0 or done == self._total:
            now = time.perf_counter()
            since, before = self._last
            left = (self._total - done) * (now - since) / max(done - before, 1)
            self._last = (now, done)
            self.line(
                f"step {done}/{self._total}  loss {row['loss']:.4f}  {number(row['tokens_per_s'])} tokens/s  "
                f"norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  {duration(left)} left"
            )

    def stop(self) -> None:
        """The steps are over: the bar goes."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
