"""Find a wrong gradient in a data-parallel loop. Run: python examples/05_find_a_wrong_gradient.py

The loop is nobody's framework: it sums gradients over ranks by hand, and forgets one parameter. Three added lines, (1)
to (3), and one sentence comes back: which tensor is wrong first, and what is wrong with it.
"""

import tempfile

import torch
from torch import nn

import crosscut as cc
from crosscut.testing import capture, compare_captures  # (1)

ROWS, DIM, STEPS = 24, 16, 2


def build() -> nn.Module:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, 1)).double()


def train(ctx: cc.Context, folder: str, forgotten: str | None) -> None:
    """Every rank runs this on its rows. The loss is divided by all rows, so that gradients are summed, not averaged."""
    model = build()
    x = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].sum(dim=1, keepdim=True)
    local = ROWS // ctx.world_size
    mine = slice(ctx.rank * local, (ctx.rank + 1) * local)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = (model(x[mine]) - y[mine]).square().sum() / ROWS
        loss.backward()
        for name, p in model.named_parameters():
            if name != forgotten:  # the seeded error: one parameter is left out
                ctx.world.all_reduce(p.grad)
        optimizer.step()
        capture(model, optimizer, folder, loss=loss * ctx.world_size, ctx=ctx)  # (2) gradients are still there
        optimizer.zero_grad()


def main(folder: str, forgotten: str | None = "0.weight") -> str:
    """Train on one rank and on four, and judge the second run by the first."""
    cc.spawn(train, f"{folder}/ref", None, world_size=1, backend="threads")
    cc.spawn(train, f"{folder}/run", forgotten, world_size=4, backend="threads")
    return compare_captures(f"{folder}/ref", f"{folder}/run").verdict.sentence()  # (3) or: crosscut parity compare


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("one parameter forgotten:", main(folder))
        print("all of them summed:     ", main(folder, forgotten=None))
