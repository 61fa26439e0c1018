"""`python -m crosscut.watch [--run DIR] [--hang-timeout S] ... SCRIPT ARGS...`: run a program, recorded and watched.

The same under a launcher: `torchrun --nproc-per-node 4 -m crosscut.watch train.py ...`. This process is light (no
torch): it starts the program, passes its errors on, keeps the last lines, and on the first rank of a host watches all
ranks. Exit code: the program's own; 3 when a rank hung or died; 2 for a script that is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from crosscut.comm.launched import Launched, launched
from crosscut.watch.facts import Facts, Verdict
from crosscut.watch.folder import AUTOPSY, LEDGER, path_of, write_json
from crosscut.watch.program import MONITORED, SET_UP_LIMIT, default_run
from crosscut.watch.recorder import HANG, RUN
from crosscut.watch.watchdog import POLL_S, Watchdog, end_ranks

_LAST_LINES = 20
_AFTER_DEATH_S = 2.0  # how long a rank that died lets the watchdog of its host look at the others


def main(argv: list[str] | None = None) -> int:
    """Run the program of the command line; its exit code."""
    try:
        args, words = _parse(sys.argv[1:] if argv is None else argv)
        place = launched()
        run = Path(args.run or os.environ.get(RUN) or default_run())
        (run / LEDGER).mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"crosscut watch: error: {error}", file=sys.stderr)
        return 2
    for name in ("json", "txt"):
        (run / f"{AUTOPSY}.{name}").unlink(missing_ok=True)
    if args.set_up_timeout is not None:
        os.environ[SET_UP_LIMIT] = str(args.set_up_timeout)  # for the ranks
    return _Shell(run, args, place, words).run_program()


class _Parser(argparse.ArgumentParser):
    """Every error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("SCRIPT, ARGS", "SCRIPT"))  # Python up to 3.11 counts ARGS as required


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(
        prog="python -m crosscut.watch",
        description="Run a torch.distributed program, record its calls, and when it hangs say who made it hang.",
        allow_abbrev=False,
    )
    # torchrun takes --run for its own --run-path, hence the second name.
    parser.add_argument("--run", "--run-dir", metavar="DIR", help="the run folder (default: runs/watch-<date>)")
    parser.add_argument("--hang-timeout", metavar="S", type=float, help="seconds without progress: 60, on GPUs 300")
    parser.add_argument("--set-up-timeout", metavar="S", type=float, help="the same until a rank's first call: 600")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the program to run")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(argv)
    for flag, seconds in {"--hang-timeout": args.hang_timeout, "--set-up-timeout": args.set_up_timeout}.items():
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{flag} {seconds:g} must be positive")
    if args.module:
        try:
            found = find_spec(args.script)
        except (ImportError, AttributeError, ValueError):  # a parent that is no package
            found = None
        if found is None:
            raise ValueError(f"-m {args.script}: no such module")
        return args, ["-m", args.script, *args.args]
    if not Path(args.script).is_file():
        raise ValueError(f"{args.script}: no such script")
    return args, [args.script, *args.args]


class _Shell:
    """The process around the program."""

    def __init__(self, run: Path, args: argparse.Namespace, place: Launched | None, words: list[str]) -> None:
        self.run, self.place, self.words = run, place, words
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.dog: Watchdog | None = None
        watches = place is None or place.local_rank == 0
        if watches:
            self.dog = Watchdog(run, args.hang_timeout, since=time.time() - 5, set_up_s=args.set_up_timeout)

    def run_program(self) -> int:
        if self.place is not None:
            path_of(self.run, self.place.rank, "ring").unlink(missing_ok=True)  # of an earlier run
        environ = {**os.environ, RUN: str(self.run), MONITORED: "1"}
        command = [sys.executable, "-m", "crosscut.watch.child", *self.words]
        self.process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        reader = threading.Thread(target=self._read_errors, daemon=True)
        reader.start()
        found = self._wait()
        code = self.process.returncode
        if found is None and code == -signal.SIGINT:  # an interrupt ends Python by its own signal
            self.stopped = signal.SIGINT
        reader.join(0.3)
        if found is None and code != 0:
            found = self._after_the_end(code)
        if self.dog is not None and found is not None:
            print("\n".join(["crosscut watch:", *found.lines(), f"run: {self.run}"]), file=sys.stderr, flush=True)
            end_ranks(self.run, self.dog.rings())
        elif self.dog is not None and not self.stopped:
            self._nothing_recorded(code)
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        if self.place is not None:
            path_of(self.run, self.place.rank, "stop").unlink(missing_ok=True)
        if code < 0 or found is not None or (code != 0 and (self.run / f"{AUTOPSY}.json").exists()):
            raised = found is None or found.verdict in ("exception", "oom", "disk_full")
            own = HANG if not raised or (found is None and code < 0) else max(code, 1)
            return 128 + self.stopped if self.stopped else own
        return code

    stopped = 0

    def _pass_on(self, number: int, frame: Any) -> None:
        """A signal to this process is meant for the program."""
        self.stopped = number
        with contextlib.suppress(OSError):
            self.process.send_signal(number)

    def _wait(self) -> Verdict | None:
        """Until the program has ended, or the watchdog has found something."""
        while self.process.poll() is None:
            if self.dog is not None and (found := self.dog.look()) is not None:
                return found
            time.sleep(POLL_S)
        return None

    def _after_the_end(self, code: int) -> Verdict | None:
        """The program has ended badly: leave word of it, and let the whole host be looked at before it goes down."""
        if self.place is not None:
            body = {"exit_code": code, "last_lines": list(self.lines), "ended_s": time.time(), "pid": self.process.pid}
            write_json(path_of(self.run, self.place.rank, "end"), body)
        deadline = time.monotonic() + _AFTER_DEATH_S
        while time.monotonic() < deadline and not self.stopped:
            if self.dog is not None and (found := self.dog.look()) is not None:
                return found
            if self.dog is None and (self.run / f"{AUTOPSY}.json").exists():
                break
            time.sleep(POLL_S)
        return None

    def _nothing_recorded(self, code: int | None) -> None:
        """Say so if the program has made no call, and how it ended if nobody else says it."""
        assert self.dog is not None
        self.dog.facts(stacks=False)  # looks for rings that have come since
        if any(ring.entered for ring in self.dog.rings().values()):
            return
        program, said = self.words[self.words[0] == "-m"], "never called"
        if code is not None and code < 0:
            said = f"{Facts(0, exit_code=code).death()}; it had not called"
        said = f"{program} {said} torch.distributed.init_process_group: nothing was recorded"
        print(f"crosscut watch: {said}", file=sys.stderr)
        for folder in (self.run / LEDGER, self.run):
            with contextlib.suppress(OSError):  # only what is empty goes
                folder.rmdir()

    def _read_errors(self) -> None:
        """Pass the program's stderr on as it comes (a progress bar ends no line), and keep the last lines."""
        assert self.process.stderr is not None
        begun = b""
        while data := os.read(self.process.stderr.fileno(), 1 << 16):
            sys.stderr.buffer.write(data)
            sys.stderr.flush()
            *lines, begun = (begun + data)[-(1 << 16) :].split(b"\n")
            self.lines += [line.decode(errors="replace").rstrip() for line in lines if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
