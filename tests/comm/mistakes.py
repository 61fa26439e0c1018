"""What ranks get wrong, as one table: each row through a `Group` and through stock torch.distributed.

`python mistakes.py [ROW]`: run every row (or one) on bare Gloo, on Gloo with torch's own checks
(TORCH_DISTRIBUTED_DEBUG=DETAIL) and under `crosscut.checked()`, and print the table of docs/checked.md.
"""

import contextlib
import datetime
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import crosscut

ones = torch.ones
MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM


class Row:
    """said: what the error must say, as patterns in order; group, stock: the calls of rank r of two, the wrong one on
    rank 1; stock returns what the call has made, for the table of what torch does.
    """

    def __init__(self, group, stock, *said):
        self.group, self.stock, self.said = group, stock, said


def _in_turn(first, second, swapped):
    """Two calls, each from its own line."""

    def a():
        first()

    def b():
        second()

    (b(), a()) if swapped else (a(), b())


def _swapped_group(g, r):
    x, y = ones(3) * (1 + r), ones(3) * (100 + r)

    def first():
        g.all_reduce(x)

    def second():
        g.all_reduce(y)

    _in_turn(first, second, r == 1)


def _swapped_stock(r):
    x, y = ones(3) * (1 + r), ones(3) * (100 + r)

    def first():
        dist.all_reduce(x)

    def second():
        dist.all_reduce(y)

    _in_turn(first, second, r == 1)
    return torch.stack([x[0], y[0]])  # 3 and 201, if it were right


def _reduced(x, op=SUM):
    dist.all_reduce(x, op)
    return x


def _broadcast(x, src):
    dist.broadcast(x, src)
    return x


def _message(sent, expected, r):
    if r == 0:
        dist.send(sent, 1)
        return None
    dist.recv(expected, 0)
    return expected


def _exchange(r):
    out = torch.zeros(5 if r else 4)
    dist.all_to_all_single(out, ones(4), [3, 2] if r else [2, 2], [2, 2])
    return out


def _gathered(r):
    parts = [torch.zeros(2 + r) for _ in range(2)]
    dist.all_gather(parts, ones(2 + r))
    return parts[1 - r]


SITE = r"mistakes.py:\d+"
ROWS = {
    "SUM on one rank, MAX on the other": Row(
        lambda g, r: g.all_reduce(ones(3), "max" if r else "sum"),
        lambda r: _reduced(ones(3) * (1 + r), MAX if r else SUM),
        r"all_reduce #\d+ over world: ",
        rf"rank \d called all_reduce\((sum|max)\) at \S*{SITE}",
        rf"rank \d called all_reduce\((sum|max)\) at \S*{SITE}",
    ),
    "two same-shape all_reduces in swapped order": Row(
        _swapped_group,
        _swapped_stock,
        r"all_reduce #\d+ over world: the ranks make the same calls in another order: rank \d from ",
        rf"{SITE} then \S*{SITE}",
        rf"rank \d from \S*{SITE} then \S*{SITE}",
    ),
    "broadcast, each rank its own root": Row(
        lambda g, r: g.broadcast(ones(3), r),
        lambda r: _broadcast(ones(3), r),
        r"broadcast #\d+ over world: ",
        rf"rank 0 called broadcast\(root=0\) at \S*{SITE}, rank 1 called broadcast\(root=1\) at \S*{SITE}",
    ),
    "send 3 floats, receive 5": Row(
        lambda g, r: g.recv(ones(5), 0) if r else g.send(ones(3), 1),
        lambda r: _message(ones(3), torch.zeros(5), r),
        rf"rank 0 sent float32 \(3,\) at \S*{SITE}, rank 1 receives float32 \(5,\) at \S*{SITE}",
    ),
    "send float32, receive int32": Row(
        lambda g, r: g.recv(ones(3).int(), 0) if r else g.send(ones(3), 1),
        lambda r: _message(ones(3), torch.zeros(3, dtype=torch.int32), r),
        rf"rank 0 sent float32 \(3,\) at \S*{SITE}, rank 1 receives int32 \(3,\) at \S*{SITE}",
    ),
    "all_to_all splits disagree": Row(
        lambda g, r: g.all_to_all(ones(4), [2, 2], [3, 2] if r else [2, 2]),
        _exchange,
        r"all_to_all\S* #\d+ over world: rank 0 sends 2 rows to rank 1",
        rf"at \S*{SITE}\), which expects 3 \(output_splits=\[3, 2\] at \S*{SITE}\)",
    ),
    "float32 and int32 in one all_reduce": Row(
        lambda g, r: g.all_reduce(ones(3).int() if r else ones(3)),
        lambda r: _reduced(ones(3).int() if r else ones(3)),
        r"all_reduce #\d+ over world: ",
        r"rank \d called all_reduce\(sum, shape=\(3,\), (int32|float32)\)",
        SITE,
        r"rank \d called all_reduce\(sum, shape=\(3,\), (int32|float32)\)",
        SITE,
    ),
    "(2, 3) and (3, 2) in one all_reduce": Row(
        lambda g, r: g.all_reduce(ones((3, 2) if r else (2, 3))),
        lambda r: _reduced(ones((3, 2) if r else (2, 3))),
        rf"rank 0 called all_reduce\(sum, shape=\(2, 3\), float32\) at \S*{SITE}",
        rf"rank 1 called all_reduce\(sum, shape=\(3, 2\), float32\) at \S*{SITE}",
    ),
    "4 and 6 elements in one all_reduce": Row(
        lambda g, r: g.all_reduce(ones(4 + 2 * r)),
        lambda r: _reduced(ones(4 + 2 * r)),
        rf"rank 0 called all_reduce\(sum, shape=\(4,\), float32\) at \S*{SITE}",
        rf"rank 1 called all_reduce\(sum, shape=\(6,\), float32\) at \S*{SITE}",
    ),
    "2 and 3 elements in one all_gather": Row(
        lambda g, r: g.all_gather(ones(2 + r)),
        _gathered,
        rf"rank 0 called all_gather\(shape=\(2,\), float32\) at \S*{SITE}",
        rf"rank 1 called all_gather\(shape=\(3,\), float32\) at \S*{SITE}",
    ),
    "barrier on one rank, all_reduce on the other": Row(
        lambda g, r: g.all_reduce(ones(2)) if r else g.barrier(),
        lambda r: _reduced(ones(2)) if r else dist.barrier(),
        rf"rank 0 called barrier at \S*{SITE}",
        r"rank 1 called all_reduce\(sum",
    ),
    "all_reduce on one rank, broadcast on the other": Row(
        lambda g, r: g.broadcast(ones(2)) if r else g.all_reduce(ones(2)),
        lambda r: _broadcast(ones(2), 0) if r else _reduced(ones(2)),
        rf"rank 0 called all_reduce\(sum\) at \S*{SITE}",
        rf"rank 1 called broadcast\(root=0\) at \S*{SITE}",
    ),
}
STRIDED = {
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_reduce": lambda x: dist.all_reduce(x),
    "scatter": lambda x: dist.scatter(x, [ones(4, 2), ones(4, 2)] if dist.get_rank() == 0 else None, 0),
}


