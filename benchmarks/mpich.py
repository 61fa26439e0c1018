"""all_reduce by MPICH, for a comparison with crosscut's shm back end. A developers' benchmark, not part of the package.

    python -m venv /tmp/mpich && /tmp/mpich/bin/pip install mpi4py mpich numpy
    /tmp/mpich/bin/mpiexec -n 2 /tmp/mpich/bin/python benchmarks/mpich.py 8,4096,1000000,100000000 15

Prints JSON, bytes -> median time in us of the slowest rank. Measured as crosscut bench does: in place, fp32, from a
common barrier, short calls repeated within a trial.
"""

import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD


def trial(x: np.ndarray, num_calls: int) -> float:
    """Seconds of one call."""
    world.Barrier()
    began = time.perf_counter()
    for _ in range(num_calls):
        world.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
    return world.allreduce((time.perf_counter() - began) / num_calls, MPI.MAX)


def main(sizes: list[int], num_trials: int) -> None:
    """Measure every size."""
    found = {}
    for size in sizes:
        x = np.full(size // 4, world.rank + 1, np.float32)
        world.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
        assert (x == world.size * (world.size + 1) / 2).all()
        x[:] = 0
        num_calls = max(1, min(50, int(0.002 / trial(x, 3))))
        found[size] = statistics.median(trial(x, num_calls) for _ in range(num_trials)) * 1e6
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1].split(",")], int(sys.argv[2]))
