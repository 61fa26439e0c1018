"""The threads world: deadlocks and mismatches named at once, one stream of random numbers a rank, clean stops."""

import random
import re
import threading
import time
import warnings

import numpy
import pytest
import torch

from crosscut.comm import CommError, DeadlockError, MismatchError, RankError, StuckError, spawn


def threads(fn, *args, world_size=2, timeout_s=30.0):
    return spawn(fn, *args, world_size=world_size, backend="threads", timeout_s=timeout_s)


def fails(kind, fn, *patterns, world_size=2, within_s=1.0, **options):
    """`fn` fails with `kind`, soon, in one line that holds every pattern in order."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        threads(fn, world_size=world_size, **options)
    assert time.monotonic() - began < within_s
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(".*".join(patterns), text), text
    return caught.value


# -- deadlocks -------------------------------------------------------------------------------------------------------


def test_a_rank_that_skips_a_collective():
    def body(ctx):
        if ctx.rank != 1:
            ctx.world.all_reduce(torch.ones(2), tag="grads")

    fails(
        DeadlockError,
        body,
        r"rank 0 waits in all_reduce\(sum\) #1 over world, tag \"grads\", at .*test_lockstep.py:\d+",
        "rank 1 has returned",
        "rank 2 waits in",
        world_size=3,
    )


def test_both_ranks_receive_first():
    def body(ctx):
        ctx.world.recv(torch.empty(2), 1 - ctx.rank, tag="ring")

    fails(DeadlockError, body, "rank 0 waits in recv over world with group rank 1", "rank 1 waits in recv")


def test_groups_in_another_order():
    def body(ctx):
        groups = [ctx.new_group((0, 1), "a"), ctx.new_group((0, 1), "b")]
        for group in groups if ctx.rank == 0 else reversed(groups):
            group.all_reduce(torch.ones(2))

    fails((DeadlockError, MismatchError), body, "over a", "over b")


def test_uneven_numbers_of_batches():
    def body(ctx):
        for step in range(3 if ctx.rank == 0 else 2):
            ctx.world.all_reduce(torch.ones(2), tag=f"step {step}")

    fails(DeadlockError, body, 'rank 0 waits in all_reduce.*"step 2"', "rank 1 has returned")


def test_a_deadlock_in_one_group_does_not_stop_the_others():
    """Ranks 2 and 3 still finish their work: the error comes when nobody can go on."""
    done = []

    def body(ctx):
        low, high = ctx.new_group((0, 1), "low"), ctx.new_group((2, 3), "high")
        if ctx.rank == 0:
            low.barrier()
        if ctx.rank >= 2:
            for _ in range(5):
                high.barrier()
            done.append(ctx.rank)

    fails(DeadlockError, body, "rank 0 waits in barrier #1 over low", "rank 3 has returned", world_size=4)
    assert sorted(done) == [2, 3]


# -- mismatches: every row of what torch does not notice -------------------------------------------------------------

ROWS = {
    "reduce op": (lambda g, r: g.all_reduce(torch.ones(3), "max" if r else "sum"), r"rank 1 called all_reduce\(max\)"),
    "swapped order": (
        lambda g, r: [g.all_reduce(torch.ones(3), op) for op in (("sum", "max") if r else ("max", "sum"))],
        "all_reduce #1",
    ),
    "root": (lambda g, r: g.broadcast(torch.ones(3), r), "root=1.*root=0|root=0.*root=1"),
    "dtype": (lambda g, r: g.all_reduce(torch.ones(3).to(torch.int32 if r else torch.float32)), "int32"),
    "shape": (lambda g, r: g.all_reduce(torch.ones((2, 3) if r else (3, 2))), r"\(2, 3\).*\(3, 2\)|\(3, 2\).*\(2, 3\)"),
    "numel": (lambda g, r: g.all_reduce(torch.ones(4 + 2 * r)), r"\(6,\)"),
    "all_gather shape": (lambda g, r: g.all_gather(torch.ones(2 + r)), r"\(3,\)"),
    "all_gather dim": (lambda g, r: g.all_gather(torch.ones(2, 2), r), "dim=1"),
    "another op": (lambda g, r: g.all_reduce(torch.ones(2)) if r else g.broadcast(torch.ones(2)), "broadcast"),
    "barrier against all_reduce": (lambda g, r: g.all_reduce(torch.ones(2)) if r else g.barrier(), "barrier"),
    "splits": (
        lambda g, r: g.all_to_all(torch.ones(4), [2, 2], [2, 2] if not r else [3, 2]),
        r"rank 0 sends 2 rows to rank 1.*expects 3",
    ),
    "send 3, receive 5": (
        lambda g, r: g.recv(torch.ones(5), 0) if r else g.send(torch.ones(3), 1),
        r"rank 0 sent float32 \(3,\).*rank 1 receives float32 \(5,\)",
    ),
    "send float32, receive int32": (
        lambda g, r: g.recv(torch.ones(3).int(), 0) if r else g.send(torch.ones(3), 1),
        "sent float32.*receives int32",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_mismatched_calls_are_named(row):
    call, pattern = ROWS[row]
    fails((MismatchError, RankError), lambda ctx: call(ctx.world, ctx.rank), f"({pattern})", "test_lockstep.py:")


def test_the_odd_rank_is_named_first():
    def body(ctx):
        ctx.world.all_reduce(torch.ones(2))
        ctx.world.all_reduce(torch.ones(2), "max" if ctx.rank == 1 else "sum")

    fails(
        MismatchError,
        body,
        r"^all_reduce #2 over world: rank 1 called all_reduce\(max\) at \S*test_lockstep.py:\d+, ranks 0,2,3 called "
        r"all_reduce\(sum\) at \S*test_lockstep.py:\d+$",
        world_size=4,
    )


def test_every_rank_gets_the_mismatch():
    def body(ctx):
        with pytest.raises(MismatchError):
            ctx.world.broadcast(torch.ones(2), ctx.rank)
        return ctx.world.all_reduce(torch.ones(1)).item()  # and the world goes on

    assert threads(body) == [2.0, 2.0]


def test_a_message_nobody_receives():
    def body(ctx):
        if ctx.rank == 0:
            ctx.world.send(torch.ones(2), 1, tag="act 3")

    fails(CommError, body, "never received", 'send over world with group rank 1, tag "act 3"')


# -- errors ----------------------------------------------------------------------------------------------------------


def test_the_first_real_error_is_raised_with_its_rank():
    def body(ctx):
        ctx.barrier()
        if ctx.rank == 2:
            raise ValueError("loss is nan at step 3")
        ctx.barrier()

    error = fails(
        RankError, body, r"rank 2 of 4 raised ValueError: loss is nan at step 3; stopped ranks 0,1,3", world_size=4
    )
    assert isinstance(error, ValueError)
    assert error.rank == 2
    assert isinstance(error.__cause__, ValueError)
    assert sorted(error.folded) == [0, 1, 3]
    assert "test_lockstep.py" in error.traceback_text


def test_an_error_that_is_not_a_value_error_is_not_one():
    def body(ctx):
        if ctx.rank == 0:
            raise KeyError("layers")
        ctx.barrier()

    assert not isinstance(fails(RankError, body, "rank 0 of 2 raised KeyError"), ValueError)


def test_an_exception_reaches_ranks_that_wait_for_another():
    """Rank 1 waits for rank 0, which waits for rank 2, which fails."""

    def body(ctx):
        if ctx.rank == 2:
            raise OSError("disk full")
        ctx.world.recv(torch.empty(1), (ctx.rank + 2) % 3)

    fails(RankError, body, "rank 2 of 3 raised OSError: disk full; stopped ranks 0,1", world_size=3)


def test_sys_exit_in_a_rank_is_an_error():
    def body(ctx):
        if ctx.rank == 1:
            raise SystemExit(3)
        ctx.barrier()

    fails(RankError, body, "rank 1 of 2 raised SystemExit: 3")


def test_a_rank_stuck_outside_a_collective_is_shown_with_its_stack():
    def dawdle():
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.01)

    def body(ctx):
        if ctx.rank == 1:
            dawdle()
        ctx.barrier()

    fails(StuckError, body, "rank 1 of 2", "0.3 s", "in dawdle", "timeout_s", timeout_s=0.3, within_s=5)
    time.sleep(0.2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crosscut-rank")]


def test_slow_work_within_the_time_out_is_not_an_error():
    def body(ctx):
        if ctx.rank == 0:
            time.sleep(0.5)
        ctx.barrier()
        time.sleep(0.4)
        ctx.barrier()

    threads(body, timeout_s=0.8)


def test_ctrl_c_stops_all_ranks(no_gc):
    import _thread

    def body(ctx):
        if ctx.rank == 1:
            _thread.interrupt_main()
            while True:
                time.sleep(0.01)
        ctx.barrier()

    with pytest.raises(KeyboardInterrupt):
        threads(body)
    time.sleep(0.2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crosscut-rank")]


def test_no_thread_is_left_behind():
    before = threading.active_count()
    threads(lambda ctx: ctx.barrier(), world_size=4)
    with pytest.raises(RankError):
        threads(lambda ctx: 1 / 0, world_size=4)
    assert threading.active_count() == before


# -- state: random numbers, modes, modules ---------------------------------------------------------------------------


def draw(ctx, steps=6):
    """Interleaved draws: without a state a rank, what a rank gets depends on the others."""
    out = []
    for _ in range(steps):
        out.append((torch.rand(2).tolist(), random.random(), float(numpy.random.rand()), float(numpy.random.randn())))
        ctx.barrier()
    return out


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_its_own_stream(world_size):
    def body(ctx):
        first = draw(ctx)
        seed_all(100 + ctx.rank)
        return first, draw(ctx)

    seed_all(5)
    alone = spawn(draw, world_size=1, backend="threads")[0]
    seed_all(5)
    results = threads(body, world_size=world_size)
    for rank, (first, second) in enumerate(results):
        assert first == alone  # as in processes that were seeded alike
        seed_all(100 + rank)
        assert second == spawn(draw, world_size=1, backend="threads")[0]


def test_odd_draws_of_normals_do_not_leak():
    """numpy keeps the second of a pair of normals: ranks that draw odd numbers of them must not share it."""

    def body(ctx):
        numpy.random.seed(3)
        out = []
        for _ in range(3):
            out.extend(numpy.random.randn(1 + 2 * ctx.rank).tolist())
            ctx.barrier()
        return out

    for rank, found in enumerate(threads(body)):
        numpy.random.seed(3)
        assert found == numpy.random.randn(len(found)).tolist(), rank


def test_the_launchers_stream_goes_on_as_if_nothing_had_run():
    seed_all(9)
    expected = (torch.rand(1).item(), random.random(), numpy.random.rand())
    seed_all(9)
    threads(draw)
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


def test_recomputed_dropout_draws_the_same_mask():
    """Checkpointing saves and restores the random state: other ranks run between the two."""

    def body(ctx):
        torch.manual_seed(ctx.rank)
        x = torch.ones(64, requires_grad=True)

        def block(x):
            dropped = torch.nn.functional.dropout(x, 0.5)
            ctx.barrier()
            return dropped * 2

        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        forward = y.detach().clone()
        torch.rand(7)
        y.sum().backward()
        return torch.equal(x.grad, forward)

    assert threads(body, world_size=3) == [True] * 3


def modes(ctx):
    ctx.barrier()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.empty(1).device.type,
    )


def test_rank_threads_run_in_the_launchers_modes():
    plain = threads(modes)[0]
    assert plain[:3] == (True, False, False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert threads(modes)[1][:4] == (False, False, True, torch.float16)
    with torch.inference_mode():
        assert threads(modes)[1][:2] == (False, True)
    torch.set_default_dtype(torch.float64)
    try:
        assert threads(modes)[1][4] == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert threads(modes)[1][5] == "meta"


def test_collectives_under_inference_mode_and_between_modes():
    def body(ctx):
        with torch.inference_mode(ctx.rank == 1):
            x = torch.ones(3) + ctx.rank
            ctx.world.all_reduce(x)
            return ctx.world.all_gather(x).tolist()

    assert threads(body) == [[3.0] * 6] * 2


class SumGrad(torch.autograd.Function):
    """identity / all_reduce."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.group.all_reduce(grad.clone()), None


