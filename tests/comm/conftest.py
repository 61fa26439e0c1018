"""One fixture: the same body on every back end that runs here."""

import pytest

from crosscut.comm import spawn


class OnThreads:
    name = "threads"

    def __call__(self, fn, *args, world_size, **kwargs):
        return spawn(fn, *args, world_size=world_size, backend="threads", timeout_s=60, **kwargs)


class OnGloo:
    name = "gloo"

    def __init__(self, pool):
        self.pool = pool

    def __call__(self, fn, *args, world_size, **kwargs):
        return self.pool.run(fn, *args, world_size=world_size, **kwargs)


@pytest.fixture(params=["threads", "gloo"])
def run(request):
    """`run(fn, *args, world_size=n)` in one of the back ends."""
    return OnThreads() if request.param == "threads" else OnGloo(request.getfixturevalue("pool"))
