"""Checked mode of groups: every mistake of the table is an error on every rank, soon; right programs run as before."""

import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm import mistakes, programs
from crosscut.comm import MismatchError, PeerError, RankError, spawn
from crosscut.comm.backends.matching import Order, check_message, check_same
from crosscut.comm.call import END, Call
from crosscut.comm.checked.checker import Checker
from crosscut.comm.checked.room import decode, encode
from crosscut.comm.checked.switch import why_checked

SOON_S = 5.0  # one second, five times that where tests compete for two cores


def caught(fn):
    """What a call raises: its type, its text, and after how long."""
    began = time.monotonic()
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def in_order(patterns, text):
    return re.search(".*".join(patterns), text) is not None


# -- the comparison alone ----------------------------------------------------------------------------------------------


def call(op="all_reduce", site="a.py:1", tag="", seq=7, shape=(3,), dtype="float32", reduce_op="sum", **rest):
    return Call(op, "tp", tag, "step", site, seq, shape, dtype, reduce_op, **rest)


def test_the_minority_is_named_first_and_every_site():
    calls = [call(site="b.py:12"), call(site="a.py:40", reduce_op="max"), call(site="b.py:12"), call(site="c.py:3")]
    with pytest.raises(MismatchError) as error:
        check_same(calls, [0, 1, 2, 3])
    assert str(error.value) == (
        "all_reduce #7 over tp: rank 1 called all_reduce(max) at a.py:40, ranks 0,2,3 called all_reduce(sum) at "
        "b.py:12 and c.py:3"
    )


