"""Schedules: orders, communication, clock, memory, over every small size. No process, no torch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.parallel.pipeline import (
    Action,
    ScheduleError,
    add_communication,
    bubble_fraction,
    build,
    draw,
    forward_only,
    gpipe,
    grid,
    one_f_one_b,
    peak_in_flight,
    simulate,
    stage_ranks,
    utilisation,
    validate,
)

SIZES = [(s, m) for s in range(1, 9) for m in range(1, s + 4)]
NAMES = ["gpipe", "1f1b"]


def kinds(actions):
    return " ".join(f"{a.kind}{a.micro}" for a in actions)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_every_size_is_valid_and_has_the_published_bubble(name, stages, micros):
    lists = build(name, stages, micros)
    validate(lists, stages, micros)
    for t_f, t_b in ((1, 1), (1, 2), (3, 5)):
        assert bubble_fraction(lists, t_f, t_b) == pytest.approx((stages - 1) / micros, rel=1e-12)
        assert utilisation(lists, t_f, t_b) == pytest.approx(micros / (micros + stages - 1), rel=1e-12)


@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_forward_only_has_the_lectures_utilisation(stages, micros):
    lists = add_communication(forward_only(stages, micros))
    validate(lists, stages, micros, backward=False)
    assert utilisation(lists) == pytest.approx(micros / (micros + stages - 1), rel=1e-12)
    assert simulate(lists, t_f=1.0).total == micros + stages - 1


@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_memory_is_all_micro_batches_for_gpipe_and_the_distance_to_the_end_for_1f1b(stages, micros):
    assert peak_in_flight(build("gpipe", stages, micros)) == (micros,) * stages
    assert peak_in_flight(build("1f1b", stages, micros)) == tuple(min(micros, stages - s) for s in range(stages))


def test_1f1b_orders_written_out():
    lists = one_f_one_b(3, 4)
    assert kinds(lists[0]) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert kinds(lists[1]) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert kinds(lists[2]) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert kinds(gpipe(2, 2)[1]) == "F0 F1 B0 B1"


def test_communication_written_out():
    first, middle, last = build("1f1b", 3, 1)
    assert kinds(first) == "F0 SEND_F0 RECV_B0 B0"
    assert kinds(middle) == "RECV_F0 F0 SEND_F0 RECV_B0 B0 SEND_B0"
    assert kinds(last) == "RECV_F0 F0 B0 SEND_B0"
    assert [a.peer for a in middle] == [0, None, 2, 2, None, 0]
    assert all(a.stage == 1 for a in middle)
    assert str(middle[0]) == "RECV_F(stage 1, micro 0, from rank 0)"
    assert str(middle[2]) == "SEND_F(stage 1, micro 0, to rank 2)"
    assert str(middle[1]) == "F(stage 1, micro 0)"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_messages_are_one_activation_and_one_gradient_a_boundary_and_micro_batch(name, stages, micros):
    lists = build(name, stages, micros)
    for rank, actions in enumerate(lists):
        count = {k: sum(a.kind == k for a in actions) for k in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")}
        inner, outer = micros * (rank < stages - 1), micros * (rank > 0)
        assert count == {"SEND_F": inner, "RECV_B": inner, "RECV_F": outer, "SEND_B": outer}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_micro_batches_go_backward_in_order_on_every_rank(name, stages, micros):
    """So that gradients are added up in the order of one device under every schedule."""
    for actions in build(name, stages, micros):
        assert [a.micro for a in actions if a.kind == "B"] == list(range(micros))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_two_in_order_communicators_never_deadlock(name, stages, micros):
    lists = build(name, stages, micros)
    assert simulate(lists, sends="channels").total == simulate(lists).total
    assert simulate(lists, t_comm=0.25, sends="channels").total >= simulate(lists, t_comm=0.25).total


def test_why_sends_are_asynchronous_and_directions_have_communicators_of_their_own():
    lists = build("1f1b", 2, 3)
    simulate(lists)
    with pytest.raises(
        ScheduleError, match=r"deadlock with rendezvous sends: rank 0 waits at action 3, SEND_F.*; rank 1"
    ):
        simulate(lists, sends="rendezvous")
    with pytest.raises(ScheduleError, match="deadlock with one_channel sends"):
        simulate(lists, sends="one_channel")
    forward = add_communication(forward_only(4, 6))
    simulate(forward, sends="rendezvous")  # the forward alone, as in the lectures, needs neither
    simulate(forward, sends="one_channel")


def test_a_message_takes_time_on_the_clock():
    lists = add_communication(forward_only(3, 1))
    assert simulate(lists, t_f=1, t_comm=0.5).total == 3 * 1 + 2 * 0.5
    assert simulate(lists, t_f=1, t_comm=0.5, sends="rendezvous").total == 4.0
    spans = simulate(lists, t_f=1, t_comm=0.5).ranks
    assert [(s[0].start, s[0].end) for s in spans] == [(0, 1), (1.5, 2.5), (3, 4)]


def test_on_a_channel_a_rank_does_one_message_at_a_time():
    """Rank 1 cannot receive micro-batch 1 while it still sends micro-batch 0 on."""
    lists = add_communication(forward_only(3, 2))
    assert simulate(lists, t_f=1, t_comm=10, sends="channels").total == (1 + 10) + (1 + 10) + (10 + 1) + (10 + 1)
    assert simulate(lists, t_f=1, t_comm=10).total == (1 + 10) + (1 + 10) + 1 + 1


@given(
    stages_per_rank=st.integers(1, 3),
    ranks=st.integers(1, 4),
    micros=st.integers(1, 6),
    v_shaped=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_communication_of_any_placement_of_stages(stages_per_rank, ranks, micros, v_shaped, data):
    """Loop or V-shaped placements, and on each rank any order of F and B that respects the dependencies."""
    home = {}
    for stage in range(stages_per_rank * ranks):
        turn, place = divmod(stage, ranks)
        home[stage] = ranks - 1 - place if v_shaped and turn % 2 else place
    last = len(home) - 1
    done, lists = set(), [[] for _ in range(ranks)]
    todo = {(k, s, m) for k in "FB" for s in home for m in range(micros)}
    while todo:
        ready = sorted(
            (k, s, m)
            for k, s, m in todo
            if (k == "F" and (s == 0 or ("F", s - 1, m) in done) and (m == 0 or ("F", s, m - 1) in done))
            or (
                k == "B"
                and ("F", s, m) in done
                and (s == last or ("B", s + 1, m) in done)
                and (m == 0 or ("B", s, m - 1) in done)
            )
        )
        kind, stage, micro = data.draw(st.sampled_from(ready))
        lists[home[stage]].append(Action(kind, stage, micro))
        done.add((kind, stage, micro))
        todo.discard((kind, stage, micro))
    full = add_communication(lists)
    assert stage_ranks(full) == home
    crossings = sum(home[s] != home[s + 1] for s in range(last))
    assert sum(not a.is_compute for actions in full for a in actions) == 4 * crossings * micros
    simulate(full)  # a global order exists, so buffered sends reach the end
    assert [[a for a in actions if a.is_compute] for actions in full] == lists


def test_the_drawing_written_out():
    assert draw(build("1f1b", 2, 2)).splitlines() == [
        "rank 0  F0 F1 .  .  B0 B0 .  B1 B1",
        "rank 1  .  F0 B0 B0 F1 B1 B1 .  .",
    ]
    cells = grid(build("gpipe", 3, 2))
    assert all(len(row) == len(cells[0]) == (2 + 2) * 3 for row in cells)
    assert sum(cell is None for row in cells for cell in row) == 3 * 2 * 3


def test_a_drawing_names_the_stage_where_a_rank_has_several():
    lists = [[Action("F", 0, 0), Action("F", 2, 0)], [Action("F", 1, 0)]]
    assert draw(add_communication(lists)).splitlines() == ["rank 0  F0/0 .    F0/2", "rank 1  .    F0/1 ."]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1f2b", "unknown schedule '1f2b'; did you mean '1f1b'"),
        ("gpip", "unknown schedule 'gpip'; did you mean 'gpipe'"),
        ("interleave", "unknown schedule 'interleave'; did you mean 'interleaved'"),
        ("qqq", "unknown schedule 'qqq'; use one of gpipe, 1f1b"),
        ("interleaved", "schedule 'interleaved' is not executable yet; use gpipe or 1f1b"),
        ("zero-bubble", "schedule 'zero-bubble' is not executable yet; use gpipe or 1f1b"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        build(name, 2, 2)


def test_bad_sizes():
    with pytest.raises(ValueError, match="num_stages=0"):
        build("gpipe", 0, 2)
    with pytest.raises(ValueError, match="num_micro=0"):
        build("1f1b", 2, 0)
    with pytest.raises(ValueError, match="virtual_stages=2: schedule 'gpipe' has one stage a rank"):
        build("gpipe", 2, 2, virtual_stages=2)
    with pytest.raises(ValueError, match="takes lists of F and B only, got SEND_F"):
        add_communication(build("gpipe", 2, 1))
