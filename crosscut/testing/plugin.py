"""A pytest plugin: `@pytest.mark.ranks(4)` runs a test on four ranks.

    @pytest.mark.ranks(2, 4)                       # once on two ranks, once on four
    def test_mean():
        x = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(x)                         # plain torch.distributed: the group is there
        assert x[0] == sum(range(dist.get_world_size()))

The ranks are warm processes that the whole session shares: on shared memory where that runs, else on Gloo. With
`backend="threads"` they are threads of the test process, and the test talks through `ctx` (a `crosscut.Context`, which
a test on any back end may ask for). Fixtures run once, in the main process; what they give is pickled to the ranks.

The first failing rank's assertion is shown as pytest shows it. A call that does not match, a rank that never comes and
a rank that dies fail their test with a sentence, and the next test runs. This module does not import torch: pytest
loads it for every user who has crosscut installed.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import TestCase

import pytest

from crosscut.testing.in_rank import CONTEXT, RankTest, RankTestFailed, run_rank_test

if TYPE_CHECKING:
    from crosscut.testing.pool import WorkerPool

BACKENDS = ("threads", "shm", "gloo")
MAX_RANKS = 16
TIMEOUT_S = 30.0
_POOL = pytest.StashKey["WorkerPool"]()


class RanksFailed(Exception):
    """A test failed on some rank. `shown` is what the report says."""

    def __init__(self, shown: str, output: str = "", rank: int = 0) -> None:
        super().__init__(shown)
        self.shown, self.output, self.rank = shown, output, rank


def pytest_configure(config: pytest.Config) -> None:
    """Say what the mark is."""
    config.addinivalue_line(
        "markers",
        "ranks(n, ..., backend=None, timeout_s=30): run the test on n ranks, once for each n; backend: shm, gloo, "
        "threads (None: shm where it runs, else gloo)",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    if _POOL in config.stash:
        config.stash[_POOL].close()


def worker_pool(config: pytest.Config) -> WorkerPool:
    """The session's workers; started by the first test that needs them."""
    if _POOL not in config.stash:
        from crosscut.testing.pool import WorkerPool

        config.stash[_POOL] = WorkerPool(MAX_RANKS)
    return config.stash[_POOL]


