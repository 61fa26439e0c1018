"""The collectives written over send and receive: right by definition, the same bits on all ranks, any size, dtype."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.comm import spawn
from crosscut.comm.algorithms import ALGORITHMS, run
from crosscut.comm.algorithms.fold import core_ranks, power
from crosscut.comm.algorithms.hierarchical import host_lists

from . import data

SIZES = range(1, 10)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
BOUND = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest partial result
PAIRS = [(op, name) for op, names in ALGORITHMS.items() for name in names]


def threads(fn, *args, world_size):
    return spawn(fn, *args, world_size=world_size, backend="threads", timeout_s=60)


def rough(rank, shape, dtype, seed):
    """Numbers of many magnitudes and both signs, so that the order of a sum shows; small integers."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * 4.0 ** torch.randint(-3, 4, shape, generator=generator)).to(dtype)


def laid_out(x, layout):
    """The same values: contiguous, every other one of a longer row, or transposed in memory."""
    if layout == "strided":
        return data.strided(x)
    return x.mT.contiguous().mT if layout == "transposed" and x.dim() >= 2 else x.clone()


def bits(x):
    return x.contiguous().view(-1).view(torch.uint8).tolist()


def near(found, expected, scale, dtype):
    """Exact for integers; for floats within a bound of `scale`, the same reduction of absolute values."""
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    if not dtype.is_floating_point:
        assert torch.equal(found, expected)
    else:
        error = (found.double() - expected.double()).abs()
        assert bool((error <= BOUND[dtype] * scale).all()), (found, expected)


def expected_of(op, xs):
    """The reduction by definition, in fp64 (integers: exact), and the scale of its rounding errors."""
    dtype = xs[0].dtype
    wide = [x.double() if dtype.is_floating_point else x for x in xs]
    stack = torch.stack(wide)
    by_op = {
        "sum": lambda s: s.sum(0),
        "avg": lambda s: s.sum(0) / len(xs),
        "prod": lambda s: s.prod(0),
        "min": lambda s: s.amin(0),
        "max": lambda s: s.amax(0),
    }
    scale = by_op["sum" if op in ("min", "max") else op](stack.abs())
    return by_op[op](stack), scale


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
worlds = st.integers(1, 9)
layouts = st.sampled_from(["contiguous", "strided", "transposed"])
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 99)
examples = functools.partial(settings, deadline=None, derandomize=True)


def reduction(draw, dtype):
    return draw.draw(st.sampled_from(["sum", "min", "max", "prod", *(["avg"] if dtype.is_floating_point else [])]))


def all_reduces(ctx, xs, layout, op, hosts):
    out = {}
    for name in ALGORITHMS["all_reduce"]:
        x = laid_out(xs[ctx.rank], layout)
        around = x.storage_offset(), x.stride()
        options = {"hosts": hosts} if name == "hierarchical" else {}
        assert run("all_reduce", name, ctx.world, x, op, **options) is x
        assert (x.storage_offset(), x.stride()) == around
        out[name] = x.contiguous()
    return out


@examples(max_examples=70)
@given(st.data(), worlds, shapes, dtypes, layouts, seeds)
def test_all_reduce(draw, n, shape, dtype, layout, seed):
    op = reduction(draw, dtype)
    hosts = draw.draw(st.none() | st.integers(1, n))
    xs = [rough(rank, shape, dtype, seed) for rank in range(n)]
    ranks = threads(all_reduces, xs, layout, op, hosts, world_size=n)
    expected, scale = expected_of(op, xs)
    for name in ALGORITHMS["all_reduce"]:
        near(ranks[0][name], expected, scale, dtype)
        for found in ranks:
            assert bits(found[name]) == bits(ranks[0][name]), name


def moves(ctx, xs, layout, dim):
    return [
        run("all_gather", name, ctx.world, laid_out(xs[ctx.rank], layout), dim) for name in ALGORITHMS["all_gather"]
    ]


@examples(max_examples=40)
@given(st.data(), worlds, shapes, dtypes, layouts, seeds)
def test_all_gather(draw, n, shape, dtype, layout, seed):
    dim = draw.draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    xs = [rough(rank, shape, dtype, seed) for rank in range(n)]
    expected = torch.cat([x if shape else x.view(1) for x in xs], dim)
    for found in threads(moves, xs, layout, dim, world_size=n):
        for x in found:
            data.same(x, expected)


def reduce_scatters(ctx, xs, layout, dim, op):
    x = laid_out(xs[ctx.rank], layout)
    out = [run("reduce_scatter", name, ctx.world, x, dim, op) for name in ALGORITHMS["reduce_scatter"]]
    assert torch.equal(x, xs[ctx.rank])  # the input is kept
    return out


