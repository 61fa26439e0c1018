"""Finding the command, and one line and an exit code for everything that can go wrong."""

import subprocess
import sys

import pytest

from crosscut.cli import main as main_module
from crosscut.cli.main import UsageError, exit_code, main, one_line, split_overrides
from crosscut.comm.errors import DeadlockError, MismatchError, StuckError, rank_error
from crosscut.train.checkpoint import SaveError


@pytest.mark.parametrize(
    "error, code",
    [
        (ValueError("wrong"), 2),
        (UsageError("wrong"), 2),
        (OSError(28, "No space left on device"), 1),
        (RuntimeError("?"), 1),
        (SaveError("full"), 1),
        (MismatchError("other calls"), 1),
        (DeadlockError("all wait"), 3),
        (StuckError("rank 1 is outside"), 3),
        (rank_error("was killed by SIGKILL", rank=1, world_size=2, stopped=[0], seconds=0.1), 3),
        (rank_error("raised ValueError: no", rank=1, world_size=2, stopped=[], seconds=0, is_value_error=True), 2),
        (rank_error("raised Odd: no", rank=1, world_size=2, stopped=[], seconds=0, traceback_text="..."), 1),
        (rank_error(ValueError("no"), rank=0, world_size=2, stopped=[], seconds=0), 2),
        (rank_error(ZeroDivisionError("no"), rank=0, world_size=2, stopped=[], seconds=0), 1),
        (rank_error(StuckError("no"), rank=0, world_size=2, stopped=[], seconds=0), 3),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error) == code


def raising(monkeypatch, error):
    class Command:
        @staticmethod
        def add_parser(subparsers):
            subparsers.add_parser("train")

        @staticmethod
        def run(args):
            raise error

    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: Command)
    return main(["train"])


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ValueError("a value\nand more"), 2, "crosscut train: error: a value [...; --debug shows the rest]\n"),
        (KeyError("x"), 1, "crosscut train: error: KeyError: 'x'\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 1, "crosscut train: error: No such file: a.txt\n"),
        (ValueError(), 2, "crosscut train: error: ValueError\n"),
        (KeyboardInterrupt(), 130, "\ncrosscut train: stopped by Ctrl-C\n"),
        (SystemExit(143), 143, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_every_end_is_one_line(monkeypatch, capsys, error, code, said):
    assert raising(monkeypatch, error) == code
    assert capsys.readouterr().err == said


def test_debug_shows_the_traceback(monkeypatch, capsys):
    class Command:
        @staticmethod
        def add_parser(subparsers):
            subparsers.add_parser("train")

        @staticmethod
        def run(args):
            raise ValueError("deep down")

    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: Command)
    assert main(["train", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("crosscut train: error: deep down\n")


@pytest.mark.parametrize(
    "argv, rest, overrides",
    [
        (["train", "--a.b", "3", "c.toml"], ["train", "c.toml"], {"a.b": "3"}),
        (["--a.b=x=y", "train"], ["train"], {"a.b": "x=y"}),
        (["train", "--a.b", "-1e-3"], ["train"], {"a.b": "-1e-3"}),
        (["train", "--a.b", "--mesh", "dp=2"], ["train", "--mesh", "dp=2"], {"a.b": "true"}),
        (["train", "--a.b"], ["train"], {"a.b": "true"}),
        (["train", "--mesh", "a.b"], ["train", "--mesh", "a.b"], {}),
        (["sample", "--", "--a.b"], ["sample", "--", "--a.b"], {}),
    ],
)
def test_config_keys_are_taken_out_of_the_command_line(argv, rest, overrides):
    assert split_overrides(argv) == (rest, overrides)


def test_one_line_of_nothing():
    assert one_line(RuntimeError()) == "RuntimeError"
    assert one_line(RuntimeError("\n \n")) == "RuntimeError"


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m crosscut train --print-config | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "[model]\n"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
