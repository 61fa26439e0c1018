"""Two lines make a stock loop fully sharded. Run: python examples/04_drop_in_fsdp.py   (or under torchrun)

Parameters, gradients and optimizer state are kept in parts, one a rank. The result is that of one device.
"""

import os

import torch
from torch import nn

import crosscut as cc

STEPS, ROWS, DIM = 20, 24, 64


def build() -> nn.Module:
    """The same weights wherever it is called: a stock model of torch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, nhead=4, dim_feedforward=4 * DIM, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, num_layers=3), nn.Linear(DIM, 1)).double()


def train(model: nn.Module, rank: int, world_size: int, ctx: cc.Context | None) -> tuple[int, torch.Tensor]:
    """(bytes of parameters, gradients and optimizer state, the last loss). ctx: None on one device."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, DIM, dtype=torch.float64, generator=generator)
    y = x[:, :, :3].sum(dim=(1, 2), keepdim=True)
    x, y = x[rank::world_size], y[rank::world_size]  # this rank's rows
    if ctx is not None:
        cc.fully_shard(model, group=ctx)  # the first line; under a plain torch.distributed program without `group`
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = (model(x).mean(dim=1, keepdim=True) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        (cc.clip_grad_norm_ if ctx else clip_whole)(model, 1.0)  # the second: the norm is of all ranks' parts
        optimizer.step()
    held = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if t is not None]
    return sum(t.numel() * t.element_size() for t in held), loss.detach()


def clip_whole(model: nn.Module, max_norm: float) -> torch.Tensor:
    """As in any loop on one device."""
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def main(ctx: cc.Context) -> float:
    """Train with the other ranks, then alone on all rows, and compare bytes and weights."""
    sharded, alone = build(), build()
    part, loss = train(sharded, ctx.rank, ctx.world_size, ctx)
    whole, _ = train(alone, 0, 1, None)
    full, ref = cc.full_state_dict(sharded), alone.state_dict()
    off = max(float((full[name] - ref[name]).norm() / ref[name].norm()) for name in ref)
    ctx.print(f"rank {ctx.rank}: {whole:,} bytes -> {part:,}; loss of its rows {loss:.4f}; weights off by {off:.0e}")
    return off


if __name__ == "__main__":
    cc.spawn(main, world_size=None if "RANK" in os.environ else 2, device="cpu")
