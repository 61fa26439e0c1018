"""The parts below the collectives: reductions, layout, signatures, counters that wrap, messages in random order."""

import itertools
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import crosscut.comm.shm.platform
from crosscut.comm.choose import choose_backend
from crosscut.comm.shm import moving, reducing, staged
from crosscut.comm.shm.channel import Channel
from crosscut.comm.shm.layout import DEPTH, DONE, LINE, PART, PARTS, POSTED, SLOT, SegmentLayout
from crosscut.comm.shm.mail import ANY
from crosscut.comm.shm.reduce import check, fold
from crosscut.comm.shm.register import register_shm
from crosscut.comm.shm.signature import sign, text


class InThreads:
    """Ranks that are threads of this process, each with its own channel: for what needs no processes."""

    def __init__(self, size):
        store = dist.HashStore()
        self.channels = [None] * size
        self.run(lambda rank: self.channels.__setitem__(rank, Channel(store, rank, range(size), "threads", 20.0)))

    def run(self, fn):
        errors = []

        def one(rank):
            try:
                fn(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.channels))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]

    def close(self):
        self.run(lambda rank: self.channels[rank].close())


@pytest.fixture
def world(request):
    ranks = InThreads(request.param)
    yield ranks
    ranks.close()


def everything(channel, rank, size, numel):
    x = torch.full((numel,), float(rank))
    channel.submit(reducing.all_reduce(channel, x, "sum"), "all_reduce").wait()
    assert x.unique().tolist() == [sum(range(size))]
    outs = [torch.empty(numel) for _ in range(size)]
    mine = torch.full((numel,), float(rank))
    steps = moving.all_gather(channel, [out.data_ptr() for out in outs], mine, outs)
    channel.submit(steps, "all_gather").wait()
    assert [out.unique().tolist() for out in outs] == [[float(r)] for r in range(size)]
    channel.submit(moving.broadcast(channel, mine, size - 1), "broadcast").wait()
    assert mine.unique().tolist() == [size - 1]
    out = torch.empty(numel)
    work = channel.send(torch.full((numel,), float(rank)), (rank + 1) % size, 3, "send")
    channel.recv(out, (rank - 1) % size, 3, "recv").wait()
    work.wait()
    assert out.unique().tolist() == [float((rank - 1) % size)]
    channel.submit(staged.barrier(channel), "barrier").wait()


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_counters_wrap_around(world):
    """All counters begin a few steps before 2^32."""
    size, begin = len(world.channels), 2**32 - 3
    for channel in world.channels:
        channel.step = begin
        channel.words[POSTED] = channel.words[DONE] = begin
        channel.mail._sent = [begin] * size
        channel.mail._taken = [begin] * size
        for peer in range(size):
            channel.words[channel.layout.sent + peer * LINE] = begin
            channel.words[channel.layout.taken + peer * LINE] = begin

    def body(rank):
        for _ in range(3):
            everything(world.channels[rank], rank, size, 400_000)

    world.run(body)
    assert all(channel.step > 2**32 + DEPTH for channel in world.channels)
    assert world.channels[0].words[POSTED] < 1000


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_messages_in_random_order(messages, data):
    """Any order of receives, any order of waits: the n-th receive of a tag gets the n-th message of that tag."""
    sizes = data.draw(
        st.lists(st.sampled_from([0, 1, 1000, PART, PART + 1, PARTS * PART + 7]), min_size=1, max_size=12)
    )
    tags = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    order = data.draw(st.permutations(range(len(sizes))))
    by_tag = {tag: iter([i for i, other in enumerate(tags) if other == tag]) for tag in tags}
    targets = [next(by_tag[tags[i]]) for i in order]  # what the receive in each place gets
    waits = data.draw(st.permutations(range(len(sizes))))
    any_source = data.draw(st.booleans())

    def body(rank):
        channel = messages.channels[rank]
        if rank == 0:
            sent = [torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)]
            for work in [channel.send(x, 1, tag, "send") for x, tag in zip(sent, tags, strict=True)]:
                work.wait()
            return
        outs = [torch.full((sizes[target],), 255, dtype=torch.uint8) for target in targets]
        source = ANY if any_source else 0
        works = [channel.recv(out, source, tags[target], "recv") for out, target in zip(outs, targets, strict=True)]
        for place in waits:
            works[place].wait()
            assert works[place].source == 0
            assert outs[place].eq(targets[place]).all()

    messages.run(body)
    assert not any(channel.mail.pending for channel in messages.channels)


