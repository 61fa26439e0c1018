"""Pieces of cut tensors: what a rank holds, who writes it, and copying from one cut to another."""

from itertools import pairwise, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.layout.mesh import Mesh
from crosscut.layout.plan import ParamPlan
from crosscut.train import slices


def param(shape, axis_cuts, parts=None, mesh=None, store=(), stages=(0,)):
    parts = parts or tuple(((0, n),) for n in shape)
    return ParamPlan("w", (), shape, shape, axis_cuts, parts, stages, (), store_optimizer=store)


def take(whole, ranges):
    for dim, held in enumerate(ranges):
        whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in held], dim)
    return whole


def recut(pieces, wanted, shape):
    """Copy `wanted` together from saved (ranges, tensor) pieces; unfilled numbers stay -1."""
    out = torch.full(slices.local_shape(wanted), -1)
    for saved, tensor in pieces:
        for source, target in slices.overlaps(saved, wanted):
            assert (out[target] == -1).all()  # no number comes from two pieces
            out[target] = tensor[source]
    return out


FUSED = ((0, 24), (24, 36), (36, 48))  # q, k and v in one tensor


def test_a_fused_dim_cut_by_two_is_read_back_cut_by_three():
    whole = torch.arange(48 * 5).view(48, 5)
    plan = param((48, 5), (("tp",), ()), (FUSED, ((0, 5),)))
    for before, after in product((1, 2, 3, 4, 6), repeat=2):
        if 12 % before or 12 % after:
            continue
        pieces = [(r := plan.ranges({"tp": i}, {"tp": before}), take(whole, r)) for i in range(before)]
        if before > 1:
            assert any(len(ranges[0]) == 3 for ranges, _ in pieces)
        for i in range(after):
            wanted = plan.ranges({"tp": i}, {"tp": after})
            assert torch.equal(recut(pieces, wanted, whole.shape), take(whole, wanted))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_partition_is_read_back_under_any_other(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def partition():
        """Each dim cut at drawn points; the pieces are all combinations."""
        dims = []
        for n in shape:
            points = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))})
            dims.append([((a, b),) for a, b in pairwise(points)])
        return list(product(*dims))

    pieces = [(ranges, take(whole, ranges)) for ranges in partition()]
    for wanted in partition():
        assert torch.equal(recut(pieces, wanted, shape), take(whole, wanted))


def test_each_number_is_written_by_one_rank():
    for spec in ("dp=2,tp=2", "pp=2,dp=3", "pp=2,dp=2,tp=3", "rep=2,dp=2,cp=2,tp=2", "tp=4"):
        mesh = Mesh.of(spec)
        stages = (0, mesh.size("pp") - 1) if mesh.size("pp") > 1 else (0,)
        for axis_cuts in ((("tp",), ()), ((), ("tp",)), (("dp", "tp"), ()), ((), ())):
            for store in ((), ("dp",), ("dp", "cp")):
                plan = param((24, 12), axis_cuts, store=() if "dp" in axis_cuts[0] else store, stages=stages)
                for cutting in (plan.cut_axes, (*plan.cut_axes, *plan.store_optimizer)):
                    stored = len(cutting) > len(plan.cut_axes)
                    seen = torch.zeros(24, 12, dtype=torch.int)
                    for rank in range(mesh.world_size):
                        coords = mesh.coords(rank)
                        if slices.writes(plan, cutting, coords, mesh.sizes):
                            ranges = (
                                plan.stored_ranges(coords, mesh.sizes) if stored else plan.ranges(coords, mesh.sizes)
                            )
                            for box in product(*ranges):
                                seen[tuple(slice(a, b) for a, b in box)] += 1
                    assert (seen == 1).all(), (spec, axis_cuts, store)


def test_a_store_keeps_torch_chunks_of_dim_0():
    for rows in (1, 2, 5, 7, 12):
        plan = param((rows * 2, 3), (("tp",), ()), store=("dp",))
        whole = torch.arange(rows * 2 * 3).view(-1, 3)
        for tp in range(2):
            local = take(whole, plan.ranges({"tp": tp, "dp": 0}, {"tp": 2, "dp": 4}))
            chunks = list(local.chunk(4))
            chunks += [local[:0]] * (4 - len(chunks))
            for dp, chunk in enumerate(chunks):
                ranges = plan.stored_ranges({"tp": tp, "dp": dp}, {"tp": 2, "dp": 4})
                held = take(whole, ranges) if ranges[0] else whole[:0]
                assert torch.equal(held, chunk)


def test_a_number_without_dims_is_whole_everywhere():
    plan = param((), ())
    assert plan.ranges({}, {}) == ()
    assert list(slices.overlaps((), ())) == [((), ())]
    assert slices.box_size(()) == 1
    assert slices.local_shape(()) == ()