NOBODY = "barrier that one rank does not make"


def strided(name, rank):
    """A call on every second column of a matrix, in words: its values are those of a contiguous tensor, and the columns
    between keep theirs.
    """
    dense = torch.arange(8.0).view(4, 2) + 10 * rank
    whole = torch.full((4, 4), -7.0 - rank)
    x = whole[:, ::2].copy_(dense)
    STRIDED[name](x)
    STRIDED[name](dense)
    if not (whole[:, 1::2] == -7.0 - rank).all():
        return "neighbours overwritten"
    defined = name != "reduce" or rank == 0
    return "right" if torch.equal(x, dense) or not defined else "wrong values"


# -- the table ---------------------------------------------------------------------------------------------------------

MODES = {"off": {}, "DETAIL": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "checked": {}}
PATIENCE_S = 3.0


def _rank(mode, name, rank, folder):
    """One rank of a row: writes what it met."""
    torch.set_num_threads(1)
    os.environ.update(MODES[mode], GLOO_SOCKET_IFNAME="lo")
    if mode == "DETAIL":
        dist.set_debug_level_from_env()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    if mode == "checked":
        crosscut.checked()
    dist.barrier()
    began, made, error = time.monotonic(), None, ""
    try:
        if name in STRIDED:
            made = strided(name, rank)
        elif name == NOBODY:
            time.sleep((PATIENCE_S + 1) * rank)
            if rank == 0:
                dist.barrier()
        else:
            made = ROWS[name].stock(rank)
            if mode == "checked" and "send" in name:
                dist.barrier()  # a send that is over learns of a wrong receive here
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    made = made.tolist() if isinstance(made, torch.Tensor) else made
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({"made": made, "error": error, "seconds": time.monotonic() - began}, file)
    os._exit(0)


def meet(mode, name):
    """Both ranks' ends: a dict each, {} for one that died."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(mode, name, rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(4 * PATIENCE_S)
            process.kill()
        ends = [{}, {}]
        for rank in range(2):
            with contextlib.suppress(OSError, ValueError), open(f"{folder}/{rank}.json") as file:
                ends[rank] = json.load(file)
        return ends


def _words(ends):
    """What happened, for the table."""
    if not all(ends):
        return "a process aborts"
    errors = [end["error"] for end in ends]
    if not any(errors):
        values = "; ".join(f"rank {r}: {end['made']}" for r, end in enumerate(ends) if end["made"] is not None)
        return f"silent ({values})"
    found = next(error for error in errors if error)
    if "Stuck" in found:
        return f"**StuckError that names {re.search('for (rank .)', found)[1]}, at the time-out**"
    if "Mismatch" in found or "ValueError" in found:
        return f"**{found.split(':')[0]} on both ranks**" if all(errors) else f"{found.split(':')[0]} on one rank"
    if "Detected mismatch" in found or "mismatch" in found:
        return "named error"
    if "imed out" in found or "imeout" in found:
        return "time-out, no diagnosis"
    return "connection error, no diagnosis"


def table(names):
    """The rows of docs/checked.md."""
    yield f"Measured with torch {torch.__version__.split('+')[0]}, Gloo, 2 ranks."
    yield ""
    yield "| mistake | torch | torch, TORCH_DISTRIBUTED_DEBUG=DETAIL | crosscut.checked() |"
    yield "|---|---|---|---|"
    for name in names or [*ROWS, NOBODY, *STRIDED]:
        shown = f"{name} of a strided view" if name in STRIDED else name
        yield f"| {shown} | " + " | ".join(_words(meet(mode, name)) for mode in MODES) + " |"


if __name__ == "__main__":
    for line in table(sys.argv[1:]):
        print(line)
        sys.stdout.flush()