@pytest.fixture
def ctx(request: pytest.FixtureRequest) -> Any:
    """This rank's `crosscut.Context`: `ctx.rank`, `ctx.world_size`, `ctx.group(...)`."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("the fixture ctx needs @pytest.mark.ranks(n) on the test", pytrace=False)
    return CONTEXT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Several numbers in the mark: one test for each."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and len(mark.args) > 1:
        metafunc.fixturenames.append("_ranks")
        metafunc.parametrize("_ranks", mark.args, ids=[f"{n}-ranks" for n in mark.args])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is not called through pytest would run here, on one rank, and could pass."""
    if item.get_closest_marker("ranks") is not None and issubclass(getattr(item, "cls", None) or object, TestCase):
        pytest.fail("@pytest.mark.ranks: unittest runs its own methods; use a plain function or class", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks instead of here."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    size, backend, timeout_s = _read(mark, pyfuncitem)
    if backend == "threads":
        from crosscut.comm.launch import spawn

        run = lambda test: spawn(run_rank_test, test, world_size=size, backend="threads", timeout_s=timeout_s)  # noqa: E731
    else:
        pool = worker_pool(pyfuncitem.config)
        run = lambda test: pool.run(run_rank_test, test, world_size=size, backend=backend, timeout_s=timeout_s)  # noqa: E731
    test = _describe(pyfuncitem, in_process=backend == "threads")
    from crosscut.comm.errors import CommError, RankError

    try:
        ends = run(test)
    except RankError as error:
        told = {rank: line.removeprefix(f"{RankTestFailed.__name__}: ") for rank, line in sorted(error.folded.items())}
        others = "".join(f"\nrank {rank}: {line}" for rank, line in told.items())
        if isinstance(error.original, RankTestFailed):
            failed = error.original
            first = f"rank {error.rank} of {size} on {backend}: {failed.line}"
            raise RanksFailed(f"{first}\n\n{failed.shown}{others}", failed.output, error.rank) from None
        raise RanksFailed(f"{error}{others}") from None
    except CommError as error:
        raise RanksFailed(str(error)) from None
    early = [end for end in ends if end is not None]
    if early and early == [early[0]] * size:
        how, reason = early[0]
        (pytest.skip if how == "skip" else pytest.xfail)(reason)
    if early:
        rest = [str(rank) for rank, end in enumerate(ends) if end != early[0]]
        did = {"skip": "skipped", "xfail": "expected to fail"}[early[0][0]]
        raise RanksFailed(f"ranks {did} ({early[0][1]}), but not all: {', '.join(rest)} ended otherwise")
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show the rank's own words instead of where they were raised."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, RanksFailed) and report.outcome == "failed":
        report.longrepr = error.shown
        if error.output:
            report.sections.append((f"Captured stdout of rank {error.rank}", error.output))
    return report


def _read(mark: pytest.Mark, item: pytest.Function) -> tuple[int, str, float]:
    """The number of ranks, the back end and the time-out of a mark, checked."""
    size: Any = item.callspec.params["_ranks"] if len(mark.args) > 1 else mark.args[0] if mark.args else None
    unknown = set(mark.kwargs) - {"backend", "timeout_s"}
    backend: Any = mark.kwargs.get("backend")
    timeout_s = mark.kwargs.get("timeout_s", TIMEOUT_S)
    wrong = ""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_RANKS:
        wrong = f"the number of ranks is {size!r}; use 1 to {MAX_RANKS}"
    elif unknown:
        wrong = f"unknown argument {sorted(unknown)[0]!r}; use backend, timeout_s"
    elif backend is not None and backend not in BACKENDS:
        wrong = f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}"
    elif not isinstance(timeout_s, int | float) or not timeout_s > 0:
        wrong = f"timeout_s={timeout_s!r} must be positive"
    elif inspect.iscoroutinefunction(item.obj):  # called, it would run nothing and pass
        wrong = f"{item.name} is async, which ranks do not await; call asyncio.run in a plain test"
    elif getattr(item.obj, "is_hypothesis_test", False):
        wrong = "hypothesis would draw other values on every rank; draw them from a seed that the test takes"
    if wrong:
        pytest.fail(f"@pytest.mark.ranks: {wrong}", pytrace=False)
    if backend is None:
        from crosscut.comm.shm.platform import why_not

        backend = "shm" if why_not() is None else "gloo"
    return size, backend, timeout_s


def _describe(item: pytest.Function, in_process: bool) -> RankTest:
    config = item.config
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    style = config.getoption("tbstyle", "auto")
    common: dict[str, Any] = {
        "module": item.module.__name__,
        "path": str(Path(item.module.__file__)),
        "qualname": item.function.__qualname__,
        "arguments": arguments,
        "style": "long" if style in ("auto", "no") else style,
        "showlocals": bool(config.getoption("showlocals", False)),
        "markup": config.get_terminal_writer().hasmarkup
        if config.pluginmanager.hasplugin("terminalreporter")
        else False,
    }
    if in_process:
        return RankTest(**common, function=item.obj)
    common["attributes"] = dict(vars(item.instance)) if isinstance(item.instance, item.cls or ()) else {}
    given = {f"the fixture {name!r} gives": value for name, value in arguments.items()}
    given |= {f"self.{name} is": value for name, value in common["attributes"].items()}
    wrong = ""
    for what, value in given.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # noqa: PERF203
            wrong = f"{what} a {type(value).__name__}, which cannot be sent to the ranks ({error})"
    if "<locals>" in common["qualname"]:
        wrong = f"{common['qualname']} is made inside a function, where the ranks cannot find it"
    if wrong:
        pytest.fail(f'@pytest.mark.ranks: {wrong}; make it where they can, or use backend="threads"', pytrace=False)
    files = " ".join(config.getini("python_files"))
    options = ["-c", "/dev/null" if sys.platform != "win32" else "NUL", "--rootdir", str(config.rootpath),
               "--noconftest", "-p", "no:cacheprovider", "-o", f"python_files={files}",
               *["-v"] * max(0, config.get_verbosity())]  # fmt: skip
    return RankTest(**common, rewrite=tuple(options))
