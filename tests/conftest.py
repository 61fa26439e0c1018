"""Fixtures shared by all tests."""

import pytest
import torch

torch.set_num_threads(1)  # two cores, and every world has several ranks


@pytest.fixture(scope="session")
def pool():
    """Warm Gloo workers: `pool.run(fn, *args, world_size=2)`. At most a handful of process launches a session."""
    from crosscut.testing.pool import WorkerPool

    workers = WorkerPool(max_workers=8)
    yield workers
    workers.close()
    assert workers.launches <= 16, f"{workers.launches} worker launches: a test breaks the pool again and again"
