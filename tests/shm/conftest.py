"""Worlds of warm processes on shm, in which stock torch.distributed is compared with Gloo or with the definition."""

import pytest


@pytest.fixture
def shm(pool):
    """`shm(fn, *args, world_size=n)`: fn(ctx, *args) on n processes whose default group is shm's."""

    def run(fn, *args, world_size=2, **kwargs):
        return pool.run(fn, *args, world_size=world_size, backend="shm", **kwargs)

    return run