@examples(max_examples=40)
@given(st.data(), worlds, shapes.filter(bool), dtypes, layouts, seeds)
def test_reduce_scatter(draw, n, shape, dtype, layout, seed):
    op = reduction(draw, dtype)
    dim = draw.draw(st.integers(0, len(shape) - 1))
    shape = (*shape[:dim], shape[dim] % 4 * n, *shape[dim + 1 :])
    xs = [rough(rank, shape, dtype, seed) for rank in range(n)]
    whole, scale = expected_of(op, xs)
    pieces = list(zip(whole.chunk(n, dim), scale.chunk(n, dim), strict=True)) if shape[dim] else [(whole, scale)] * n
    for found, (expected, error) in zip(
        threads(reduce_scatters, xs, layout, dim, op, world_size=n), pieces, strict=True
    ):
        for x in found:
            near(x, expected, error, dtype)


def all_to_alls(ctx, xs, layout, splits):
    x = laid_out(xs[ctx.rank], layout)
    if splits is None:
        return [run("all_to_all", name, ctx.world, x) for name in ALGORITHMS["all_to_all"]]
    outs = [row[ctx.rank] for row in splits]
    return [run("all_to_all", "pairwise", ctx.world, x, input_splits=splits[ctx.rank], output_splits=outs)]


@examples(max_examples=40)
@given(st.data(), worlds, shapes, dtypes, layouts, seeds)
def test_all_to_all(draw, n, shape, dtype, layout, seed):
    equal = draw.draw(st.booleans())
    rows = st.integers(0, 3)
    if equal:
        each = draw.draw(rows)
        splits = [[each] * n] * n
    else:
        splits = [[draw.draw(rows) for _ in range(n)] for _ in range(n)]
    xs = [rough(rank, (sum(splits[rank]), *shape[1:]), dtype, seed) for rank in range(n)]
    pieces = [x.split(row) for x, row in zip(xs, splits, strict=True)]
    for rank, found in enumerate(threads(all_to_alls, xs, layout, None if equal else splits, world_size=n)):
        for x in found:
            data.same(x, torch.cat([pieces[src][rank] for src in range(n)]))


def rooted(ctx, xs, layout, op, root):
    """broadcast, reduce, gather, scatter of `root`."""
    own = xs[ctx.rank]
    b, r, out = laid_out(own, layout), laid_out(own, layout), laid_out(torch.zeros_like(own), layout)
    assert run("broadcast", "binomial", ctx.world, b, root) is b
    assert run("reduce", "binomial", ctx.world, r, root, op) is r
    g = run("gather", "binomial", ctx.world, laid_out(own, layout), root)
    parts = [laid_out(x, layout) for x in xs] if ctx.rank == root else None
    assert run("scatter", "binomial", ctx.world, parts, root, out=out) is out
    return b, r, g, out


@examples(max_examples=50)
@given(st.data(), worlds, shapes, dtypes, layouts, seeds)
def test_one_to_all_and_all_to_one(draw, n, shape, dtype, layout, seed):
    op, root = reduction(draw, dtype), draw.draw(st.integers(0, n - 1))
    xs = [rough(rank, shape, dtype, seed) for rank in range(n)]
    reduced, scale = expected_of(op, xs)
    for rank, (b, r, g, s) in enumerate(threads(rooted, xs, layout, op, root, world_size=n)):
        data.same(b, xs[root])
        data.same(s, xs[rank])
        if rank == root:
            near(r, reduced, scale, dtype)
            assert len(g) == n
            for found, x in zip(g, xs, strict=True):
                data.same(found, x)
        else:
            data.same(r, xs[rank])
            assert g is None


# -- what chance might not draw ---------------------------------------------------------------------------------------


def every_op(ctx, numel, dtype, make):
    out = {}
    for op in data.ops_for(dtype):
        for name in ALGORITHMS["all_reduce"]:
            source = data.small if op == "prod" else getattr(data, make)
            out[op, name] = run("all_reduce", name, ctx.world, source(ctx.rank, (numel,), dtype), op)
    return out


@pytest.mark.parametrize("dtype", data.ALL, ids=str)
def test_every_dtype_and_reduction_exactly(dtype):
    """Numbers whose reductions are exact in any order (or of two ranks only), against the definition."""
    n = 3 if dtype in (torch.float16, torch.bfloat16) else 5
    make = "small" if dtype in (torch.float16, torch.bfloat16) else "make"
    source = getattr(data, make)
    for found in threads(every_op, 7, dtype, make, world_size=n):
        for (op, _), x in found.items():
            xs = [(data.small if op == "prod" else source)(rank, (7,), dtype) for rank in range(n)]
            data.same(x, data.reduce(op, xs))


