"""Worlds in which something goes wrong. `python failures.py FOLDER`: every scenario on forked ranks (torch is imported
once); writes what each rank has met as JSON.
"""

import contextlib
import datetime
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import crosscut.comm.shm.register

TIMEOUT_S = 1.5


def caught(fn):
    """What a call raises, and how long it took."""
    began = time.monotonic()
    try:
        fn()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - began,
            "at": time.monotonic(),
        }
    return {"type": "nothing", "text": "", "seconds": time.monotonic() - began, "at": time.monotonic()}


def start(folder, rank, size, timeout_s=TIMEOUT_S):
    dist.init_process_group(
        "shm",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def dies(folder, rank, size):
    """Rank 1 is killed while the others are in a call."""
    start(folder, rank, size, 60)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        say(folder, rank, {"at": time.monotonic(), "pid": os.getpid()})
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(3)
    first = caught(lambda: dist.all_reduce(x))
    return {"first": first, "second": caught(lambda: dist.all_reduce(x))}


def dies_under_ddp(folder, rank, size):
    """Rank 1 is killed while the others are in backward, where torch waits in C++."""
    start(folder, rank, size, 60)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    if rank == 1:
        say(folder, rank, {"at": time.monotonic(), "pid": os.getpid()})
        os.kill(os.getpid(), signal.SIGKILL)
    return {"first": caught(lambda: model(torch.ones(2, 4)).sum().backward())}


def leaves(folder, rank, size):
    """Rank 1 ends without a word; rank 0 still gets what it had said, then learns it."""
    start(folder, rank, size, 60)
    x = torch.full((3,), float(rank))
    if rank == 1:
        dist.send(x, 0)
        dist.all_reduce(x)
        return {"pid": os.getpid()}
    dist.recv(x, 1)
    got = x.tolist()
    dist.all_reduce(x)
    return {
        "got": got,
        "sum": x.tolist(),
        "first": caught(lambda: dist.recv(x, 1)),
        "any": caught(lambda: dist.recv(x)),
    }


def destroys(folder, rank, size):
    start(folder, rank, size, 60)
    group = dist.new_group([0, 1])
    if rank == 1:
        dist.destroy_process_group(group)
        dist.barrier()
        return {}
    out = {"first": caught(lambda: dist.all_reduce(torch.ones(1), group=group))}
    dist.barrier()  # the other groups go on
    return out


def aborts(folder, rank, size):
    start(folder, rank, size, 60)
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
        group = dist.group.WORLD
        group.abort()
        return {"first": caught(lambda: group.allreduce([torch.ones(1)]).wait())}
    return {"first": caught(lambda: dist.all_reduce(torch.ones(1)))}


def is_late(folder, rank, size):
    """Rank 2 makes its call after the others' patience is over."""
    start(folder, rank, size)
    dist.barrier()
    if rank == 2:
        time.sleep(TIMEOUT_S + 1)
    return {"first": caught(lambda: dist.all_reduce(torch.ones(3)))}


def nobody_sends(folder, rank, size):
    start(folder, rank, size)
    if rank == 0:
        return {"first": caught(lambda: dist.recv(torch.ones(3), 1, tag=4))}
    if rank == 1:
        time.sleep(TIMEOUT_S + 0.5)
        return {}
    return {"first": caught(lambda: dist.recv(torch.ones(3)))}


def nobody_receives(folder, rank, size):
    start(folder, rank, size)
    if rank == 1:
        time.sleep(TIMEOUT_S + 0.5)
        return {}
    return {"first": caught(lambda: dist.send(torch.ones(1 << 20), 1))}


def does_not_join(folder, rank, size):
    if rank == 1:
        time.sleep(TIMEOUT_S + 0.5)
        return {}
    return {"first": caught(lambda: start(folder, rank, size))}


def short_wait(folder, rank, size):
    """A time-out of one wait, shorter than the group's."""
    start(folder, rank, size, 60)
    if rank == 1:
        time.sleep(1)
        return {}
    work = dist.all_reduce(torch.ones(2), async_op=True)
    return {"first": caught(lambda: work.wait(datetime.timedelta(seconds=0.3)))}


def again(folder, rank, size):
    """World after world in the same processes, on one store whose old entries stay; nothing is left open."""
    store = dist.FileStore(f"{folder}/same", size)
    fds, maps = [], []
    for turn in range(4):
        dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=20))
        x = torch.full((400_000,), float(rank + turn))
        dist.all_reduce(x)
        assert x.unique().tolist() == [sum(range(size)) + size * turn]
        dist.barrier()
        dist.destroy_process_group()
        fds.append(len([n for n in os.listdir("/proc/self/fd") if _is_ours(n)]))
        with open("/proc/self/maps") as file:
            maps.append(file.read().count("crosscut-shm"))
    return {"open": fds, "mapped": maps}


