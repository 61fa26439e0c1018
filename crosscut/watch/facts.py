"""What is known of one rank besides its calls, and the verdict over all of them. No torch."""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass, field
from typing import Any

from crosscut.comm.errors import one_line
from crosscut.watch.reading import Ring

SCHEMA, VERSION = "crosscut.why", 1
VERDICTS = (
    *("missing_call", "order", "mismatch", "dead_rank", "stuck_outside", "waiting_cycle", "straggler", "exception"),
    *("oom", "disk_full", "desync", "none"),
)
_SECONDARY = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer has ended|timed? ?out|remote process|socket|stopped because|"
    r"PeerError|StuckError|DistBackendError|DistNetworkError|NCCL (error|communicator was aborted)|Application timeout",
    re.IGNORECASE,
)
_CARRIED = "Traceback (most recent call last)"
_OWN = re.compile(r"EADDRINUSE|already in use", re.IGNORECASE)  # an error of the network that is this rank's own
_OOM = re.compile(r"OutOfMemory|MemoryError|can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
_DISK = re.compile(r"No space left on device|ENOSPC|disk quota exceeded|file write failed", re.IGNORECASE)


@dataclass
class Failure:
    """An exception that ended a rank, as the rank wrote it down."""

    line: str  # "ValueError: what it says"
    site: str = ""  # file:line of the innermost frame that is not torch's
    time_s: float = 0.0  # since 1970
    traceback: str = ""
    in_call: bool = False  # raised while a recorded call was under way

    @property
    def said(self) -> str:
        """The error in a line. That of a process that loads data carries a traceback of its own, which ends with it."""
        lines = [line.strip() for line in self.traceback.splitlines() if line.strip()]
        return f"{lines[-1]} (in a worker process)" if _CARRIED in self.line and lines else one_line(self.line, 300)

    @property
    def kind(self) -> str:
        """ "oom", "disk_full" or "exception"."""
        return "oom" if _OOM.search(self.line) else "disk_full" if _DISK.search(self.line) else "exception"

    @property
    def secondary(self) -> bool:
        """Whether it only says that another rank has gone."""
        told = _SECONDARY.search(self.line) and not _OWN.search(self.line)
        return self.in_call and bool(told) and self.kind == "exception"


@dataclass
class Facts:
    """One rank: its ring, and what is known of its process."""

    rank: int
    ring: Ring | None = None
    alive: bool = True
    exit_code: int | None = None  # below 0: by that signal; None: not known
    ended_s: float = 0.0  # when it was seen to have ended, since 1970
    failure: Failure | None = None
    state: str = ""  # of the process: "running", "sleeping", "stopped", "waiting for a disk"
    stack: list[str] = field(default_factory=list)  # "file.py:12 in name", innermost first
    last_lines: list[str] = field(default_factory=list)  # of its output
    oom_killed: bool = False  # the kernel has killed a process for memory meanwhile

    def death(self) -> str:
        """How the process ended, in words."""
        if self.exit_code is None:
            return "ended without a word (killed, or os._exit)"
        if self.exit_code < 0:
            try:
                name = signal.Signals(-self.exit_code).name
            except ValueError:
                name = f"signal {-self.exit_code}"
            oom = ", by the kernel for want of memory" if self.oom_killed else " (out of memory?)"
            hint = {"SIGKILL": oom, "SIGSEGV": " (a crash in native code)", "SIGABRT": " (native code gave up)"}
            return f"was killed by {name}{hint.get(name, '')}"
        return f"ended with exit code {self.exit_code}"


@dataclass
class Verdict:
    """What went wrong, in words and as data. `verdict` is one of `VERDICTS`; `culprits` are global ranks."""

    verdict: str
    text: str
    culprits: list[int] = field(default_factory=list)
    axis: str | None = None
    op: str | None = None
    seq: int | None = None
    site: str | None = None
    evidence: list[str] = field(default_factory=list)
    advice: str = ""
    alive: bool = False  # of a run that still goes on
    rows: list[dict[str, Any]] = field(default_factory=list)  # exposed waits, where nothing is broken

    def as_json(self) -> dict[str, Any]:
        """The object without `schema` and `version`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a reader: the sentence, what it rests on, what to do."""
        out = [self.text, *(f"  {line}" for line in self.evidence)]
        return [*out, f"advice: {self.advice}"] if self.advice else out