def test_collectives_in_backward_run_in_the_ranks_own_turn():
    def body(ctx):
        x = torch.full((3,), float(ctx.rank + 1), requires_grad=True)
        y = SumGrad.apply(x, ctx.world)
        (y * y).sum().backward()
        return x.grad.tolist()

    assert threads(body, world_size=3) == [[12.0] * 3] * 3


def test_parameters_that_require_grad_can_be_reduced_in_place():
    def body(ctx):
        p = torch.nn.Parameter(torch.ones(2) * ctx.rank)
        ctx.world.broadcast(p, 1)
        ctx.world.all_reduce(p, async_op=True).wait()
        return p.tolist(), p.requires_grad, p.grad_fn

    assert threads(body) == [([2.0, 2.0], True, None)] * 2


def test_a_module_shared_by_two_ranks_is_refused():
    shared = torch.nn.Linear(2, 2)

    def body(ctx, deep):
        import copy

        ctx.claim_module(copy.deepcopy(shared) if deep else shared)
        ctx.barrier()

    threads(body, True)
    with pytest.raises(ValueError, match=r"rank 1 uses Linear.*in use by rank 0.*copy.deepcopy"):
        threads(body, False)
    threads(lambda ctx: ctx.claim_module(torch.nn.Linear(2, 2)))  # another world may use what it likes