def _is_ours(number):
    with contextlib.suppress(OSError):
        return "crosscut-shm" in os.readlink(f"/proc/self/fd/{number}") or "pidfd" in os.readlink(
            f"/proc/self/fd/{number}"
        )
    return False


def mismatch(folder, rank, size, name):
    """Ranks that call different things."""
    start(folder, rank, size, 20)
    x = torch.ones(6)
    calls = {
        "op": lambda: dist.all_reduce(x, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "collective": lambda: dist.all_reduce(x) if rank else dist.all_gather([x.clone(), x.clone()], x),
        "size": lambda: dist.all_reduce(torch.ones(4 if rank else 6)),
        "dtype": lambda: dist.all_reduce(torch.ones(6, dtype=torch.int32 if rank else torch.float32)),
        "gather size": lambda: dist.all_gather([torch.ones(2 + rank)] * 2, torch.ones(2 + rank)),
        "root": lambda: (dist.broadcast(x, rank), dist.barrier()),
        "roots of reduce": lambda: (dist.reduce(x, rank), dist.barrier()),
        "splits": lambda: dist.all_to_all_single(
            torch.ones(3 if rank else 4), torch.ones(4), [1, 2] if rank else [2, 2], [2, 2]
        ),
        "message size": lambda: dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(5), 0),
        "barrier": lambda: dist.barrier() if rank else dist.all_reduce(x),
    }
    out = {"first": caught(calls[name])}
    time.sleep(0.3)
    return out


def holds_memory(folder, rank, size):
    """Touch much shared memory, then be killed, all of them."""
    start(folder, rank, size, 60)
    for peer in range(size):
        work = dist.isend(torch.ones(1 << 19), peer)
        dist.recv(torch.empty(1 << 19), peer) if peer == rank else None
    dist.all_reduce(torch.ones(4 << 20))
    say(folder, rank, {"pid": os.getpid()})
    time.sleep(60)
    work.wait()


def say(folder, rank, value):
    with open(f"{folder}/{rank}.partial", "w") as file:
        json.dump(value, file)
    os.rename(f"{folder}/{rank}.partial", f"{folder}/{rank}.json")


def world(base, name, scenario, size, *args):
    """Run a scenario; what its ranks have said."""
    folder = f"{base}/{name.replace(' ', '-')}"
    os.mkdir(folder)
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                torch.set_num_threads(1)
                said = scenario(folder, rank, size, *args)
                say(folder, rank, said)
                code = 0
            except BaseException as error:
                say(folder, rank, {"failed": repr(error)})
            os._exit(code)
        pids.append(pid)
    return folder, pids


def collect(folder, pids):
    for pid in pids:
        os.waitpid(pid, 0)
    return [json.load(open(f"{folder}/{rank}.json")) for rank in range(len(pids))]


MISMATCHES = [
    "op",
    "collective",
    "size",
    "dtype",
    "gather size",
    "root",
    "roots of reduce",
    "splits",
    "message size",
    "barrier",
]


def main(base):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    crosscut.comm.shm.register.register_shm()
    out = {}
    for scenario, size in [
        (dies, 3),
        (dies_under_ddp, 2),
        (leaves, 2),
        (destroys, 2),
        (aborts, 2),
        (is_late, 3),
        (nobody_sends, 3),
        (nobody_receives, 2),
        (does_not_join, 2),
        (short_wait, 2),
        (again, 3),
    ]:
        out[scenario.__name__] = collect(*world(base, scenario.__name__, scenario, size))
    for name in MISMATCHES:
        out[name] = collect(*world(base, name, mismatch, 2, name))

    def shared_kib():
        return int(next(line for line in open("/proc/meminfo") if line.startswith("Shmem:")).split()[1])

    before = shared_kib()
    folder, pids = world(base, "killed", holds_memory, 3)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and len([n for n in os.listdir(folder) if n.endswith(".json")]) < 3:
        time.sleep(0.05)
    during = shared_kib()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    time.sleep(0.1)
    out["memory"] = {"before": before, "during": during, "after": shared_kib()}
    with open(f"{base}/all.json", "w") as file:
        json.dump(out, file)


if __name__ == "__main__":
    main(sys.argv[1])
