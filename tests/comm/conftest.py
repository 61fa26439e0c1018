"""One fixture: the same body on every back end that runs here."""

import pytest

from crosscut.comm import spawn


class OnThreads:
    name = "threads"

    def __call__(self, fn, *args, world_size, **kwargs):
        return spawn(fn, *args, world_size=world_size, backend="threads", timeout_s=60, **kwargs)


class OnProcesses:
    def __init__(self, name, pool):
        self.name = name
        self.pool = pool

    def __call__(self, fn, *args, world_size, **kwargs):
        return self.pool.run(fn, *args, world_size=world_size, backend=self.name, **kwargs)


@pytest.fixture(params=["threads", "gloo", "shm"])
def run(request):
    """`run(fn, *args, world_size=n)` in one of the back ends."""
    return OnThreads() if request.param == "threads" else OnProcesses(request.param, request.getfixturevalue("pool"))
