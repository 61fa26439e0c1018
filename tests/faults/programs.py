"""The stock programs that faults are injected into: DDP, FSDP2, DTensor, pipelining, by hand. Each is one rank.

A program asks `inject(step)` once a step. Faults of a process happen there; faults of communication are returned by
name, and the program makes the wrong call.
"""

import random
import time

import torch
import torch.distributed as dist

from crosscut.watch import section

from .inject import RANDOM

STEPS = 8


class Small(torch.nn.Module):
    """Two heads, so that one can be left out."""

    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def forward(self, x, both=True):
        hidden = torch.relu(self.body(x))
        return self.one(hidden) + (self.two(hidden) if both else 0)


def save(step, folder):
    """What a run keeps: every second step, whole or not at all."""
    if step % 2 and dist.get_rank() == 0:
        (folder / "saved.partial").write_text(str(step + 1))
        (folder / "saved.partial").replace(folder / "saved")


def ddp(inject, folder):
    model = torch.nn.parallel.DistributedDataParallel(Small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        if fault == "empty":  # nothing to learn from in this batch, so on to the next one
            continue
        loss = model(torch.randn(4, 8), both=fault != "unused").square().sum()
        loss.backward()
        if fault != "no step":
            optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if fault == "op":
            dist.all_reduce(total, dist.ReduceOp.MAX)
        elif fault != "skip":
            dist.all_reduce(total)
        save(step, folder)
    dist.barrier()


def fsdp(inject, folder):
    from torch.distributed.fsdp import fully_shard

    model = Small()
    for part in (model.body, model.one, model.two):
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        model(torch.randn(4, 8), both=fault != "branch").square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(step, folder)
    dist.barrier()


def hand(inject, folder):
    """Every kind of collective, by hand."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        if fault == "section":
            with section("evaluation", 60):
                time.sleep(3)
        x = torch.arange(6.0) + rank
        if fault != "skip":
            dist.broadcast(torch.ones(3), src=1 if fault == "root" else 0)
        if fault == "branch":
            dist.broadcast(x, 0)
        else:
            shape = (9,) if fault == "shape" else (2, 3) if fault == "view" else (6,)
            x = torch.ones(shape, dtype=torch.int32 if fault == "dtype" else torch.float32)
            two = [
                lambda x=x, fault=fault: dist.all_reduce(x, dist.ReduceOp.MAX if fault == "op" else dist.ReduceOp.SUM),
                lambda step=step: dist.all_reduce(torch.ones(6) * step),
            ]
            for call in two[::-1] if fault == "swap" else two:
                call()
        if fault == "extra":
            dist.all_reduce(torch.ones(1))
        pieces = [torch.empty(4) for _ in range(size)]
        dist.all_gather(pieces, torch.ones(4))
        rows = [2] * size
        if fault == "splits":
            rows[0], rows[1] = 1, 3
        dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size), [2] * size, rows)
        if inject.has(*RANDOM) and random.random() < 0.5:
            dist.barrier()
        if fault != "no step":  # an overflow that only this rank has seen
            optimizer.step()
        save(step, folder)
    dist.barrier()


def messages(inject, folder):
    """A pipeline by hand: activations forward, gradients back, then one all_reduce."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for step in range(STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        if fault == "early":  # the all_reduce before the messages
            dist.all_reduce(torch.ones(2))
        if rank > 0 and fault != "norecv":
            dist.recv(torch.empty(5 if fault == "length" else 3, dtype=_of(fault)), rank - 1)
        if rank < size - 1:
            if fault != "nosend":
                dist.send(torch.ones(3), rank + 1)
            dist.recv(torch.empty(4), rank + 1)
        if rank > 0:
            dist.send(torch.ones(4), rank - 1)
        if fault != "early":
            dist.all_reduce(torch.ones(2))
        optimizer.step()
        save(step, folder)
    dist.barrier()


def _of(fault):
    return torch.int32 if fault == "type" else torch.float32


def groups(inject, folder):
    """Four ranks as a 2 x 2 mesh of groups."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1], group_desc="tp"), dist.new_group([2, 3], group_desc="tp")]
    columns = [dist.new_group([0, 2], group_desc="dp"), dist.new_group([1, 3], group_desc="dp")]
    tp, dp = rows[rank // 2], columns[rank % 2]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for step in range(STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        if fault == "norm first":
            dist.all_reduce(torch.ones(1))
        if fault != "skip":
            dist.all_reduce(torch.ones(4), group=tp)
        dist.broadcast(torch.ones(2), 0 if fault == "source" else 2 * (rank // 2), group=tp)  # it counts in the world
        dist.all_reduce(torch.ones(8), group=tp if fault == "group" else dp)
        if fault != "norm first":
            dist.all_reduce(torch.ones(1))
        optimizer.step()
        save(step, folder)
    dist.barrier()


def many(inject, folder):
    """Twenty groups that overlap, made and left without being destroyed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = [(pair, dist.new_group(pair)) for pair in ([k % size, (k + 1) % size] for k in range(20))]
    for step in range(STEPS):
        inject(step)
        for pair, group in made:
            if rank in pair:
                dist.all_reduce(torch.ones(2), group=group)


def ring(inject, folder):
    """Each rank passes something large on to the next one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, out = torch.ones(1 << 20), torch.empty(1 << 20)
    for step in range(STEPS):
        if inject(step) == "blocking":
            dist.send(x, (rank + 1) % size)
            dist.recv(out, (rank - 1) % size)
        else:
            sent = dist.isend(x, (rank + 1) % size)
            dist.recv(out, (rank - 1) % size)
            sent.wait()
    dist.barrier()


def tensor(inject, folder):
    """Tensor parallelism by DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        x = torch.randn(3 if fault == "shape" else 4, 8, requires_grad=True)
        if fault == "branch":  # an evaluation on this rank alone
            model(x)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(step, folder)
    dist.barrier()


def pipeline(inject, folder):
    """torch.distributed.pipelining, a stage a rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    module = torch.nn.Linear(8, 8)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule, fewer = (Schedule1F1B(stage, n, loss_fn=torch.nn.functional.mse_loss) for n in (4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        fault = inject(step)
        if fault == "batches":
            break
        rows = torch.randn(8, 8) if fault != "micro" else torch.randn(6, 8)
        run = (schedule if fault != "micro" else fewer).step
        if rank == 0:
            run(rows)
        else:
            run(target=rows) if rank == size - 1 else run()
        optimizer.step()
        optimizer.zero_grad()
        save(step, folder)
    dist.barrier()


def timed(inject, folder):
    """A step of 20 ms and two all_reduces: for what is slow."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for _ in range(24):
        slow = inject.slow()
        for _part in range(2):
            time.sleep(0.010 * slow)
            dist.all_reduce(torch.ones(16))
        optimizer.step()
    dist.barrier()


class Slow:
    """A network that takes 10 ms for a message, or `factor` times that."""

    def __init__(self, inner, factor):
        self._inner, self._factor = inner, factor

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send(self, *args):
        time.sleep(0.010 * self._factor)
        return self._inner.send(*args)


def links(inject, folder):
    """A chain of ranks that pass messages on; what is slow is one link."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    network = Slow(
        getattr(world, "inner", dist), 1.5 if inject.slow() > 1 else 1.0
    )  # below the recorder, if there is one
    send = network.send
    if hasattr(world, "inner"):
        world.inner, send = network, dist.send
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for _ in range(24):
        if rank:
            dist.recv(torch.empty(64), rank - 1)
        if rank < size - 1:
            send(torch.ones(64), rank + 1)
        optimizer.step()
        dist.barrier()
