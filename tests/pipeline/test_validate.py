"""The validator: each kind of fault, made on purpose in a list that was valid, is named with its rank and action."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.parallel.pipeline import Action, ScheduleError, build, validate


def lists_of(name="1f1b", stages=3, micros=4):
    return [list(actions) for actions in build(name, stages, micros)]


def at(lists, rank, kind, micro):
    return next(i for i, a in enumerate(lists[rank]) if a.kind == kind and a.micro == micro)


def drop(lists, rank, kind, micro):
    del lists[rank][at(lists, rank, kind, micro)]


def move(lists, rank, source, target):
    lists[rank].insert(target, lists[rank].pop(source))


def fault(message, lists, **sizes):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(lists, **sizes)
    assert "\n" not in str(caught.value)


def test_a_forward_left_out():
    lists = lists_of()
    drop(lists, 1, "F", 2)
    fault(r"rank 1, action \d+, B\(stage 1, micro 2\): backward before its forward", lists)


def test_a_backward_left_out():
    lists = lists_of()
    drop(lists, 2, "B", 3)
    fault(r"rank 2: B\(stage 2, micro 3\) is missing", lists)


def test_a_micro_batch_left_out():
    fault(r"rank 0: F\(stage 0, micro 4\) is missing", lists_of(), num_micro=5)


def test_a_stage_left_out():
    fault(r"no rank: F\(stage 3, micro 0\) is missing", lists_of(), num_stages=4)


def test_computed_twice():
    lists = lists_of()
    lists[1].append(Action("F", 1, 0))
    fault(r"rank 1, action \d+, F\(stage 1, micro 0\): computed a second time; first at action 1", lists)


def test_backward_before_forward():
    lists = lists_of()
    move(lists, 2, at(lists, 2, "B", 1), 0)
    fault(r"rank 2, action 0, B\(stage 2, micro 1\): backward before its forward", lists)


def test_a_stage_on_two_ranks():
    lists = lists_of()
    lists[0].append(Action("F", 1, 0))
    fault(r"rank 1, action 1, F\(stage 1, micro 0\): stage 1 is already computed on rank 0", lists)


def test_a_send_left_out():
    lists = lists_of()
    drop(lists, 0, "SEND_F", 2)
    fault(r"rank 1, action \d+, RECV_F\(stage 1, micro 2, from rank 0\): rank 0 never sends it", lists)


def test_a_receive_left_out_of_the_forward():
    lists = lists_of()
    drop(lists, 1, "RECV_F", 2)
    fault(r"rank 1, action \d+, F\(stage 1, micro 2\): its input from stage 0 \(rank 0\) is never received", lists)


def test_a_receive_left_out_of_the_backward():
    lists = lists_of()
    drop(lists, 0, "RECV_B", 3)
    fault(r"rank 0, action \d+, B\(stage 0, micro 3\): its input from stage 1 \(rank 1\) is never received", lists)


def test_a_message_to_nobody():
    lists = lists_of(stages=2)
    lists[1].append(Action("SEND_F", 1, 0, 0))
    fault(r"SEND_F\(stage 1, micro 0, to rank 0\): there is no stage at the other end", lists)


def test_a_message_sent_twice():
    lists = lists_of()
    lists[0].append(Action("SEND_F", 0, 0, 1))
    fault(r"rank 0, action \d+, SEND_F\(stage 0, micro 0, to rank 1\): the same message a second time", lists)


def test_sent_before_it_is_computed():
    lists = lists_of()
    move(lists, 0, at(lists, 0, "SEND_F", 0), 0)
    fault(r"rank 0, action 0, SEND_F\(stage 0, micro 0, to rank 1\): sent before it is computed \(action 1\)", lists)


def test_received_after_it_is_used():
    lists = lists_of()
    move(lists, 1, at(lists, 1, "RECV_F", 0), 1)
    fault(r"rank 1, action 1, RECV_F\(stage 1, micro 0, from rank 0\): received after it is used \(action 0\)", lists)


def test_the_wrong_peer():
    lists = lists_of()
    i = at(lists, 0, "SEND_F", 1)
    lists[0][i] = replace(lists[0][i], peer=2)
    fault(rf"rank 0, action {i}, SEND_F.*: stage 1 is on rank 1, not on rank 2", lists)
    lists[0][i] = replace(lists[0][i], peer=0)
    fault("a rank cannot send to itself", lists)
    lists[0][i] = replace(lists[0][i], peer=None)
    fault("a send or receive needs a peer, a rank from 0 to 2", lists)


def test_a_message_of_another_ranks_stage():
    lists = lists_of()
    i = at(lists, 0, "SEND_F", 1)
    lists[0][i] = replace(lists[0][i], stage=1)
    fault(rf"rank 0, action {i}, SEND_F\(stage 1, .*: stage 1 is on rank 1", lists)


def test_sends_in_another_order_than_the_receives():
    lists = lists_of("gpipe")
    first, second = at(lists, 0, "SEND_F", 1), at(lists, 0, "SEND_F", 2)
    lists[0][first], lists[0][second] = lists[0][second], lists[0][first]
    fault(r"rank 0, action \d+, SEND_F\(stage 0, micro 2, to rank 1\): sent before it is computed", lists)
    lists = lists_of("gpipe")
    f1, f2 = at(lists, 0, "F", 1), at(lists, 0, "F", 2)
    lists[0][f1 : f1 + 2], lists[0][f2 : f2 + 2] = lists[0][f2 : f2 + 2], lists[0][f1 : f1 + 2]
    fault(
        r"rank 1, action \d+, RECV_F\(stage 1, micro 1, from rank 0\): rank 0 sends in another order: .* micro 2", lists
    )


def test_lists_that_wait_for_each_other():
    """Rank 0 wants the first gradient before it sends the second activation that rank 1 waits for."""
    lists = lists_of("gpipe", 2, 2)
    move(lists, 1, at(lists, 1, "RECV_F", 1), 0)
    move(lists, 1, at(lists, 1, "RECV_F", 1), 1)
    validate(lists)
    move(lists, 0, at(lists, 0, "RECV_B", 0), 0)
    fault(r"deadlock with buffered sends: rank 0 waits at action 0, RECV_B.*; rank 1 waits at action 0, RECV_F", lists)


def test_a_rank_may_hold_several_stages():
    """A loop of three stages over two ranks, forward only: messages go both ways on the forward channel."""
    loop = [
        [Action("F", 0, 0), Action("SEND_F", 0, 0, 1), Action("RECV_F", 2, 0, 1), Action("F", 2, 0)],
        [Action("RECV_F", 1, 0, 0), Action("F", 1, 0), Action("SEND_F", 1, 0, 0)],
    ]
    validate(loop, backward=False)
    one_rank = [[Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]]
    validate(one_rank, num_stages=2, num_micro=1)


def test_unknown_fields():
    lists = lists_of()
    lists[0][0] = replace(lists[0][0], kind="W")
    fault(r"rank 0, action 0, W\(stage 0, micro 0\): unknown kind 'W'", lists)
    lists[0][0] = Action("F", 0, 0, peer=1)
    fault("F and B have no peer", lists)
    lists[0][0] = Action("F", 0, 7)
    fault("there is no such micro-batch; micro-batches are 0 to 3", lists, num_micro=4)
    lists[0][0] = Action("F", 9, 0)
    fault("there is no such stage; stages are 0 to 2", lists, num_stages=3)


def test_backward_actions_in_a_forward_schedule():
    with pytest.raises(ScheduleError, match="a backward action in a schedule of forwards only"):
        validate(lists_of(), backward=False)


def test_neighbours_on_one_rank_must_be_in_order():
    fault(
        r"rank 0, action 0, F\(stage 1, micro 0\): stage 0, on the same rank, computes its input only later",
        [[Action("F", 1, 0), Action("F", 0, 0), Action("B", 1, 0), Action("B", 0, 0)]],
    )


@given(
    name=st.sampled_from(["gpipe", "1f1b"]),
    stages=st.integers(2, 4),
    micros=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_any_action_dropped_or_doubled_is_refused(name, stages, micros, data):
    lists = lists_of(name, stages, micros)
    validate(lists, stages, micros)
    rank = data.draw(st.integers(0, stages - 1))
    index = data.draw(st.integers(0, len(lists[rank]) - 1))
    if data.draw(st.booleans()):
        del lists[rank][index]
    else:
        lists[rank].insert(data.draw(st.integers(0, len(lists[rank]))), lists[rank][index])
    with pytest.raises(ScheduleError):
        validate(lists, stages, micros)