DIFFERENT = {
    "op": call(op="reduce", root=0),
    "reduction": call(reduce_op="prod"),
    "shape": call(shape=(1, 3)),
    "dtype": call(dtype="int32"),
    "tag": call(tag="attn/forward"),
    "group": call()._replace(label="dp"),
    "root": call(root=1),
    "dim": call(dim=1),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_whatever_differs_is_an_error(what):
    check_same([call(), call(site="b.py:2"), call()], [4, 5, 6])
    with pytest.raises(MismatchError, match=r"rank 5 called .*ranks 4,6 called"):
        check_same([call(), DIFFERENT[what], call()], [4, 5, 6])


def test_tags_are_compared_and_shown():
    with pytest.raises(MismatchError, match=r'rank 0 called .*tag="a"\) at .*rank 1 called .*tag="b"\) at '):
        check_same([call(tag="a"), call(tag="b")], [0, 1])


def test_a_rank_that_has_returned_is_said_to_have():
    barrier = Call("barrier", "world", "", "control", "a.py:9", 3)
    with pytest.raises(MismatchError) as error:
        check_same([barrier, Call(END, "", "", "control", "", 0)], [0, 1])
    assert str(error.value) == (
        "barrier #3 over world: rank 0 called barrier at a.py:9, rank 1 has returned from its function"
    )


@pytest.mark.parametrize("field, value", [("shape", (5,)), ("dtype", "int32"), ("tag", "grad 3"), ("label", "pp")])
def test_messages_are_compared(field, value):
    sent, received = call("send", reduce_op=None, peer=1), call("recv", site="b.py:5", reduce_op=None, peer=0)
    check_message(sent, received, [2, 5], 0, 1)
    with pytest.raises(MismatchError, match=r"rank 2 sent .* at a.py:1, rank 5 receives .* at b.py:5"):
        check_message(sent, received._replace(**{field: value}), [2, 5], 0, 1)


def rows(*sites, **rest):
    """Calls of three ranks by their sites: `rows("ab", "ba", "ab")`."""
    return [[call(site=site, **rest) for site in column] for column in zip(*sites, strict=True)]


@pytest.mark.parametrize(
    "sites", [("ab", "ba", "ab"), ("xab", "xba", "xab"), ("abc", "cab", "abc"), ("acb", "bca", "xyz")]
)
def test_a_swap_is_found_when_it_is_complete(sites):
    order, columns = Order(), rows(*sites)
    for column in columns[:-1]:
        order.check(column, [0, 1, 2])
    with pytest.raises(MismatchError, match=r"the same calls in another order: .* from .* then "):
        order.check(columns[-1], [0, 1, 2])


@pytest.mark.parametrize("sites", [("aaaa", "bbbb", "aaaa"), ("abab", "cdcd", "abab"), ("aab", "bbc", "aab")])
def test_other_sites_alone_are_no_error(sites):
    order = Order()
    for column in rows(*sites):
        order.check(column, [0, 1, 2])


def test_swaps_far_apart_or_of_different_calls_or_tagged_are_not_looked_for():
    order, columns = Order(), rows("ab", "ba")
    order.check(columns[0], [0, 1])
    for _ in range(20):
        order.same()
    order.check(columns[1], [0, 1])
    order = Order()
    order.check(columns[0], [0, 1])
    order.check([one._replace(shape=(4,)) for one in columns[1]], [0, 1])
    order = Order()
    for column in rows("ab", "ba", tag="t"):
        order.check(column, [0, 1])


def test_a_call_survives_the_way_to_another_rank():
    one = Call("all_to_all", "dp", "moe", "step", "a.py:3", 5, (4, 2), "bfloat16", None, None, 1, (1, 3), (2, 2), None)
    assert decode(encode(one), 5) == one._replace(kind="")
    several = call(shape=((2, 3), (3_000_000_000,)))
    assert decode(encode(several), 7).key() == several.key()


def test_one_rule_says_whether_it_is_on(monkeypatch):
    for said, check, backend, on in [
        (None, None, "gloo", False),
        (None, None, "threads", True),
        (None, True, "shm", True),
        ("1", None, None, True),
        ("1", False, "shm", False),
        ("0", None, "threads", True),
        ("0", True, "nccl", True),
    ]:
        monkeypatch.delenv("CROSSCUT_CHECK", raising=False)
        if said is not None:
            monkeypatch.setenv("CROSSCUT_CHECK", said)
        assert bool(why_checked(check, backend)) == on, (said, check, backend)
    with pytest.raises(ValueError, match="check=False with backend='threads'"):
        why_checked(False, "threads")
    monkeypatch.setenv("CROSSCUT_CHECK", "yes")
    with pytest.raises(ValueError, match=r"CROSSCUT_CHECK='yes'.*neither 0 nor 1"):
        spawn(print, world_size=2, backend="gloo")


# -- every row of the table --------------------------------------------------------------------------------------------


def mistaken(ctx, name):
    ctx.barrier()

    def body():
        mistakes.ROWS[name].group(ctx.world, ctx.rank)
        if "send" in name:
            ctx.barrier()  # a send that is over learns it here at the latest

    found = caught(body)
    if "send" not in name:  # only this call fails: the group goes on
        total = ctx.world.all_reduce(torch.tensor([ctx.rank + 1]))
        assert total.item() == 3
    return found


@pytest.mark.parametrize("name", mistakes.ROWS)
def test_a_mistake_is_named_on_every_rank(run, name):
    for kind, text, seconds in run(mistaken, name, world_size=2):
        assert kind == "MismatchError"
        assert "\n" not in text
        assert in_order(mistakes.ROWS[name].said, text), text
        assert seconds < SOON_S


def odd_one_of_four(ctx):
    ctx.barrier()
    return caught(lambda: ctx.world.all_reduce(torch.ones(2), "max" if ctx.rank == 1 else "sum", tag="grads"))


def test_all_of_four_ranks_hear_the_same(run):
    found = run(odd_one_of_four, world_size=4)
    assert len({text for _, text, _ in found}) == 1
    assert re.search(r"rank 1 called all_reduce\(max\) at .*, ranks 0,2,3 called all_reduce\(sum\) at ", found[0][1])


def tagged(ctx):
    return caught(lambda: ctx.world.all_reduce(torch.ones(2), tag="b" if ctx.rank else "a"))


def test_different_tags(run):
    for kind, text, _ in run(tagged, world_size=2):
        assert kind == "MismatchError"
        assert in_order([r'rank 0 called .*tag="a"', r'rank 1 called .*tag="b"'], text)


def other_group(ctx):
    a, b = ctx.new_group((0, 1), "a"), ctx.new_group((0, 1), "b")
    return caught(lambda: (b if ctx.rank else a).all_reduce(torch.ones(2)))


def test_different_groups_of_the_same_ranks(run):
    for kind, text, _ in run(other_group, world_size=2):
        assert kind == "MismatchError"
        assert in_order(["rank 0 called .* over a", "rank 1 called .* over b"], text)


def asynchronous(ctx):
    handle = ctx.world.all_reduce(torch.ones(2 + ctx.rank), async_op=True)
    found = caught(handle.wait)
    return found, ctx.world.all_reduce(torch.ones(1)).item()


def test_a_mismatch_of_asynchronous_calls_is_raised_at_wait(run):
    for (kind, text, _), total in run(asynchronous, world_size=2):
        assert kind == "MismatchError"
        assert "(2,)" in text
        assert "(3,)" in text
        assert total == 2


# -- who does not come -------------------------------------------------------------------------------------------------


def returns_early(ctx):
    if ctx.rank != 1:
        ctx.barrier()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_returned_without_the_call_is_named_at_once(pool, backend):
    began = time.monotonic()
    with pytest.raises(
        RankError, match=r"barrier #1 over world: rank 1 has returned from its function, ranks 0,2"
    ) as e:
        pool.run(returns_early, world_size=3, backend=backend)
    assert isinstance(e.value.original, MismatchError)
    assert time.monotonic() - began < SOON_S + 10  # and the launch


def stays_away(ctx, patience_s):
    """Rank 1 sleeps after its call over dp, rank 3 waits in a group of its own with rank 1."""
    dp, other = ctx.new_group((1, 2), "dp"), ctx.new_group((1, 3), "other")
    for group in (ctx.world, dp, other):
        if group._backend is not None:
            group._backend._room.timeout_s = patience_s
    if ctx.rank in dp.ranks:
        dp.all_reduce(torch.ones(2), tag="grads")
    if ctx.rank == 1:
        time.sleep(2.5 * patience_s)
        return caught(ctx.barrier)
    return caught(lambda: (other if ctx.rank == 3 else ctx.world).barrier())


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_stays_away_is_named_at_the_time_out(pool, backend):
    found = pool.run(stays_away, 1.0, world_size=4, backend=backend)
    for rank in (0, 2, 3):
        kind, text, seconds = found[rank]
        assert kind == "StuckError", text
        assert 0.9 < seconds < 1.0 + SOON_S
        assert re.search(
            r"rank 1( \(pid \d+\))? has called last all_reduce\(sum\) #1 over dp, tag \"grads\", at ", text
        )
    assert re.search(
        r"^barrier #\d+ over world: ranks 0,2 called it at \S*test_checked.py:\d+ and waited 1 s", found[0][1]
    )
    assert re.search(r"rank 3( \(pid \d+\))? waits in barrier #\d+ over other, at", found[0][1])
    assert found[1][0] == "StuckError"  # it learns it when it comes
    assert "ranks 0,2 called it at" in found[1][1]


def nobody_receives(ctx, patience_s):
    ctx.world._backend._room.timeout_s = patience_s
    if ctx.rank == 0:
        return caught(lambda: ctx.world.recv(torch.ones(2), 1, tag="act"))
    time.sleep(2 * patience_s)
    return None


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_message_that_never_comes_is_named(pool, backend):
    kind, text, _ = pool.run(nobody_receives, 0.7, world_size=2, backend=backend)[0]
    assert kind == "StuckError"
    assert re.search(r'^recv over world with group rank 1, tag "act", at .*waited 0.7 s for rank 1', text)


def dies(ctx):
    import os

    ctx.barrier()
    if ctx.rank == 1:
        os._exit(3)
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"barrier #2 over world.*: rank 1 \(pid \d+\) has ended"):
        ctx.barrier()
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_peer_that_ended_is_named(pool, backend):
    with pytest.raises(RankError, match=r"rank 1 of 3 .*exit code 3") as error:
        pool.run(dies, world_size=3, backend=backend)
    assert not any("AssertionError" in line or "Failed" in line for line in error.value.folded.values())


