"""Find out which rank makes a job hang. Run: python examples/06_find_a_hang.py

This file is three things: a program with a mistake (one rank leaves a call out), the job that runs it under the watch,
and the reader of what it left. In your own job only the first exists, and `-m crosscut.watch` stands before it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank: int, world_size: int, port: int) -> None:
    """A training loop by hand. On rank 1 the sixth step has no valid token: so why reduce nothing?"""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    weights = torch.zeros(8)
    for step in range(10):
        gradient = torch.ones(8) * rank
        tokens = torch.tensor(0 if (rank, step) == (1, 5) else 16)
        if tokens > 0:
            dist.all_reduce(gradient)
        dist.all_reduce(tokens)
        weights -= 0.1 * gradient / tokens
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        mp.spawn(rank_main, (2, int(sys.argv[1])), nprocs=2)
    else:
        with tempfile.TemporaryDirectory() as run:
            port = str(20000 + os.getpid() % 10000)
            watch = [sys.executable, "-m", "crosscut.watch", "--run", run, "--hang-timeout", "5", __file__, port]
            code = subprocess.run(watch, stderr=subprocess.DEVNULL, check=False).returncode
            print(f"the job ended with exit code {code}; crosscut why says:\n")
            subprocess.run([sys.executable, "-m", "crosscut", "why", run], check=True)
            found = json.loads((Path(run) / "autopsy.json").read_text())
            print(f"\nas data: {found['verdict']} by rank {found['culprits'][0]} at {found['site']}")
