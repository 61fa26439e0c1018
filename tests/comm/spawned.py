"""Functions that spawned ranks run, and the scripts that launch them: `python spawned.py NAME`."""

import json
import os
import signal
import socket
import sys
import time

import torch

from crosscut.comm import spawn


def works(ctx, base, *, extra):
    """Sums a tensor; says everything about itself; and tries the port it was told."""
    x = torch.arange(3.0) + ctx.rank
    ctx.world.all_reduce(x)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(address, timeout=5):
        pass
    ctx.print(f"line of rank {ctx.rank}")
    return {
        "rank": ctx.rank,
        "sum": x,
        "value": base + extra,
        "pid": os.getpid(),
        "port": address[1],
        "backend": (ctx.backend, ctx.backend_why),
        "threads": (torch.get_num_threads(), ctx.threads, ctx.threads_why),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def fails_at_step(ctx, bad):
    for step in range(5):
        ctx.world.all_reduce(torch.ones(2), tag="grads")
        if ctx.rank == bad and step == 3:
            raise ValueError(f"loss is nan at step {step}")


def is_killed(ctx, bad):
    ctx.barrier()
    if ctx.rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


def waits(ctx, folder):
    """Says its pid, then waits inside a collective (rank 0) or outside (the others) for ever."""
    with open(os.path.join(folder, f"{ctx.rank}.pid"), "w") as file:
        file.write(str(os.getpid()))
    if ctx.rank == 0:
        ctx.barrier()
    time.sleep(600)


def total(ctx, scale):
    return ctx.world.all_reduce(torch.tensor(ctx.rank * scale)).item(), ctx.rank, ctx.local_rank


if __name__ == "__main__":
    if sys.argv[1] == "waits":
        spawn(waits, sys.argv[2], world_size=2, backend="gloo")
    elif sys.argv[1] == "torchrun":  # under torchrun: one of the ranks already
        values = spawn(total, 10, backend="gloo")
        again = spawn(total, 1, world_size=2, backend="gloo")  # a second world in the same processes
        try:
            spawn(total, 10, world_size=4, backend="gloo")
        except ValueError as error:
            refused = str(error)
        with open(os.path.join(sys.argv[2], os.environ["RANK"]), "w") as file:
            json.dump({"values": values, "again": again, "refused": refused}, file)
