"""Data parallelism by hand, and the proof. Run: python examples/02_data_parallel_by_hand.py   (or under torchrun)

Each rank takes its rows of the batch; after backward the gradients are averaged. That is all there is to it.
"""

import os

import torch
from torch import nn

import crosscut as cc

STEPS, ROWS, DIM = 20, 24, 16


def build() -> nn.Module:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, 1)).double()


def train(model: nn.Module, rank: int, world_size: int, group: cc.Group | None) -> list[float]:
    """The losses of all steps. group: over whom gradients are averaged; None on one device."""
    x = torch.randn(
        ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )  # the same on every rank
    y = x[:, :3].sum(dim=1, keepdim=True)
    local = ROWS // world_size
    mine = slice(rank * local, (rank + 1) * local)  # this rank's rows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = (model(x[mine]) - y[mine]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            for p in model.parameters():
                group.all_reduce(p.grad, op="avg")  # the only difference from one device
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(ctx: cc.Context) -> float:
    """Train with the other ranks, then alone on all rows, and compare the weights."""
    together, alone = build(), build()
    losses = train(together, ctx.rank, ctx.world_size, ctx.world)
    train(alone, 0, 1, None)
    with torch.no_grad():
        pairs = zip(together.parameters(), alone.parameters(), strict=True)
        off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    ctx.print(f"rank {ctx.rank}: loss of its rows {losses[0]:.3f} -> {losses[-1]:.3f}; weights off by {off:.0e}")
    return off


if __name__ == "__main__":
    cc.spawn(main, world_size=4, backend=None if "RANK" in os.environ else "threads")
