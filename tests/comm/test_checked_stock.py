"""`crosscut.checked()`: stock programs give the same values, and their mistakes are errors on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from shm import stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

import crosscut
from comm import mistakes
from comm.test_checked import SOON_S, caught, in_order
from crosscut.comm.intercept import InterceptedGroup, Started, intercept


@pytest.fixture(params=["gloo", "shm"])
def on(request, pool):
    """`on(fn, *args, world_size=n)` on warm processes, whose groups are torch's own."""

    def run(fn, *args, world_size=2, **options):
        return pool.run(fn, *args, world_size=world_size, backend=request.param, check=False, timeout_s=60, **options)

    run.backend = request.param
    return run


# -- mistakes ----------------------------------------------------------------------------------------------------------


def mistaken(ctx, name):
    with crosscut.checked():
        dist.barrier()

        def body():
            mistakes.ROWS[name].stock(ctx.rank)
            if "send" in name:
                dist.barrier()

        found = caught(body)
        if "send" not in name:
            x = torch.ones(1)
            dist.all_reduce(x)  # only that call has failed
            assert x.item() == 2
        return found


@pytest.mark.parametrize("name", mistakes.ROWS)
def test_a_mistake_is_named_on_every_rank(on, name):
    for kind, text, seconds in on(mistaken, name):
        assert kind == "MismatchError", text
        assert "\n" not in text
        assert in_order(mistakes.ROWS[name].said, text), text
        assert seconds < SOON_S


def with_strides(ctx, name):
    with crosscut.checked():
        kept = []
        found = caught(lambda: kept.append(mistakes.strided(name, ctx.rank)))
        dist.barrier()
        return found, kept


@pytest.mark.parametrize("name", mistakes.STRIDED)
def test_a_strided_view_is_an_error_where_its_neighbours_would_be_overwritten(on, name):
    for (kind, text, _), kept in on(with_strides, name):
        if on.backend == "gloo":
            assert kind == "ValueError"
            assert in_order([name, "at .*mistakes.py", r"\(4, 2\)", "x.contiguous"], text)
        else:
            assert (kind, kept) == ("nothing", ["right"])


def in_a_new_group(ctx):
    with crosscut.checked():
        group = dist.new_group([2, 0], group_desc="pair")
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        found = []
        if ctx.rank != 1:
            found.append(caught(lambda: dist.all_reduce(torch.ones(2 + ctx.rank), group=group)))
        found.append(caught(lambda: dist.all_reduce(torch.ones(2 + ctx.rank % 2), group=mesh.get_group())))
        y = torch.ones(3, dtype=torch.int32 if ctx.rank == 2 else torch.float32)
        found.append(caught(lambda: functional.all_reduce(y, "sum", mesh).sum().item()))
        return found


def test_groups_made_afterwards_are_checked_too(on):
    found = on(in_a_new_group, world_size=3)
    assert in_order(["all_reduce #1 over pair", r"rank 0 .*\(2,\)", r"rank 2 .*\(4,\)"], found[0][0][1])
    assert found[2][0][1] == found[0][0][1]
    for each in found:
        for kind, text, _ in each:
            assert kind == "MismatchError"
            assert "test_checked_stock.py" in text
        assert in_order([r"rank 1 .*\(3,\)", r"ranks 0,2 .*\(2,\)"], each[-2][1])
        assert in_order(["rank 2 .*int32", "ranks 0,1 .*float32"], each[-1][1])


def stays_away(ctx):
    with crosscut.checked(timeout_s=0.5):
        dist.all_reduce(torch.ones(1))
        if ctx.rank == 1:
            import time

            time.sleep(1.5)
            return caught(dist.barrier)
        return caught(dist.barrier)


def test_who_stays_away_is_named_at_the_time_out(on):
    found = on(stays_away)
    assert found[0][0] == "StuckError"
    assert in_order(["barrier #2 over world: rank 0 called it at", "rank 1.* has called last all_reduce"], found[0][1])
    assert found[1][0] == "StuckError"


# -- right programs ----------------------------------------------------------------------------------------------------


def twice(ctx, name, args):
    """The program as it is, and checked: do they give the same, and how many calls were compared?"""
    program = getattr(stock, name)
    plain = program(ctx, *args)
    with crosscut.checked() as check:
        found = program(ctx, *args)
        calls = check.num_calls
    assert type(dist.group.WORLD) is not InterceptedGroup
    assert found.keys() == plain.keys()
    return [key for key, value in plain.items() if not torch.equal(found[key], value)], calls


PROGRAMS = [
    ("ddp", ("plain",), 2),
    ("ddp", ("unused",), 2),
    ("ddp", ("static",), 2),
    ("ddp", ("no_sync",), 2),
    ("ddp_compressed", (), 2),
    ("fsdp", ((2,),), 2),
    ("tensor_parallel", (), 2),
    ("dtensors", (), 2),
    ("pipeline", ("1f1b",), 2),
    ("pipeline", ("gpipe",), 2),
    ("meshes", (), 4),
    ("sparse", (), 2),
]


@pytest.mark.parametrize("name, args, world_size", PROGRAMS)
def test_stock_programs_give_the_same_values(on, name, args, world_size):
    for different, calls in on(twice, name, args, world_size=world_size):
        assert different == []
        assert calls >= 2


