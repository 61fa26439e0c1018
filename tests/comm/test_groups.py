"""Groups of a mesh and others: ranks count within the group, everybody makes the same groups, order is the group's."""

import pytest
import torch

from crosscut.comm import MismatchError, RankError, spawn
from crosscut.layout.mesh import Mesh


def threads(fn, *args, world_size=4):
    return spawn(fn, *args, world_size=world_size, backend="threads", timeout_s=30)


MESHES = ["dp=2,tp=2", "pp=2,tp=2", "tp=4", "pp=4", "dp=4", "pp=2,dp=2", "cp=2,tp=2"]


def mesh_sums(ctx, text, axis_sets):
    mesh = Mesh.of(text)
    ctx.set_mesh(mesh, [axes for axes in axis_sets if len(axes) > 1])
    out = {}
    for axes in axis_sets:
        group = ctx.group(axes)
        assert group.ranks == tuple(mesh.group_ranks(axes, ctx.rank))
        assert group.ranks[group.rank] == ctx.rank
        assert group.label == mesh.label(axes)
        x = torch.tensor([2.0**ctx.rank])
        out[axes] = (group.all_reduce(x).item(), group.all_gather(torch.tensor([ctx.rank])).tolist())
    assert ctx.coords == dict(mesh.coords(ctx.rank))
    return out


@pytest.mark.parametrize("text", MESHES)
def test_every_group_of_a_mesh_sums_over_its_own_ranks(run, text):
    axis_sets = [("pp",), ("dp",), ("cp",), ("tp",), ("dp", "tp"), ("pp", "dp", "cp", "tp")]
    results = run(mesh_sums, text, axis_sets, world_size=4)
    mesh = Mesh.of(text)
    for rank, found in enumerate(results):
        for axes, (total, ranks) in found.items():
            members = list(mesh.group_ranks(axes, rank))
            assert ranks == members
            assert total == sum(2.0**r for r in members)


def test_ways_to_name_a_group():
    def body(ctx):
        ctx.set_mesh(Mesh.of("dp=2,tp=2"), [("tp", "dp")])
        both = ctx.group("dp+tp")
        assert ctx.group(("dp", "tp")) is both
        assert ctx.group(("tp", "dp")) is both  # a set, in mesh order
        assert ctx.group(("pp", "dp", "tp")) is both  # axes of size 1 are dropped
        assert ctx.group("pp+dp") is ctx.group("dp")
        for nothing in ((), "", "pp", ("pp", "cp")):
            group = ctx.group(nothing)
            assert group.size == 1
            assert group.ranks == (ctx.rank,)
            assert group.all_reduce(torch.ones(1)).item() == 1
        with pytest.raises(ValueError, match="'ddp' is unknown; use one of pp, rep, dp, cp, tp"):
            ctx.group("ddp")
        with pytest.raises(ValueError, match="channel 1"):
            ctx.group("dp", channel=1)

    threads(body)


def test_what_must_be_there_first():
    def body(ctx):
        with pytest.raises(ValueError, match="set_mesh"):
            ctx.group("tp")
        with pytest.raises(ValueError, match="set_mesh"):
            _ = ctx.coords
        with pytest.raises(ValueError, match="dp=2,tp=4 has 8 ranks, the world has 4"):
            ctx.set_mesh(Mesh.of("dp=2,tp=4"))
        ctx.set_mesh(Mesh.of("pp=2,dp=2"))
        ctx.set_mesh(Mesh.of("dp=2,cp=1,tp=2"))  # another model's mesh
        ctx.set_mesh(Mesh.of("pp=2,dp=2"))
        with pytest.raises(ValueError, match="name it in set_mesh"):
            ctx.group("tp+dp+pp", channel=1)

    threads(body)


def test_two_channels_over_pp_are_apart():
    """Activations and gradients cross between the same two ranks; each channel keeps its own order."""

    def body(ctx):
        ctx.set_mesh(Mesh.of("pp=2"))
        forward, backward = ctx.group("pp"), ctx.group("pp", channel=1)
        if ctx.rank == 0:
            backward.send(torch.ones(2), 1)
            forward.send(torch.zeros(3), 1)
            return None
        a, b = torch.empty(3), torch.empty(2)
        forward.recv(a, 0)
        backward.recv(b, 0)
        return a.tolist(), b.tolist()

    assert threads(body, world_size=2)[1] == ([0.0] * 3, [1.0] * 2)