class Slow:
    """A call that never ends."""

    def done(self):
        return False


def test_a_call_is_not_waited_for_blindly_while_another_is_to_be_started():
    """Another rank may need the other call before it starts this one."""
    checker = Checker(torch.distributed.HashStore(), 0, 2, 20.0)
    with checker.lock:
        room, other = checker.room("a", "a", (0, 1)), checker.room("b", "b", (0, 1))
        ticket = room.collective(call(), Slow)
        assert not checker._over(ticket, False)
        ticket.start()
        room.queue.clear()
        assert checker._over(ticket, False)
        other.collective(call(), Slow)
        assert not checker._over(ticket, False)
        other.queue.clear()
        other.receive(call("recv", peer=1), lambda source: Slow(), 1)
        assert not checker._over(ticket, False)
        assert checker._over(ticket, True)
    checker.close(failed=False)


# -- right programs ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), world_size=st.sampled_from([3, 4]))
def test_right_programs_run_on_threads(seed, world_size):
    assert spawn(programs.run, [seed], world_size=world_size, backend="threads", timeout_s=60) == [1] * world_size


def test_programs_are_mixed():
    steps = [step for seed in range(20) for rank in programs.program(seed, 4) for step in rank]
    kinds = {"all_reduce", "broadcast", "all_gather", "barrier", "send", "recv", "wait"}
    assert {kind for kind, *_ in steps} == kinds
    events = [[s[1] for s in rank if s[0] != "wait"] for seed in range(20) for rank in programs.program(seed, 4)]
    assert sum(one != sorted(one) for one in events) > 20  # issued earlier than made


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_right_programs_run_on_processes(pool, backend, world_size):
    seeds = list(range(30))
    assert pool.run(programs.run, seeds, world_size=world_size, backend=backend, timeout_s=100) == [30] * world_size


