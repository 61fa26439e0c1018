"""One rank's part of a test: find the test function, run it, and put a failure into the words of pytest.

pytest's assertion rewriting and its comparison of the two sides of an assert are set up once in every worker, through
pytest's own configuration, so that an assertion that fails on rank 3 reads like one that fails in the main process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from crosscut.comm.errors import CommError, PeerError, StuckError

if TYPE_CHECKING:
    from crosscut.comm.context import Context

CONTEXT = "crosscut.testing: this rank's Context"  # stands in a test's arguments for what only a rank has


@dataclass(frozen=True)
class RankTest:
    """A test function by name, what pytest's fixtures gave it, and how failures are to be shown."""

    module: str
    path: str
    qualname: str
    arguments: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)  # what setup_method left on the test's object
    rewrite: tuple[str, ...] = ()  # pytest's options in the workers; empty: this process is pytest's own
    style: str = "long"
    showlocals: bool = False
    markup: bool = False
    function: Callable[..., Any] | None = field(default=None, compare=False)  # where it needs no import


class RankTestFailed(Exception):
    """A rank's test failed. `shown`: as pytest shows it; `output`: what the rank printed."""

    def __init__(self, line: str, shown: str, output: str) -> None:
        super().__init__(line, shown, output)
        self.line, self.shown, self.output = line, shown, output

    def __str__(self) -> str:
        return self.line


def run_rank_test(ctx: Context, test: RankTest) -> tuple[str, str] | None:
    """Run the test on this rank. Returns None if it passed, ("skip" or "xfail", the reason) if it ended itself so;
    raises RankTestFailed, or the PeerError or StuckError of a rank that waited for another."""
    import pytest

    from crosscut.comm.errors import one_line

    said = io.StringIO()
    # Threads share one stdout, which pytest captures already.
    capture = contextlib.redirect_stdout(said) if test.rewrite else contextlib.nullcontext()
    try:
        with capture:
            function = test.function or _find(test)
            function(**{name: ctx if value == CONTEXT else value for name, value in test.arguments.items()})
    except (pytest.skip.Exception, pytest.xfail.Exception) as ended:
        return "skip" if isinstance(ended, pytest.skip.Exception) else "xfail", str(ended)
    except (PeerError, StuckError):
        raise  # about others: those who know more are asked first
    except (Exception, pytest.fail.Exception) as error:
        raise RankTestFailed(one_line(error), _show(error, test), said.getvalue()) from error
    return None


def _find(test: RankTest) -> Callable[..., Any]:
    """The test function, bound to a new object of its class if it has one."""
    found: Any = _module(test)
    for name in test.qualname.split("."):
        owner, found = found, getattr(found, name)
        if isinstance(owner, type):
            instance = owner()
            vars(instance).update(test.attributes)
            found = getattr(instance, name)
    return found


def _module(test: RankTest) -> ModuleType:
    _rewriting(test.rewrite)
    path = Path(test.path)
    known = sys.modules.get(test.module)
    if known is None:
        with contextlib.suppress(ImportError):
            known = importlib.import_module(test.module)
    if known is not None and Path(known.__file__ or "").resolve() == path.resolve():
        return known
    spec = importlib.util.spec_from_file_location(test.module, path)  # pytest's import mode "importlib"
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[test.module] = module
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=1)
def _rewriting(options: tuple[str, ...]) -> None:
    """Make imports of test modules explain their assertions. With a pytest whose insides have changed, tests run and
    fail all the same, only less explained."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from _pytest.assertion import truncate, util
        from _pytest.config import _prepareconfig
        from _pytest.terminal import TerminalReporter

        config = _prepareconfig(list(options))
        config.pluginmanager.register(TerminalReporter(config, io.StringIO()), "terminalreporter")  # asked for colours

        def explain(op: str, left: object, right: object) -> str | None:
            for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
                if lines:
                    short = truncate.truncate_if_required(lines, SimpleNamespace(config=config))  # type: ignore[arg-type]
                    return "\n~".join(line.replace("\n", "\\n") for line in short).replace("%", "%%")
            return None

        util._reprcompare, util._config = explain, config


def _show(error: BaseException, test: RankTest) -> str:
    """The error as pytest shows it, from the test function on."""
    import pytest
    from _pytest._io import TerminalWriter

    info = pytest.ExceptionInfo.from_exception(error)
    inside = info.traceback.cut(path=test.path).filter(info)
    if isinstance(error, CommError):  # it says all there is to say about what lies below the user's call
        below = (f"{os.sep}torch{os.sep}", f"{os.sep}crosscut{os.sep}comm{os.sep}")
        inside = inside.filter(lambda entry: not any(part in str(entry.path) for part in below))
    info.traceback = inside or info.traceback
    shown = info.getrepr(style=test.style, showlocals=test.showlocals, funcargs=True)  # type: ignore[arg-type]
    text = io.StringIO()
    writer = TerminalWriter(text)
    writer.hasmarkup = test.markup
    shown.toterminal(writer)
    return text.getvalue()