@pytest.fixture(scope="module")
def messages():
    ranks = InThreads(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("world", [1, 2, 3], indirect=True)
def test_ranks_may_be_threads(world):
    world.run(lambda rank: everything(world.channels[rank], rank, len(world.channels), 10))


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("alias", [None, 0, 1, 2, 4])
def test_fold_is_in_rank_order_wherever_the_result_goes(size, alias):
    torch.manual_seed(size)
    for op, function in {"sum": torch.add, "prod": torch.mul, "max": torch.maximum}.items():
        parts = [torch.randn(50) for _ in range(size)]
        expected = parts[0]
        for part in parts[1:]:
            expected = function(expected, part)
        expected = expected.clone()
        out = parts[alias] if alias is not None and alias < size else torch.empty(50)
        fold(op, parts, out, torch.empty(400, dtype=torch.uint8))
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_fold_rounds_once(dtype):
    parts = [torch.linspace(0.1, 1.9, 40).to(dtype) for _ in range(5)]
    wide = parts[0].float()
    for part in parts[1:]:
        wide = wide + part.float()
    for op, expected in {"sum": wide.to(dtype), "avg": (wide / 5).to(dtype)}.items():
        out = parts[3].clone()
        fold(op, [*parts[:3], out, parts[4]], out, torch.empty(160, dtype=torch.uint8))
        assert torch.equal(out.float(), expected.float())


def test_nan_wins_and_integers_wrap():
    parts = [torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, float("nan")]), torch.tensor([3.0, 4.0])]
    out = torch.empty(2)
    for op in ("min", "max", "sum"):
        fold(op, parts, out, torch.empty(8, dtype=torch.uint8))
        assert out.isnan().all()
    small = [torch.tensor([100], dtype=torch.int8), torch.tensor([100], dtype=torch.int8)]
    fold("sum", small, small[1], torch.empty(8, dtype=torch.uint8))
    assert small[1].tolist() == [-56]


@pytest.mark.parametrize(
    "op, dtype, message",
    [
        ("mean", torch.float32, "op='mean' is unknown; use one of sum, avg"),
        ("band", torch.float32, "op='band' is not defined on torch.float32; use an integer"),
        ("max", torch.complex64, "op='max' is not defined on torch.complex64; complex numbers have no order"),
        ("avg", torch.bool, "op='avg' is not defined on torch.bool"),
    ],
)
def test_what_is_not_defined(op, dtype, message):
    with pytest.raises(ValueError, match=message):
        check(op, dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_nothing_overlaps_in_a_segment(size):
    layout = SegmentLayout.of(size)
    spans = [(layout.slots_bytes, layout.slots_bytes + DEPTH * SLOT)]
    spans += [(4 * k, 4 * k + 4) for k in (*range(6), POSTED, DONE)]
    spans += [(layout.signatures_bytes, layout.signatures_bytes + 8 * 64)]
    spans += [
        (4 * (start + peer * LINE), 4 * (start + peer * LINE) + 4)
        for start in (layout.sent, layout.taken)
        for peer in range(size)
    ]
    for peer in range(size):
        for part in range(PARTS):
            spans.append((4 * layout.header(peer, part), 4 * layout.header(peer, part) + 32))
            spans.append((layout.part_bytes(peer, part), layout.part_bytes(peer, part) + PART))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] == layout.total_bytes
    assert layout.signatures_bytes % 8 == layout.header(0, 0) % 2 == 0


@pytest.mark.parametrize(
    "call, words",
    [
        (("all_reduce", "max", "bfloat16", 0, 10), "all_reduce(max) of 10 bytes of bfloat16"),
        (("broadcast", "", "", 3, 5 << 30), "broadcast(root=3) of 5368709120 bytes"),
        (("reduce", "sum", "int8", 1, 4), "reduce(sum, root=1) of 4 bytes of int8"),
        (("barrier",), "barrier"),
        (("all_reduce", "sum", "a dtype of later", 0, 4), "all_reduce(sum) of 4 bytes of another dtype"),
    ],
)
def test_signatures_say_what_was_called(call, words):
    assert text(sign(*call)) == words
    assert 0 <= sign(*call) < 2**64


def test_other_platforms_are_told_what_to_use(monkeypatch):
    register_shm()
    register_shm()  # may be called again
    assert choose_backend(None, None, 2).why == "torch sees no GPU here, and all ranks are on this host"
    crosscut.comm.shm.platform.why_not.cache_clear()
    monkeypatch.setattr("sys.platform", "darwin")
    try:
        with pytest.raises(
            ValueError, match="backend='shm' cannot run here: it needs Linux, this is darwin; use backend='gloo'"
        ):
            register_shm()
        with pytest.raises(ValueError, match="it needs Linux"):
            choose_backend("shm", None, 2)
        choice = choose_backend(None, None, 2)
        assert choice.backend == "gloo"
        assert choice.why == "torch sees no GPU here, and shm cannot run: it needs Linux, this is darwin"
        crosscut.comm.shm.platform.why_not.cache_clear()
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        with pytest.raises(ValueError, match="memory order of x86-64, this is aarch64"):
            register_shm()
    finally:
        crosscut.comm.shm.platform.why_not.cache_clear()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"2 of 4 ranks on this host.*use backend='gloo'"):
        choose_backend("shm", None, 2, world_size=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="runs on the CPU; use backend='nccl'"):
        choose_backend("shm", "cuda", 2)