def local_roots(ctx):
    """Every call that takes a rank, in groups without global rank 0: ranks count within the group."""
    ctx.set_mesh(Mesh.of("dp=2,tp=2"))
    out = {}
    for name in ("dp", "tp"):
        g = ctx.group(name)
        mine, other = torch.tensor([float(ctx.rank)]), 1 - g.rank
        out[name] = (
            g.broadcast(mine.clone(), 0).item(),
            g.broadcast(mine.clone(), 1).item(),
            g.reduce(mine.clone(), 1).item(),
            g.gather(mine, 1),
            g.scatter([mine, mine + 10] if g.rank == 1 else None, 1, out=torch.zeros(1)).item(),
        )
        handle = g.send(mine, other, async_op=True)
        received = g.recv(torch.zeros(1), other).item()
        handle.wait()
        out[name] += (received,)
    return out


def test_roots_and_peers_count_within_the_group(run):
    for rank, found in enumerate(run(local_roots, world_size=4)):
        for name, members in {"dp": (rank % 2, rank % 2 + 2), "tp": (rank // 2 * 2, rank // 2 * 2 + 1)}.items():
            index = members.index(rank)
            first, second, reduced, gathered, scattered, received = found[name]
            assert (first, second) == members
            assert reduced == (sum(members) if index == 1 else rank)
            assert gathered == (None if index == 0 else [torch.tensor([float(m)]) for m in members])
            assert scattered == members[1] + 10 * index
            assert received == members[1 - index]


def overlapping(ctx):
    a, b = ctx.new_group((0, 1), "a"), ctx.new_group((1, 2), "b")
    table = {a: "a", b: "b"}  # distinct also where this rank is in neither
    assert len(table) == 2
    said = []
    for group in (a, b):
        if ctx.rank in group.ranks:
            said.append(group.all_reduce(torch.tensor(ctx.rank + 1)).item())
        else:
            with pytest.raises(ValueError, match="not a member") as caught:
                group.all_reduce(torch.tensor(1))
            said.append(str(caught.value))
    return said


def test_a_group_one_is_not_in_says_so(run):
    results = run(overlapping, world_size=4)
    assert results[1] == [3, 5]
    assert results[3][0] == (
        "all_reduce over a: rank 3 is not a member of this group (ranks 0,1); call it on the members only"
    )
    assert "ranks 1,2" in results[3][1]


@pytest.mark.parametrize("ranks", [(3, 1), (1, 1), (), (0, 4), (-1, 2)])
def test_ranks_of_a_new_group(ranks):
    def body(ctx):
        with pytest.raises(ValueError, match="new_group 'odd'"):
            ctx.new_group(ranks, "odd")

    threads(body)


def asks_otherwise(ctx):
    ctx.new_group((0, ctx.rank), "mine") if ctx.rank else ctx.new_group((0, 1), "mine")


def test_ranks_that_ask_for_different_groups(run):
    with pytest.raises((MismatchError, RankError), match=r"new_group: ranks? 2.* asked for other groups than rank 0"):
        run(asks_otherwise, world_size=3)


def many_groups(ctx, fail):
    groups = [ctx.new_group((0, 1) if i % 2 else (1, 2), f"g{i}") for i in range(20)]
    for group in groups:
        if ctx.rank in group.ranks:
            group.all_reduce(torch.ones(2))
    if fail and ctx.rank == 1:
        raise ArithmeticError("after 20 groups")
    ctx.barrier()


def test_many_groups_go_without_a_word(run, capfd):
    run(many_groups, False, world_size=3)
    with pytest.raises(RankError, match="rank 1 of 3 raised ArithmeticError: after 20 groups"):
        run(many_groups, True, world_size=3)
    run(many_groups, False, world_size=3)
    assert "arning" not in capfd.readouterr().err


def test_decide_is_true_if_any_rank_says_so(run):
    assert run(decisions, world_size=3) == [(False, True, True)] * 3


def decisions(ctx):
    return ctx.decide(False), ctx.decide(ctx.rank == 2), ctx.decide(True)


def objects(ctx):
    assert ctx.all_gather_object(None) == [None] * ctx.world_size
    return ctx.all_gather_object({"rank": ctx.rank, "data": "x" * (ctx.rank * 1000)})


def test_objects_of_different_sizes(run):
    for found in run(objects, world_size=3):
        assert found == [{"rank": r, "data": "x" * (r * 1000)} for r in range(3)]


def test_print_is_in_rank_order(capsys):
    def body(ctx):
        ctx.print("rank", ctx.rank, sep="=")
        ctx.print() if ctx.rank == 1 else ctx.print("b", end=";")

    threads(body, world_size=3)
    assert capsys.readouterr().out == "rank=0\nrank=1\nrank=2\nb;b;"
