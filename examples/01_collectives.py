"""The collectives on four ranks, by hand. Run: python examples/01_collectives.py   (or under torchrun)"""

import os

import torch

import crosscut as cc


def main(ctx: cc.Context) -> list[float]:
    """Every rank runs this; what `ctx.print` gets comes out in rank order."""
    world = ctx.world
    rank, size = ctx.rank, ctx.world_size

    x = torch.arange(size, dtype=torch.float32, device=ctx.device) + rank  # rank r: [r, r+1, ...]
    total = world.all_reduce(x.clone())  # the sum, on every rank
    ctx.print(f"rank {rank}: all_reduce of {x.tolist()} is {total.tolist()}")

    piece = world.reduce_scatter(x)  # the sum too, but each rank keeps a piece
    whole = world.all_gather(piece)  # the pieces put together
    assert torch.equal(whole, total), "all_reduce = reduce_scatter + all_gather"
    ctx.print(f"rank {rank}: its piece {piece.tolist()}")

    # Ranks may send different amounts: rank r has r+1 numbers for each of the others, and all know how many come.
    parts = torch.full(((rank + 1) * size,), float(rank), device=ctx.device)
    received = world.all_to_all(parts, [rank + 1] * size, [r + 1 for r in range(size)])
    ctx.print(f"rank {rank}: all_to_all gives {received.tolist()}")

    # Communication can run beside computation: a handle now, the result when it is needed.
    handle = world.all_reduce(x.clone(), op="max", async_op=True)
    square = x.square().sum()
    ctx.print(f"rank {rank}: maximum {handle.wait().tolist()}, own sum of squares {square.item()}")

    ctx.print(f"rank {rank}: handed in {ctx.ledger.totals()['world']['all_reduce']} bytes to all_reduce")
    return total.tolist()


if __name__ == "__main__":
    # Ranks are threads of this process ("gloo": four processes); under torchrun they are torchrun's processes.
    cc.spawn(main, world_size=4, backend=None if "RANK" in os.environ else "threads")
