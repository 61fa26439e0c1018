"""Random programs that are right: collectives, messages and waits over overlapping groups, a list of steps a rank.

All events stand in one order in which they could be made one after another, so no order of blocking calls deadlocks.
Then asynchronous calls are issued earlier on some ranks, within the order of their group, and are waited for at their
place or later.
"""

import random

import torch

GROUPS = ("all", "low", "high")


def members(world_size):
    return {
        "all": tuple(range(world_size)),
        "low": tuple(range(world_size - 1)),
        "high": tuple(range(1, world_size)),
    }


def program(seed, world_size, num_events=24):
    """Steps for each rank: (kind, event, group, blocking, peer); the kind may be "wait"."""
    rng = random.Random(seed)
    groups = {name: ranks for name, ranks in members(world_size).items() if len(ranks) > 1}
    steps = [[] for _ in range(world_size)]
    for event in range(num_events):
        name = rng.choice(sorted(groups))
        ranks = groups[name]
        if rng.random() < 0.6:
            kind = rng.choice(["all_reduce", "broadcast", "all_gather", "barrier"])
            for rank in ranks:
                steps[rank].append((kind, event, name, rng.random() < 0.5, 0))
        else:
            src, dst = rng.sample(ranks, 2)
            steps[src].append(("send", event, name, rng.random() < 0.5, dst))
            steps[dst].append(("recv", event, name, rng.random() < 0.5, src))
    return [_spread(rng, one) for one in steps]


def _queue_of(step):
    kind, _, name, _, peer = step
    return (name, kind, peer) if kind in ("send", "recv") else (name, "collective")


def _spread(rng, steps):
    """Issue asynchronous calls earlier, wait for them later."""
    out = []
    for step in steps:
        place = len(out)
        if not step[3]:
            while place and _queue_of(out[place - 1]) != _queue_of(step) and rng.random() < 0.6:
                place -= 1
        out.insert(place, step)
        if not step[3]:
            out.append(("wait", *step[1:]))
    for index in range(len(out) - 2, -1, -1):
        while out[index][0] == "wait" and index < len(out) - 1 and rng.random() < 0.6:
            out[index], out[index + 1] = out[index + 1], out[index]
            index += 1
    return out


def value(event, rank):
    """Every seventh is too large to leave without its receiver."""
    return torch.arange(700_000.0 if event % 7 == 3 else 5.0) + 100 * event + rank


def run(ctx, seeds):
    """Run the programs of some seeds; every result is compared with its definition."""
    groups = {name: ctx.new_group(ranks, name) for name, ranks in members(ctx.world_size).items() if len(ranks) > 1}
    for seed in seeds:
        under_way = {}
        for kind, event, name, blocking, peer in program(seed, ctx.world_size)[ctx.rank]:
            if kind == "wait":
                _finish(*under_way.pop(event))
                continue
            under_way[event] = _issue(ctx, groups[name], kind, event, peer)
            if blocking:
                _finish(*under_way.pop(event))
        assert not under_way
        ctx.barrier()
    return len(seeds)


def _issue(ctx, group, kind, event, peer):
    x, ranks = value(event, ctx.rank), group.ranks
    if kind == "all_reduce":
        return group.all_reduce(x, async_op=True), sum(value(event, r) for r in ranks)
    if kind == "broadcast":
        return group.broadcast(x, event % len(ranks), async_op=True), value(event, ranks[event % len(ranks)])
    if kind == "all_gather":
        return group.all_gather(x, async_op=True), torch.cat([value(event, r) for r in ranks])
    if kind == "barrier":
        return group.barrier(async_op=True), None
    if kind == "send":
        return group.send(x, ranks.index(peer), async_op=True, tag=f"event {event}"), None
    return group.recv(x, ranks.index(peer), async_op=True, tag=f"event {event}"), value(event, peer)


def _finish(handle, expected):
    result = handle.wait()
    if expected is not None:
        assert torch.equal(result, expected), (result, expected)
