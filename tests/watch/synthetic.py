"""Ranks that exist on paper: each has a program of calls; `run` lets them go on as blocking calls would, and gives what
their recorders would hold.
"""

from dataclasses import dataclass

from crosscut.comm.call import Call
from crosscut.watch.facts import Facts
from crosscut.watch.reading import Lane, Record, Ring
from crosscut.watch.ring import FINISHED, RUNNING

STEP_NS = 1_000_000
START_S = 1_700_000_000.0


@dataclass(frozen=True)
class Op:
    """One call. `seconds`: what the rank computes before it."""

    op: str
    lane: Lane
    site: str
    shape: tuple = (4,)
    dtype: str = "float32"
    reduce_op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: str = ""
    splits: tuple | None = None
    step: int = 0
    ms: float = 1.0
    takes_ms: float = 0.1


def reduce(lane, site, shape=(4,), op="sum", **rest):
    return Op("all_reduce", lane, site, shape, reduce_op=op, **rest)


def send(lane, peer, site, **rest):
    return Op("send", lane, site, peer=peer, **rest)


def recv(lane, peer, site, **rest):
    return Op("recv", lane, site, peer=peer, **rest)


def steps(program, number, first=0):
    """A training loop: the program again and again."""
    from dataclasses import replace

    return [replace(op, step=step) for step in range(first, first + number) for op in program]


def run(programs, *, capacity=4096, world_size=None, buffered_sends=False, ended=True):
    """`programs`: rank -> its calls. Returns rank -> Facts; who is through has ended, unless `ended` is False."""
    pc = dict.fromkeys(programs, 0)
    clock = dict.fromkeys(programs, 0.0)
    records = {rank: [] for rank in programs}
    count, arrived = {}, {}
    entered = dict.fromkeys(programs, False)

    def key_of(rank, op):
        if op.peer is None:
            return ("c", op.lane, count[rank, op.lane])
        pair = (rank, op.lane.ranks[op.peer])
        return ("m", op.lane, *(pair if op.op == "send" else pair[::-1]), count[rank, op.lane, op.op, op.peer])

    progress = True
    while progress:
        progress = False
        for rank, program in programs.items():
            if pc[rank] == len(program) or entered[rank]:
                continue
            op = program[pc[rank]]
            counter = (rank, op.lane) if op.peer is None else (rank, op.lane, op.op, op.peer)
            count[counter] = count.get(counter, 0) + 1
            clock[rank] += op.ms
            call = Call(
                *(
                    op.op,
                    op.lane.label,
                    op.tag,
                    "step",
                    op.site,
                    count[counter],
                    op.shape,
                    op.dtype,
                    op.reduce_op,
                    op.root,
                ),
                *(None, *(op.splits or (None, None)), op.peer),
            )
            at = int(clock[rank] * STEP_NS) + 1
            record = Record(len(records[rank]) + 1, op.lane, call, 16, op.step, at, 0, 0, own_rank=rank)
            records[rank].append(record)
            arrived.setdefault(key_of(rank, op), {})[rank] = len(records[rank]) - 1
            entered[rank] = progress = True
        for rank, program in programs.items():
            if not entered[rank]:
                continue
            op = program[pc[rank]]
            here = arrived[key_of(rank, op)]
            needed = op.lane.ranks if op.peer is None else (rank, op.lane.ranks[op.peer])
            if set(needed) <= set(here) or (buffered_sends and op.op == "send"):
                last = max(records[r][i].entered for r, i in here.items()) / STEP_NS
                clock[rank] = max(clock[rank], last) + op.takes_ms
                records[rank][-1] = records[rank][-1]._replace(completed=int(clock[rank] * STEP_NS) + 1)
                entered[rank] = False
                pc[rank] += 1
                progress = True
    size = world_size or len(programs)
    out = {}
    for rank, program in programs.items():
        through = pc[rank] == len(program) and ended
        ring = Ring(
            *(None, rank, size),
            start_wall_ns=int(START_S * 1e9),
            entered=len(records[rank]),
            ended=FINISHED if through else RUNNING,
            records=records[rank][-capacity:],
            last_seq={lane: number for (r, lane, *rest), number in count.items() if r == rank and not rest},
        )
        out[rank] = Facts(rank, ring, alive=not through, exit_code=0 if through else None)
    return out
