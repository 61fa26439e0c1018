"""`crosscut COMMAND ...`: finds the subcommand, runs it, and turns what a user did wrong into one line.

Exit codes: 0 done; 1 failed (or not equal); 2 bad usage; 3 a rank hung or died; 130 Ctrl-C; 143 SIGTERM. A command is a
module with `add_parser(subparsers)` and `run(args) -> int`; only the one that was asked for is imported, so that
`crosscut --help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn

COMMANDS = {  # name -> (module, one line for --help)
    "train": ("crosscut.cli.train", "train a model on text under a declared layout"),
    "explain": ("crosscut.cli.explain", "show every communication a layout implies, without running anything"),
    "parity": ("crosscut.cli.parity", "prove that a layout, or any training program, computes the step of one device"),
    "sample": ("crosscut.cli.sample", "write text with a trained model"),
    "tour": ("crosscut.cli.tour", "see the collectives and the parallelisms at work on small tensors"),
    "bench": ("crosscut.cli.bench", "measure collectives, whole training steps, what recording costs, or the machine"),
    "doctor": ("crosscut.cli.doctor", "look whether training can work here, and say what to change"),
    "why": ("crosscut.cli.why", "say who hung or died, and what came first"),
}
DEBUG = "--debug"


class UsageError(ValueError):
    """The command line itself is wrong: exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing its usage: every error of crosscut is one line, printed in one place."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation that works today is ambiguous tomorrow
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word most like `word`, or nothing where none is like it."""
    found = difflib.get_close_matches(word, [other for other in known if other != word], n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def build_parser(command: str | None) -> tuple[Parser, Parser | None]:
    """The whole parser, and the parser of `command`. Other commands are stubs: name and help line only."""
    parser = Parser(
        prog="crosscut",
        description="Name the dims of a model, say which mesh axis cuts which dim: crosscut derives every collective, "
        "shows it, runs it and proves that the result equals one device.",
        epilog="crosscut COMMAND --help says more about a command. --debug shows the traceback of an error.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen: Parser | None = None
    for name, (module, line) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(subparsers)
            chosen = subparsers.choices[name]
        else:
            subparsers.add_parser(name, help=line)
    return parser, chosen


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--section.key value` (or `--section.key=value`) out of argv. A key without a value means true."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    i = 0
    while i < len(argv):
        word = argv[i]
        name, equals, value = word.partition("=")
        i += 1
        if word == "--":
            rest += argv[i - 1 :]
            break
        if not (name.startswith("--") and "." in name):
            rest.append(word)
            continue
        if not equals:
            following = argv[i] if i < len(argv) else None
            is_value = following is not None and (not following.startswith("-") or following[1:2].isdigit())
            value = str(following) if is_value else "true"
            i += is_value
        overrides[name[2:]] = value
    return rest, overrides


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; `args.overrides` holds the `--section.key` flags. Raises UsageError."""
    rest, overrides = split_overrides(argv)
    command = next((word for word in rest if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise UsageError(f"unknown command {command!r}{nearest(command, COMMANDS)} (commands: {', '.join(COMMANDS)})")
    parser, chosen = build_parser(command)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            raise UsageError(f"unexpected argument {unknown[0]!r}")
        known = (chosen or parser)._option_string_actions
        raise UsageError(f"unknown flag {flags[0]}{nearest(flags[0], known)}")
    if overrides and not getattr(args, "takes_config", False):
        raise UsageError(f"--{next(iter(overrides))} sets a config key, and {command or 'crosscut'} takes no config")
    args.overrides = overrides
    return args


def one_line(error: BaseException) -> str:
    """The error's message on one line. A message that is more than one line keeps its first and says so."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] + (" [...; --debug shows the rest]" if len(lines) > 1 else "") if lines else type(error).__name__


def exit_code(error: BaseException) -> int:
    """2 for what the user can put right, 3 for a hang or a dead rank, what the error says itself, else 1."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    ranks = sys.modules.get("crosscut.comm.errors")  # not imported: then no rank was running
    if ranks is not None:
        if isinstance(error, (ranks.DeadlockError, ranks.StuckError)):
            return 3
        if isinstance(error, ranks.RankError) and not isinstance(error, ValueError):
            died = error.original is None and not error.traceback_text
            return 3 if died else 1 if error.original is None else exit_code(error.original)
    return 2 if isinstance(error, ValueError) else 1


def is_known(error: BaseException) -> bool:
    """Whether the error's message is meant for a user, and needs no class name before it."""
    ranks = sys.modules.get("crosscut.comm.errors")
    ours = (ranks.CommError, ranks.RankError) if ranks is not None else ()
    return isinstance(error, (ValueError, OSError, *ours)) or hasattr(error, "exit_code")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) ; the exit code. Never raises for a user's error."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    name = "crosscut"
    try:
        args = parse(words)
        if args.version:
            from crosscut import __version__

            print(f"crosscut {__version__}")
            return 0
        if args.command is None:
            build_parser(None)[0].print_help()
            return 0
        name = f"crosscut {args.command}"
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except SystemExit as stop:  # --help, and SIGTERM during training
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `crosscut explain | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
            sys.stderr.write(getattr(error, "traceback_text", ""))  # of the rank that failed first
        kind = "" if is_known(error) else f"{type(error).__name__}: "
        if isinstance(error, UsageError):
            command = next((word for word in words if word in COMMANDS), None)
            name = f"crosscut {command}" if command else "crosscut"
        print(f"{name}: error: {kind}{one_line(error)}", file=sys.stderr)
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