@pytest.mark.parametrize("n", SIZES)
def test_every_world_size_with_fewer_numbers_than_ranks_and_none(n):
    def body(ctx):
        for op, name in PAIRS:
            for each in (0, 1):
                if op in ("all_reduce", "broadcast", "reduce"):
                    for numel in (0, 1, n - 1, n + 1):
                        x = data.make(ctx.rank, (numel,), torch.int64)
                        run(op, name, ctx.world, x)
                        total = data.reduce("sum", [data.make(r, (numel,), torch.int64) for r in range(n)])
                        wanted = data.make(0, (numel,), torch.int64) if op == "broadcast" else total
                        if op != "reduce" or ctx.rank == 0:
                            data.same(x, wanted)
                elif op == "scatter":
                    parts = [torch.full((each,), r) for r in range(n)] if ctx.rank == 0 else None
                    data.same(
                        run(op, name, ctx.world, parts, out=torch.zeros(each).long()), torch.full((each,), ctx.rank)
                    )
                else:
                    rows = each if op in ("all_gather", "gather") else each * n
                    found = run(op, name, ctx.world, torch.arange(rows) + 100 * ctx.rank)
                    if op == "gather":
                        assert (found is None) == (ctx.rank > 0)
                    else:
                        assert found.numel() == (each * n if op in ("all_gather", "all_to_all") else each)

    threads(body, world_size=n)


def test_sixteen_bit_floats_add_up_in_fp32():
    """256 + 1 is 256 in bf16: a sum in bf16 on the way would lose every 1."""

    def body(ctx):
        for name in ALGORITHMS["all_reduce"]:
            x = torch.full((5,), 256.0 if ctx.rank == 0 else 1.0, dtype=torch.bfloat16)
            assert run("all_reduce", name, ctx.world, x).tolist() == [264.0] * 5
        x = torch.full((9,), 256.0 if ctx.rank == 0 else 1.0, dtype=torch.bfloat16)
        for name in ALGORITHMS["reduce_scatter"]:
            assert run("reduce_scatter", name, ctx.world, x).tolist() == [264.0]
        if ctx.rank == 0:
            assert run("reduce", "binomial", ctx.world, x).tolist() == [264.0] * 9
        else:
            run("reduce", "binomial", ctx.world, x)

    threads(body, world_size=9)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 9])
def test_zeros_of_both_signs_and_nans_have_the_same_bits_everywhere(n):
    def body(ctx):
        out = []
        for op in ("min", "max", "sum", "prod"):
            for name in ALGORITHMS["all_reduce"]:
                zeros = torch.tensor([-0.0, 0.0] * 5).roll(ctx.rank)
                payloads = torch.tensor([0x7FC00001 + ctx.rank] * 3, dtype=torch.int32).view(torch.float32)
                out.append(bits(run("all_reduce", name, ctx.world, torch.cat([zeros, payloads]), op)))
        return out

    ranks = threads(body, world_size=n)
    assert len({str(found) for found in ranks}) == 1


def test_what_one_rank_computes_is_not_what_another_order_gives():
    """The same data in another order of ranks gives other bits: were the order not fixed, equality would be luck."""
    xs = [rough(rank, (200,), torch.float32, 3) for rank in range(8)]
    first = threads(all_reduces, xs, "contiguous", "sum", None, world_size=8)[0]
    other = threads(all_reduces, [xs[r] for r in (0, 6, 2, 3, 4, 5, 1, 7)], "contiguous", "sum", None, world_size=8)[0]
    assert all(bits(first[name]) != bits(other[name]) for name in first)


# -- hierarchical: which ranks are on which host ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts", [1, 2, 3, 7, [[0, 1, 2, 3, 4, 5, 6]], [[6, 2], [0, 1, 3], [5, 4]], [[3], [0, 1, 2, 4, 5, 6]]]
)
@pytest.mark.parametrize("numel", [0, 1, 2, 11])
def test_hosts_of_any_sizes_and_orders(hosts, numel):
    def body(ctx):
        x = run("all_reduce", "hierarchical", ctx.world, data.make(ctx.rank, (numel,), torch.int64), hosts=hosts)
        data.same(x, data.reduce("sum", [data.make(r, (numel,), torch.int64) for r in range(7)]))

    threads(body, world_size=7)


def test_host_lists():
    assert host_lists(None, 5) == [[0, 1, 2], [3, 4]]
    assert host_lists(None, 1) == [[0]]
    assert host_lists(3, 9) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert host_lists([[1], [2, 0]], 3) == [[1], [2, 0]]


