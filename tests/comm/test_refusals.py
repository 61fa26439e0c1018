"""What a rank can get wrong alone is a ValueError before any data moves, and the next call works."""

import re

import pytest
import torch

from crosscut.comm import spawn


def refuse(ctx):
    """Every wrong call, on one rank or all: then a right one. Returns the messages."""
    g, said = ctx.world, []

    def wrong(call, *parts):
        with pytest.raises(ValueError, match=" over world") as caught:
            call()
        text = str(caught.value)
        assert "\n" not in text
        for part in parts:
            assert part in text, (part, text)
        said.append(text)

    x = torch.arange(5.0) + ctx.rank
    flags = torch.ones(2, dtype=torch.bool)
    before = ctx.ledger.copy()
    if ctx.rank == 0:  # one rank alone: a refused call must not use up its place in the order of calls
        wrong(lambda: g.all_reduce(x, "mean"), "all_reduce over world", "op='mean'", "sum, min, max, prod, avg")
        wrong(lambda: g.all_reduce(torch.ones(2, dtype=torch.int32), "avg"), "int32", "op='sum'")
        wrong(lambda: g.reduce(flags), "bool", "op='max'", "int64")
        wrong(lambda: g.all_reduce(flags, "avg"), "bool")
        wrong(lambda: g.all_reduce(torch.ones(2, dtype=torch.complex64), "max"), "complex64")
        wrong(lambda: g.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "float8_e4m3fn", "float32")
        wrong(lambda: g.reduce_scatter(x), "dim 0", "(5,)", "2 ranks", "pad it to 6")
        wrong(lambda: g.reduce_scatter(torch.tensor(1.0)), "0-d", "view(1)")
        wrong(lambda: g.reduce_scatter(x, dim=1), "dim=1", "(5,)")
        wrong(lambda: g.all_gather(x, dim=-2), "dim=-2")
        wrong(lambda: g.broadcast(x, 2), "src=2", "0,1", "0 to 1")
        wrong(lambda: g.gather(x, -1), "dst=-1")
        wrong(lambda: g.reduce(x, True), "dst=True")
        wrong(lambda: g.send(x, 0), "this rank itself")
        wrong(lambda: g.recv(x, 7), "src=7")
        wrong(lambda: g.scatter(None, out=x), "parts=None", "2 tensors")
        wrong(lambda: g.scatter([x], out=x), "1 parts for 2 ranks")
        wrong(lambda: g.scatter([x, x[:2]], out=x), "part 1", "(2,)", "(5,)")
        wrong(lambda: g.scatter([x, x.int()], out=x), "part 1", "int32")
        wrong(lambda: g.scatter([x, x], 1, out=x), "not src", "None")
        wrong(lambda: g.all_reduce([1.0]), "list", "torch.tensor")
        wrong(lambda: g.all_reduce(torch.ones(2, device="meta")), "meta", "cpu")
        wrong(lambda: g.all_reduce(torch.eye(2).to_sparse()), "to_dense")
        wrong(lambda: g.all_reduce(x, kind="steps"), "kind='steps'", "control")
        # None, empty, zeros and wrong sums are four different things.
        wrong(lambda: g.all_to_all(x), "5 rows", "2 ranks")
        wrong(lambda: g.all_to_all(x, [], []), "[]", "0 numbers for 2 ranks")
        wrong(lambda: g.all_to_all(x, [0, 0], [0, 0]), "add up to 0", "5 rows")
        wrong(lambda: g.all_to_all(x, [2, 2], [2, 2]), "add up to 4")
        wrong(lambda: g.all_to_all(x, [2, 3], None), "output_splits=None")
        wrong(lambda: g.all_to_all(x, [6, -1], [6, 0]), "whole numbers")
        wrong(lambda: g.all_to_all(x, [2, 3], [1, 3]), "rank 0 sends itself 2 rows but expects 1")
        wrong(lambda: g.all_to_all(torch.tensor(1.0), [1, 0], [1, 0]), "0-d")
    assert ctx.ledger.counters == before.counters  # nothing was counted
    assert x.tolist() == [i + ctx.rank for i in range(5)]
    assert g.all_reduce(x).tolist() == [2 * i + 1.0 for i in range(5)]
    ins = [2, 3]
    outs = [2, 2] if ctx.rank == 0 else [3, 3]
    assert g.all_to_all(torch.arange(5), ins, outs).tolist() == ([0, 1] * 2 if ctx.rank == 0 else [2, 3, 4] * 2)
    return said


def test_wrong_calls_are_refused_before_data_moves(run):
    said = run(refuse, world_size=2)[0]
    assert len(said) == 32


def alone(ctx):
    """A group of one rank: identity, new tensors where new ones are promised, nothing counted; the same refusals."""
    g = ctx.world
    x = torch.arange(4.0)
    assert g.all_reduce(x) is x
    assert g.broadcast(x) is x
    assert g.all_reduce(x, "avg", async_op=True).wait() is x
    for new in (g.all_gather(x), g.reduce_scatter(x), g.all_to_all(x), g.gather(x)[0]):
        assert torch.equal(new, x)
        assert new.data_ptr() != x.data_ptr()
    assert g.all_gather(torch.tensor(3.0)).tolist() == [3.0]
    out = torch.zeros(4)
    assert g.scatter([x], out=out) is out
    assert torch.equal(out, x)
    g.barrier()
    assert not ctx.ledger.counters
    for call in (lambda: g.broadcast(x, 1), lambda: g.all_reduce(x.int(), "avg"), lambda: g.send(x, 0)):
        with pytest.raises(ValueError, match="over world"):
            call()


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_world_of_one_rank(backend):
    spawn(alone, world_size=1, backend=backend)


def test_sums_of_bool_say_what_to_do_instead():
    def body(ctx):
        flags = torch.tensor([ctx.rank == 0, False])
        with pytest.raises(ValueError, match=re.escape("op='max' for or")):
            ctx.world.all_reduce(flags)
        return ctx.world.all_reduce(flags, "max").tolist()

    assert spawn(body, world_size=2, backend="threads") == [[True, False]] * 2
