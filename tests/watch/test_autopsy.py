"""Every kind of verdict, from rings on paper: 1 to 8 ranks, groups that overlap, messages, rings that have wrapped."""

import json
import os
from dataclasses import replace

import pytest

from crosscut.watch.autopsy import autopsy
from crosscut.watch.case import Case
from crosscut.watch.facts import VERDICTS, Facts, Failure
from crosscut.watch.folder import diagnose
from crosscut.watch.reading import Lane

from .synthetic import START_S, Op, recv, reduce, run, send, steps


def world(size):
    return Lane("world", tuple(range(size)))


def loop(size, number=6):
    """A stock data-parallel loop: two all_reduces and a barrier a step."""
    lane = world(size)
    return steps(
        [reduce(lane, "ddp.py:10", (8,)), reduce(lane, "ddp.py:20", (6,)), Op("barrier", lane, "ddp.py:30", ())], number
    )


def same(size, number=6):
    return {rank: loop(size, number) for rank in range(size)}


def verdict_of(programs, **rest):
    facts = run(programs, **rest)
    found = autopsy(facts, len(programs))
    assert found.verdict in VERDICTS
    json.dumps(found.as_json())
    return found


@pytest.mark.parametrize("size", range(1, 9))
def test_a_clean_run_has_no_verdict(size):
    found = verdict_of(same(size))
    assert (found.verdict, found.culprits) == ("none", [])
    assert "every rank has ended" in found.text


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("what", ["skipped", "extra", "swapped"])
def test_one_rank_makes_other_calls(size, what):
    for bad in (0, size - 1, size // 2):
        programs = same(size)
        mine = programs[bad]
        if what == "skipped":
            del mine[7]
        elif what == "extra":
            mine.insert(7, reduce(world(size), "extra.py:1", (2,)))
        else:
            mine[6], mine[7] = mine[7], mine[6]
        found = verdict_of(programs)
        assert found.culprits == [bad], found
        assert found.verdict == {"skipped": "missing_call", "extra": "order", "swapped": "order"}[what], found
        assert found.axis == "world"
        assert found.seq in (7, 8)
        assert {"skipped": "never made", "extra": "too many", "swapped": "order differs"}[what] in found.text


@pytest.mark.parametrize(
    "change",
    [
        {"reduce_op": "max"},
        {"shape": (9,)},
        {"shape": (2, 4)},
        {"dtype": "int32"},
        {"op": "broadcast", "root": 0, "reduce_op": None},
    ],
)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_mismatch(size, change):
    programs = same(size)
    programs[1][6] = replace(programs[1][6], **change)
    found = verdict_of(programs)
    assert (found.verdict, found.culprits, found.seq) == ("mismatch", [1], 7)
    assert "rank 1 called" in found.text
    assert "ddp.py:10" in found.text
    assert found.text.endswith("; in earlier steps rank 1 called what rank 0 called") == (size == 2)


def test_roots_differ():
    lane = world(3)
    programs = {rank: steps([Op("broadcast", lane, "b.py:1", root=0)], 4) for rank in range(3)}
    programs[2][2] = replace(programs[2][2], root=1)
    found = verdict_of(programs)
    assert (found.verdict, found.culprits) == ("mismatch", [2])
    assert "root=1" in found.text
    assert "root=0" in found.text


def test_splits_differ():
    lane = world(2)
    programs = {
        0: [Op("all_to_all", lane, "moe.py:5", splits=((1, 3), (1, 2)))],
        1: [Op("all_to_all", lane, "moe.py:5", splits=((1, 3), (3, 1)))],
    }
    found = verdict_of(programs)
    assert found.verdict == "mismatch"
    assert "sends 1 rows to rank 0" in found.text
    assert "expects 2" in found.text


def test_two_calls_that_look_alike_in_swapped_order():
    """Nothing hangs and nothing is refused: the values are exchanged. Other steps tell."""
    lane = world(4)
    programs = {rank: steps([reduce(lane, "a.py:1"), reduce(lane, "a.py:2")], 6) for rank in range(4)}
    programs[2][4], programs[2][5] = programs[2][5], programs[2][4]
    found = verdict_of(programs)
    assert (found.verdict, found.culprits, found.seq) == ("order", [2], 5)


def test_ranks_may_take_part_from_different_lines():
    lane = world(3)
    programs = {
        rank: steps([reduce(lane, "a.py:1" if rank else "a.py:9"), Op("broadcast", lane, f"a.py:{rank}", root=0)], 6)
        for rank in range(3)
    }
    assert verdict_of(programs).verdict == "none"


@pytest.mark.parametrize("size", [2, 3])
def test_a_call_too_many_that_looks_like_the_one_in_its_place(size):
    """Forward and backward communicate from one line, and one rank evaluates once: ranks differ only at the end."""
    lane = world(size)
    step = [reduce(lane, "a.py:2"), reduce(lane, "a.py:2")]
    programs = {rank: [*steps(step, 6), Op("barrier", lane, "a.py:9", ())] for rank in range(size)}
    programs[1].insert(4, reduce(lane, "a.py:1"))
    found = verdict_of(programs)
    assert (found.verdict, found.culprits, found.seq) == ("order", [1], 5)
    assert "rank 1 made a call too many, all_reduce(sum) #5 over world, at a.py:1" in found.text


def test_a_message_of_another_shape():
    lane = world(2)
    programs = {0: [send(lane, 1, "p.py:1", shape=(3,))], 1: [recv(lane, 0, "p.py:2", shape=(5,))]}
    found = verdict_of(programs)
    assert (found.verdict, found.culprits, found.op) == ("mismatch", [1, 0], "send")
    assert "(3,)" in found.text
    assert "(5,)" in found.text
    programs = {0: [send(lane, 1, "p.py:1")], 1: [recv(lane, 0, "p.py:2", dtype="int32")]}
    assert verdict_of(programs).verdict == "mismatch"


@pytest.mark.parametrize("size", range(2, 9))
def test_a_rank_that_left_the_loop_early(size):
    programs = same(size)
    programs[size - 1] = loop(size, 4)
    found = verdict_of(programs)
    assert (found.verdict, found.culprits) == ("missing_call", [size - 1])
    assert "it has ended; its last call was barrier #12" in found.text
    assert found.seq == 13


@pytest.mark.parametrize("size", range(2, 9))
def test_a_rank_stuck_outside(size):
    programs = same(size)
    programs[1] = loop(size, 4)
    facts = run(programs)
    facts[1].alive, facts[1].exit_code, facts[1].ring.ended = True, None, 0
    facts[1].state, facts[1].stack = "running", ["train.py:55 in spin", "train.py:80 in main"]
    found = autopsy(facts, size)
    assert (found.verdict, found.culprits, found.seq, found.site) == ("stuck_outside", [1], 13, "ddp.py:10")
    assert "rank 1 never came: it computes or loops outside any collective at train.py:55 in spin" in found.text
    assert ("ranks 0,2" in found.text) == (size > 2)
    assert "section" in found.advice
    facts[1].state = "stopped"
    assert "is stopped (SIGSTOP" in autopsy(facts, size).text


def test_a_rank_that_never_came_to_torch_distributed():
    facts = run({0: loop(3, 1), 1: loop(3, 1)}, world_size=3)
    facts[2] = Facts(2)
    found = autopsy(facts, 3)
    assert (found.verdict, found.culprits) == ("stuck_outside", [2])
    assert "rank 2 never came: it has not started recording" in found.text


def test_stopped_inside_a_call():
    facts = run(same(3, 2))
    for rank, fact in facts.items():
        fact.ring.records[-1] = fact.ring.records[-1]._replace(completed=0)
        fact.ring.ended, fact.alive, fact.exit_code = 0, True, None
        fact.state = "stopped" if rank == 1 else "sleeping"
    found = autopsy(facts, 3)
    assert (found.verdict, found.culprits) == ("stuck_outside", [1])
    assert "every rank has come to it" in found.text


def test_the_example_of_a_cycle_between_groups():
    """dp=2 over pp=2: rank 2 receives before its all_reduce, so that each of two groups waits for the other."""
    dp = [Lane("dp", (0, 1, 2, 3))]
    pp = Lane("pp", (0, 2))
    step = {
        0: [reduce(dp[0], "store.py:210", tag="gradients of mlp.up"), send(pp, 1, "run.py:90")],
        1: [reduce(dp[0], "store.py:210", tag="gradients of mlp.up")],
        2: [reduce(dp[0], "store.py:210", tag="gradients of mlp.up"), recv(pp, 0, "run.py:88")],
        3: [reduce(dp[0], "store.py:210", tag="gradients of mlp.up")],
    }
    programs = {rank: steps(ops, 5) for rank, ops in step.items()}
    programs[2][8:10] = programs[2][8:10][::-1]
    found = verdict_of(programs)
    assert found.culprits == [2]
    assert found.verdict in ("order", "missing_call")
    assert (found.axis, found.op, found.seq) == ("dp", "all_reduce", 5)
    assert (
        'ranks 0,1,3 wait in all_reduce(sum) #5 over dp, tag "gradients of mlp.up", at store.py:210 since' in found.text
    )
    assert "rank 2 never came: it is in recv #5 over pp from rank 0, at run.py:88, which waits for rank 0" in found.text


def test_a_stage_that_leaves_out_a_receive():
    """The first stage sends first in every step, so a send after the all_reduce is usual there, and only there."""
    lane = world(3)
    step = {
        0: [send(lane, 1, "p.py:2"), recv(lane, 1, "p.py:3"), reduce(lane, "p.py:5")],
        1: [recv(lane, 0, "p.py:1"), send(lane, 2, "p.py:2"), recv(lane, 2, "p.py:3"), send(lane, 0, "p.py:4")],
        2: [recv(lane, 1, "p.py:1"), send(lane, 1, "p.py:4"), reduce(lane, "p.py:5")],
    }
    step[1].append(reduce(lane, "p.py:5"))
    programs = {rank: steps(ops, 6) for rank, ops in step.items()}
    del programs[1][15]
    found = verdict_of(programs)
    assert found.culprits == [1], found
    assert "the order differs on rank 1 since send" in found.text


def test_a_cycle_that_nobody_alone_has_made():
    """Two ranks that both receive first, from the first step on."""
    lane = world(2)
    programs = {
        0: [recv(lane, 1, "p.py:1"), send(lane, 1, "p.py:2")],
        1: [recv(lane, 0, "p.py:1"), send(lane, 0, "p.py:2")],
    }
    found = verdict_of(programs)
    assert (found.verdict, found.culprits) == ("waiting_cycle", [0, 1])
    assert any("rank 1 waits in recv" in line for line in found.evidence)


def over_tp_and_world(tp, number):
    programs = {}
    for rank in range(2 * tp):
        first = rank // tp * tp
        over_tp = Lane("tp", tuple(range(first, first + tp)))
        programs[rank] = steps([reduce(over_tp, "pairs.py:1"), reduce(world(2 * tp), "norm.py:2")], number)
    return programs


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("step", [0, 3])
def test_overlapping_groups(tp, step):
    """One rank makes its call over the world before the one over tp: in the first step, where no earlier one tells what
    is usual but most ranks do, or later.
    """
    programs = over_tp_and_world(tp, 6)
    bad = tp + 1
    programs[bad][2 * step : 2 * step + 2] = programs[bad][2 * step : 2 * step + 2][::-1]
    found = verdict_of(programs)
    assert found.culprits == [bad], found
    assert found.verdict in ("order", "missing_call")
    assert (found.axis, found.site) == ("tp", "pairs.py:1")
    assert f"rank {bad} never came: it is in all_reduce(sum) #{step + 1} over world, at norm.py:2" in found.text


@pytest.mark.parametrize("bad", range(4))
def test_one_rank_alone_in_a_call_that_all_make_now_and_then(bad):
    """Nothing that it did is unusual, and a group of two that waits for it cannot outvote it: the world can."""
    programs = {rank: [] for rank in range(4)}
    for step in range(5):
        for rank, own in programs.items():
            tp, dp = Lane("tp", (rank // 2 * 2, rank // 2 * 2 + 1)), Lane("dp", (rank % 2, rank % 2 + 2))
            own += [reduce(tp, "p.py:1"), reduce(dp, "p.py:2")]
            if step in (1, 2) or (step == 3 and rank == bad):
                own.append(Op("barrier", world(4), "p.py:3", ()))
    found = verdict_of(programs)
    assert found.culprits == [bad], found
    assert found.verdict in ("order", "missing_call")


@pytest.mark.parametrize(
    "signal, words", [(-9, "SIGKILL"), (-11, "SIGSEGV (a crash in native code)"), (3, "exit code 3")]
)
def test_a_dead_rank(signal, words):
    programs = same(3)
    programs[1] = loop(3, 4)
    facts = run(programs)
    facts[1].ring.ended, facts[1].exit_code, facts[1].ended_s = 0, signal, START_S + 1
    facts[1].last_lines = ["last words"]
    found = autopsy(facts, 3)
    assert (found.verdict, found.culprits) == ("dead_rank", [1])
    assert words in found.text
    assert "after barrier #12 over world" in found.text
    assert "last words" in found.evidence
    assert any("rank 0 waits in all_reduce(sum) #13" in line for line in found.evidence)


def test_killed_for_memory():
    facts = run({0: loop(2), 1: loop(2, 4)})
    facts[1].ring.ended, facts[1].exit_code, facts[1].oom_killed = 0, -9, True
    found = autopsy(facts, 2)
    assert (found.verdict, found.culprits) == ("oom", [1])
    assert "for want of memory" in found.text


@pytest.mark.parametrize(
    "line, kind",
    [
        ("ValueError: loss is nan", "exception"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom"),
        ("OSError: [Errno 28] No space left on device: 'x'", "disk_full"),
    ],
)
def test_the_first_real_error_and_the_others_folded(line, kind):
    programs = same(4)
    programs[2] = loop(4, 4)
    facts = run(programs)
    for rank in (0, 1, 3):
        text = "RuntimeError: Connection closed by peer [127.0.0.1]:3422"
        facts[rank].failure = Failure(text, "ddp.py:10", START_S + 2 + rank, in_call=True)
        facts[rank].exit_code, facts[rank].alive = 1, False
    facts[2].failure = Failure(line, "train.py:9", START_S + 5, "Traceback ...\n" + line)
    facts[2].exit_code = 1
    found = autopsy(facts, 4)
    assert (found.verdict, found.culprits) == (kind, [2])
    assert f"rank 2 of 4 raised {line} at train.py:9" in found.text
    assert "and 1 more like it" in found.evidence
    assert any("rank 0: RuntimeError: Connection closed" in one for one in found.evidence)


def test_a_mismatch_comes_before_the_crash_that_it_causes():
    programs = same(2)
    programs[1][6] = replace(programs[1][6], shape=(9,))
    facts = run(programs)
    facts[1].exit_code, facts[1].ended_s, facts[1].ring.ended = -6, START_S + 60, 0
    found = autopsy(facts, 2)
    assert (found.verdict, found.culprits) == ("mismatch", [1])
    facts[1].ended_s = START_S  # before it: then the crash is the cause
    assert autopsy(facts, 2).verdict == "dead_rank"


def test_a_port_that_is_taken_is_the_cause():
    line = "DistNetworkError: the server socket has failed to listen on port 29500, EADDRINUSE"
    assert not Failure(line, in_call=True).secondary
    assert Failure("DistNetworkError: the client socket has timed out", in_call=True).secondary


def test_a_time_out_of_every_rank_is_no_cause():
    """Torch's own time-out has ended everybody: who was waited for is still in the rings."""
    programs = same(3)
    programs[2] = loop(3, 4)
    facts = run(programs)
    for rank in (0, 1):
        facts[rank].failure = Failure("RuntimeError: Timed out waiting 5000ms", "ddp.py:10", START_S + 9, in_call=True)
        facts[rank].exit_code = 1
    found = autopsy(facts, 3)
    assert (found.verdict, found.culprits) == ("missing_call", [2])


def test_steps_that_came_apart():
    """One all_reduce a step: a rank that skips its optimizer step makes the same calls, one step behind."""
    lane = world(3)
    programs = {rank: steps([reduce(lane, "a.py:1")], 12) for rank in range(3)}
    programs[1] = programs[1][:5] + steps([reduce(lane, "a.py:1")], 7, first=4)
    found = verdict_of(programs)
    assert (found.verdict, found.culprits) == ("desync", [1])
    assert "5 instead of 6" in found.text


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_that_wrapped_past_the_divergence(size):
    programs = same(size, 40)
    del programs[1][1]
    found = verdict_of(programs, capacity=12)
    assert found.verdict in ("missing_call", "order", "mismatch")
    assert "may have come apart before" in found.evidence[0]
    assert "certain is" in found.evidence[0]
    if size > 2:
        assert found.culprits == [1]


def test_a_ring_that_wrapped_after_it_says_nothing_of_it():
    found = verdict_of(same(4, 40), capacity=12)
    assert found.verdict == "none"


@pytest.mark.parametrize("slower", [1.25, 2.0])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_slow_rank(size, slower):
    lane = world(size)

    def program(rank):
        ms = 10 * (slower if rank == size - 1 else 1)
        return steps([reduce(lane, "a.py:1", ms=ms), reduce(lane, "a.py:2", ms=ms)], 20)

    facts = run({rank: program(rank) for rank in range(size)}, ended=False)
    found = autopsy(facts, size)
    assert (found.verdict, found.culprits) == ("straggler", [size - 1])
    assert f"{slower - 1:.0%} slower" in found.text
    assert any("rank 0 waited" in line and "world" in line for line in found.evidence)


def test_uniform_slowness_names_nobody():
    lane = world(4)
    programs = {}
    for rank in range(4):
        ops = steps([reduce(lane, "a.py:1"), reduce(lane, "a.py:2")], 30)
        programs[rank] = [replace(op, ms=50 + (i * 7 + rank * 13) % 30) for i, op in enumerate(ops)]
    assert verdict_of(programs).verdict == "none"


def test_a_rank_that_is_late_in_some_steps_names_nobody():
    programs = same(3, 30)
    programs[1] = [replace(op, ms=20 if op.step % 10 < 6 else 1) for op in programs[1]]
    assert verdict_of(programs).verdict == "none"


def test_a_hiccup_names_nobody():
    programs = same(3, 20)
    programs[1][30] = replace(programs[1][30], ms=500)
    assert verdict_of(programs).verdict == "none"


def chain(slow):
    """Four stages of a pipeline, each waiting for the one before; messages from stage 1 to stage 2 take `slow` ms."""
    lane = world(4)
    programs = {rank: [] for rank in range(4)}
    for step in range(30):
        for rank in range(4):
            if rank:
                programs[rank].append(
                    recv(lane, rank - 1, "p.py:1", step=step, takes_ms=slow if rank == 2 else 10.0, ms=0)
                )
            if rank < 3:
                programs[rank].append(
                    send(lane, rank + 1, "p.py:2", step=step, takes_ms=slow if rank == 1 else 10.0, ms=20)
                )
    return programs


def test_a_slow_link():
    found = verdict_of(chain(12.5))
    assert (found.verdict, found.culprits, found.axis) == ("straggler", [1, 2], "world")
    assert "link" in found.text
    assert verdict_of(chain(10.0)).verdict == "none"


def test_a_folder_of_runs_names_the_newest(tmp_path):
    for age, name in enumerate(["older", "newer", "oldest"]):
        ledger = tmp_path / name / "ledger"
        ledger.mkdir(parents=True)
        os.utime(ledger, (1e9, 1e9 - (age - 1) ** 2))
    with pytest.raises(ValueError, match=r"holds no ledger .*; its newest run is .*/newer$"):
        diagnose(tmp_path)


def test_equal_numbers_of_calls_are_told_once_and_a_long_error_says_that_it_was_cut():
    even = run(same(2))
    assert autopsy(even, 2).text.endswith("; 18 calls a rank")
    even[1].failure = Failure("RuntimeError: " + "word " * 60)
    (line,) = Case(even, 2).folded([0])
    assert line.endswith("...")
    assert len(line) < 180


def test_a_call_that_is_made_now_and_then_and_left_out_by_one_rank():
    """Its next step's call meets the others' and the job crashes there: nothing that follows tells what it was."""
    lane = world(3)
    programs = {}
    for rank in range(3):
        programs[rank] = [reduce(lane, "ddp.py:10", (17,))] * 5 + [reduce(lane, "log.py:3", ())]
        programs[rank].append(Op("broadcast", lane, "ddp.py:8", (3,), root=0))  # once: DDP makes its buckets anew
        programs[rank] += [reduce(lane, "ddp.py:10", (17,))] * 5 + [reduce(lane, "log.py:3", ())]
    programs[1][-1] = reduce(lane, "ddp.py:10", (17,))
    found = verdict_of(programs)
    assert (found.verdict, found.culprits, found.seq) == ("missing_call", [1], 13)
    assert "rank 1 never made that call" in found.text
