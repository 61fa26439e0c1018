"""Fixtures shared by all tests."""

import gc
import os
import signal

import pytest
import torch

from crosscut.testing.plugin import worker_pool

pytest_plugins = ["pytester"]
torch.set_num_threads(1)  # two cores, and every world has several ranks
os.environ.setdefault("CROSSCUT_CHECK", "1")  # here and in every process that a test starts
# A shell starts background jobs with SIGINT ignored, which children inherit: tests of Ctrl-C need it as in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool(request):
    """The warm workers of `@pytest.mark.ranks`, for tests that look at what ranks return: `pool.run(fn, *args,
    world_size=2)`. At most a handful of process launches a session."""
    workers = worker_pool(request.config)
    yield workers
    assert workers.launches <= 16, f"{workers.launches} worker launches: a test breaks the pool again and again"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
    """Tests that start or use processes share one worker of pytest-xdist: one pool, and no two worlds at a time. So do
    those of a module that shares an expensive run."""
    together = ("gloo", "test_spawn", "test_torchrun", "cli/test_train", "test_examples", "test_golden_ledger")
    for item in items:
        uses = "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker("ranks")
        if uses or any(name in item.nodeid for name in together):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture
def no_gc():
    """No garbage collection: hypothesis hooks into it, and a KeyboardInterrupt raised in a hook is swallowed."""
    gc.disable()
    yield
    gc.enable()
