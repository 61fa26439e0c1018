"""Small distributed tests: on the plugin's warm ranks, and each with mp.spawn and Gloo, as they are usually written.

    python benchmarks/small_tests.py [--tests 50] [--ranks 2]

Both run the same 50 bodies. Prints the seconds of each, start of the ranks included, and the ratio.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FILE = """
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks({ranks})
@pytest.mark.parametrize("k", range({tests}))
def test_sum(k):
    x = torch.full((k + 1,), float(dist.get_rank() + k))
    dist.all_reduce(x)
    assert x.tolist() == [sum(r + k for r in range(dist.get_world_size()))] * (k + 1)
"""


def body(rank: int, ranks: int, k: int, port: int) -> None:
    """The same test, by hand."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    x = torch.full((k + 1,), float(rank + k))
    dist.all_reduce(x)
    assert x.tolist() == [sum(r + k for r in range(ranks))] * (k + 1)
    dist.destroy_process_group()


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_small.py").write_text(FILE.format(tests=args.tests, ranks=args.ranks))
        began = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", folder]
        subprocess.run(command, check=True, cwd=folder)
        warm_s = time.perf_counter() - began
    began = time.perf_counter()
    for k in range(args.tests):
        mp.spawn(body, (args.ranks, k, 20_000 + (os.getpid() + k) % 10_000), nprocs=args.ranks)
    spawn_s = time.perf_counter() - began
    print(f"{args.tests} tests on {args.ranks} ranks: plugin {warm_s:.1f} s, mp.spawn {spawn_s:.1f} s: "
          f"{spawn_s / warm_s:.1f} times as fast")  # fmt: skip


if __name__ == "__main__":
    main()