def test_another_module_over_the_same_parameters_is_refused():
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def body(ctx):
        module = torch.nn.Linear(2, 2)
        module.weight = torch.nn.Parameter(weight.detach())  # another Parameter, the same memory
        ctx.claim_module(module)
        ctx.barrier()

    with pytest.raises(ValueError, match="parameter 'weight'"):
        threads(body)


def test_a_claim_ends_with_its_module():
    def body(ctx):
        for _ in range(20):  # memory is used again by the other rank
            module = torch.nn.Linear(32, 32)
            ctx.claim_module(module)
            del module
            ctx.barrier()

    threads(body, world_size=3)


def test_a_world_inside_a_rank():
    """A rank may run a small world of its own, for a reference."""

    def inner(ctx, outer):
        return ctx.world.all_reduce(torch.tensor(float(ctx.rank + outer))).item()

    def body(ctx):
        values = spawn(inner, ctx.rank, world_size=2, backend="threads")
        ctx.barrier()
        return values

    assert threads(body) == [[1.0, 1.0], [3.0, 3.0]]


def test_a_run_is_deterministic():
    order = []

    def body(ctx):
        for step in range(3):
            order.append((ctx.rank, step))
            ctx.barrier()

    threads(body, world_size=4)
    first, order[:] = list(order), []
    threads(body, world_size=4)
    assert order == first
    assert first[:4] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_long_runs_keep_no_history():
    """Slots of finished collectives are given back."""
    worlds = []

    def body(ctx):
        worlds.append(ctx._transport.world)
        for _ in range(300):
            ctx.world.all_reduce(torch.ones(2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads(body, world_size=3)
    assert all(not group.slots for group in worlds[0].groups.values())