def everything(ctx):
    """Every kind of call, asynchronous too, and in both orders of messages."""
    other = 1 - ctx.rank
    mine = torch.arange(4.0) + 10 * ctx.rank
    sums = torch.arange(4.0) * 2 + 10
    with crosscut.checked():
        x = mine.clone()
        work = dist.all_reduce(x, async_op=True)
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": ctx.rank, "data": "x" * ctx.rank * 100})
        assert [one["rank"] for one in objects] == [0, 1]
        work.wait()
        work.wait()
        assert work.is_completed()
        assert torch.equal(x, sums)
        xs = [mine.clone(), mine.clone() * 2]
        with _coalescing_manager():
            for one in xs:
                dist.all_reduce(one)
        assert torch.equal(xs[1], 2 * sums)
        out = torch.zeros(4)
        ops = [dist.P2POp(dist.irecv, out, other), dist.P2POp(dist.isend, mine, other)]
        for one in dist.batch_isend_irecv(ops):
            one.wait()
        assert torch.equal(out, torch.arange(4.0) + 10 * other)
        out.zero_()
        if ctx.rank == 0:
            dist.send(mine, 1, tag=7)
            dist.send(mine * 3, 1, tag=8)
        else:
            second = torch.zeros(4)
            later = dist.irecv(second, 0, tag=8)  # tags choose, not the order
            assert dist.recv(out, tag=7) == 0
            later.wait()
            assert torch.equal(out, torch.arange(4.0))
            assert torch.equal(second, out * 3)
        gathered = functional.all_gather_tensor(mine, 0, dist.group.WORLD)
        pieces = functional.reduce_scatter_tensor(mine.clone(), "sum", 0, dist.group.WORLD)
        assert torch.equal(gathered[4 * other : 4 * other + 4], torch.arange(4.0) + 10 * other)
        assert torch.equal(pieces, sums[2 * ctx.rank : 2 * ctx.rank + 2])
        future = dist.all_reduce(x, async_op=True).get_future()
        assert torch.equal(future.wait()[0], 2 * sums)
        rows = [torch.zeros(4), torch.zeros(4)] if ctx.rank == 1 else None
        dist.gather(mine, rows, 1)
        dist.scatter(out, [mine, mine + 1] if ctx.rank == 0 else None, 0)
        assert out[0] == ctx.rank
        with pytest.raises(ValueError, match="checked already"):
            crosscut.checked()
    dist.all_reduce(x)
    return dist.get_backend()


def test_every_kind_of_call(on):
    assert on(everything) == [on.backend] * 2


def left_open(ctx):
    crosscut.checked()
    dist.all_reduce(torch.ones(2))


def test_a_world_that_is_destroyed_takes_its_checking_along(on):
    on(left_open)
    on(left_open)  # in the same processes
    assert on(everything) == [on.backend] * 2


def before_init():
    with pytest.raises(ValueError, match="init_process_group first"):
        crosscut.checked()


def test_without_a_process_group():
    before_init()


# -- interception in general -------------------------------------------------------------------------------------------


class Log:
    def __init__(self):
        self.said = []

    def on_call(self, group, asked):
        self.said.append(("call", group.label, asked.call.op, asked.call.site.split(":")[0].split("/")[-1]))
        return Started(asked.start())

    def on_done(self, group, call, error):
        self.said.append(("done", group.label, call.op, error))

    def on_close(self, group):
        self.said.append(("close", group.label))


def logged(ctx):
    log = Log()
    with intercept(log):
        dist.all_reduce(torch.ones(2))
        work = dist.broadcast(torch.ones(2), 0, async_op=True)
        group = dist.new_group([0, 1], group_desc="pair")
        dist.barrier(group)
        work.wait()
        with crosscut.checked():  # one observer around another
            found = caught(lambda: dist.all_reduce(torch.ones(2 + ctx.rank)))
            dist.all_reduce(torch.ones(2))
        dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(2))
    return log.said, found


def test_an_observer_sees_calls_and_their_ends(on):
    here = "test_checked_stock.py"
    for said, found in on(logged):
        assert found[0] == "MismatchError"
        assert said == [
            ("call", "world", "all_reduce", here),
            ("done", "world", "all_reduce", None),
            ("call", "world", "broadcast", here),
            ("call", "pair", "barrier", here),
            ("done", "pair", "barrier", None),
            ("done", "world", "broadcast", None),
            ("call", "world", "all_reduce", here),
            ("done", "world", "all_reduce", None),
            ("close", "pair"),
            ("close", "world"),
        ]


# -- the table in the docs ---------------------------------------------------------------------------------------------


def test_the_docs_hold_every_mistake():
    text = (Path(__file__).resolve().parents[2] / "docs" / "checked.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and line.count(" | ") == 3]
    shown = {row[0].removeprefix("| "): row[3] for row in rows}
    for name in (*mistakes.ROWS, mistakes.NOBODY, *(f"{name} of a strided view" for name in mistakes.STRIDED)):
        kind = "ValueError" if "strided" in name else "StuckError" if name == mistakes.NOBODY else "MismatchError"
        assert kind in shown[name], name


def test_the_table_is_measured():
    """One row, as the helper measures it."""
    name = "SUM on one rank, MAX on the other"
    paths = os.pathsep.join([str(Path(mistakes.__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, mistakes.__file__, name]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=100, check=True
    )
    _, plain, detail, checked = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert plain == detail == "silent (rank 0: [3.0, 3.0, 2.0]; rank 1: [3.0, 3.0, 2.0])"
    assert checked == "**MismatchError on both ranks**"