@pytest.mark.parametrize("hosts", [0, 4, -1, [[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0, 1], [2, 3]]])
def test_wrong_hosts_are_refused(hosts):
    with pytest.raises(ValueError, match=r"hosts=.*(use 1 to 3|each of the ranks 0 to 2 once)"):
        host_lists(hosts, 3)


@pytest.mark.parametrize("n", range(1, 18))
def test_core_of_a_number_of_ranks(n):
    p, r = power(n)
    assert p + r == n
    assert r < p
    assert p & (p - 1) == 0
    core = core_ranks(n)
    assert len(core) == p
    assert core == sorted(core)
    assert set(range(n)) - set(core) == {2 * i + 1 for i in range(r)}


# -- names, arguments, other back ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "name", "message"),
    [
        ("allreduce", "ring", "unknown operation 'allreduce'; did you mean 'all_reduce'?"),
        ("all_reduce", "rign", "unknown algorithm 'rign' of all_reduce; did you mean 'ring'?"),
        ("all_gather", "xyz", "unknown algorithm 'xyz' of all_gather; known: ring, recursive_doubling, bruck"),
        (
            "all_reduce",
            "bruck",
            r"bruck is no algorithm of all_reduce \(but of all_gather, all_to_all\); all_reduce: ring, ",
        ),
    ],
)
def test_unknown_names(op, name, message):
    with pytest.raises(ValueError, match=message):
        run(op, name, None)


def test_what_the_group_refuses_is_refused():
    def body(ctx):
        g, x = ctx.world, torch.ones(7)
        refused = [
            (lambda: run("all_reduce", "ring", g, x, "mean"), "op='mean' is unknown"),
            (lambda: run("all_reduce", "rabenseifner", g, x.long(), "avg"), "would round"),
            (lambda: run("all_reduce", "ring", g, x, kind="steps"), "kind='steps' is unknown"),
            (lambda: run("reduce_scatter", "pairwise", g, x), "3 ranks do not divide; pad it to 9"),
            (lambda: run("all_to_all", "bruck", g, x), "3 ranks do not divide"),
            (lambda: run("all_to_all", "bruck", g, x, [1, 2, 4], [1, 2, 4]), "equal pieces.*use pairwise"),
            (lambda: run("broadcast", "binomial", g, x, 3), "src=3 is outside"),
            (lambda: run("scatter", "binomial", g, None if ctx.rank else [x], out=x), "1 parts for 3 ranks"),
            (lambda: run("all_gather", "bruck", g, x, 1), "dim=1 is outside"),
            (lambda: run("all_reduce", "ring", g, [1.0]), "expected a tensor"),
        ]
        for call, message in refused:
            if ctx.rank == 0 or "parts" not in message:
                with pytest.raises(ValueError, match=message):
                    call()

    threads(body, world_size=3)


def test_gradients_stay_out_and_tags_are_counted():
    def body(ctx):
        leaf = torch.full((4,), float(ctx.rank + 1), requires_grad=True)
        gathered = run("all_gather", "bruck", ctx.world, leaf)
        assert not gathered.requires_grad
        with torch.no_grad():
            run("all_reduce", "ring", ctx.world, leaf, tag="norms", kind="control")
        assert leaf.is_leaf
        assert leaf.tolist() == [3.0] * 4
        run("all_reduce", "ring", ctx.world, torch.ones(4))
        assert set(ctx.ledger.by_tag("control")) == {"norms"}
        assert set(ctx.ledger.by_tag("step")) == {"all_gather/bruck", "all_reduce/ring"}

    threads(body, world_size=2)


def every_algorithm(ctx, numel):
    """Messages so large that a send of Gloo waits for its receiver. All 4 ranks, and a group of 3 of them."""
    from crosscut.comm.algorithms.trace import call

    for group in (ctx.world, ctx.new_group((0, 2, 3), "three")):
        for op, name in PAIRS if group.rank >= 0 else []:
            x = torch.arange(numel * group.size, dtype=torch.float32) % 1000 + ctx.rank
            found = call(ALGORITHMS[op][name], op, group, x.clone())
            theirs = call(getattr(type(group), op), op, group, x.clone())
            assert type(found) is type(theirs)
            if isinstance(theirs, list):
                found, theirs = torch.stack(found), torch.stack(theirs)
            assert theirs is None or torch.equal(found, theirs), (op, name)
    return True


def test_on_both_back_ends_as_the_back_ends_own(run):
    assert all(run(every_algorithm, 30_000, world_size=4))