def sends_and_goes_on(ctx):
    """A message too large to leave at once is on its way while its sender waits for a collective that the receiver
    makes only afterwards. (The sender's wait for the others' word must move it.)"""
    x = torch.zeros(3_000_000)
    if ctx.rank == 0:
        handle = ctx.world.send(torch.arange(3_000_000.0), 1, async_op=True)
        ctx.world.barrier()
        handle.wait()
    else:
        ctx.world.recv(x, 0)
        ctx.world.barrier()
    return x[-1].item()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_large_message_moves_while_its_sender_waits(pool, backend):
    found = pool.run(sends_and_goes_on, world_size=2, backend=backend, timeout_s=10)
    assert found == [0.0, 2_999_999.0]


def crossing(ctx):
    """Rank 0 issues a collective and then sends; rank 1 receives before its collective. Nobody may wait at issue."""
    dp, pp = ctx.new_group((0, 1), "dp"), ctx.new_group((0, 1), "pp")
    for size in (10, 300_000):
        x, y = torch.full((4,), float(ctx.rank + 1)), torch.full((size,), 3.0)
        if ctx.rank == 0:
            handle = dp.all_reduce(x, async_op=True)
            pp.send(y, 1)
            handle.wait()
        else:
            out = torch.zeros(size)
            pp.recv(out, 0)
            dp.all_reduce(x)
            assert torch.equal(out, y)
        assert x.tolist() == [3.0] * 4


def test_asynchronous_calls_do_not_wait_at_issue(run):
    run(crossing, world_size=2)


def both_send_first(ctx):
    ctx.world.send(torch.ones(3), 1 - ctx.rank)
    ctx.world.recv(torch.ones(3), 1 - ctx.rank)


def test_where_small_messages_leave_alone_both_may_send_first(pool):
    pool.run(both_send_first, world_size=2, backend="shm")
    spawn(both_send_first, world_size=2, backend="threads")


def branches(ctx):
    """Other places in the code on every rank, other places in every step: legal."""
    places = (
        lambda x: ctx.world.all_reduce(x),
        lambda x: ctx.world.all_reduce(x),
        lambda x: ctx.world.all_reduce(x),
    )
    for step in range(40):
        x = torch.ones(2)
        places[0 if ctx.rank == 0 else 1 + step % 2](x)
        assert x.tolist() == [3.0, 3.0]


def test_ranks_may_call_from_different_places(run):
    run(branches, world_size=3)
