"""A model of one's own under any layout. Run: python examples/03_own_model.py [dp=2,tp=2]   (or under torchrun)

The model is plain PyTorch. The table names the dims of its weights; the layout says which axis cuts which dim.
"""

import os
import sys

import torch
from torch import nn

import crosscut as cc

DIM, HIDDEN = 16, 64


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(torch.relu(self.up(self.norm(x)))))


DIMS = cc.Dims({
    "norm.weight": "embed", "norm.bias": "embed",
    "up.weight": "mlp embed", "up.bias": "mlp",  # as torch stores it: (out, in)
    "down.weight": "embed mlp", "down.bias": "embed",
    "out.weight": "_ embed", "out.bias": "_",
})  # fmt: skip


def main(ctx: cc.Context, mesh: cc.Mesh) -> float:
    """Twenty steps; the loss is the same under every layout."""
    layout = cc.Layout.of(mesh, micro_batches=2)
    model = cc.distribute(MyModel, DIMS, layout, ctx, loss_fn=nn.functional.mse_loss)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    x = torch.randn(32, DIM, generator=torch.Generator().manual_seed(1))
    y = x[:, :4].sum(dim=1, keepdim=True).sin()
    for step in range(20):
        out = model.forward_backward(cc.local_batch(x, y, layout, ctx))
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4 and ctx.rank == 0:
            print(f"step {step + 1:2}  loss {out.loss:.4f}  gradient norm {norm:.4f}")
    at = f"rank {ctx.rank} (dp {ctx.coords['dp']}, tp {ctx.coords['tp']})"
    ctx.print(f"{at}: up.weight {tuple(model.module.up.weight.shape)} of {(HIDDEN, DIM)}")
    return out.loss


if __name__ == "__main__":
    mesh = cc.Mesh.of(sys.argv[1] if len(sys.argv) > 1 else "dp=2,tp=2")
    cc.spawn(main, mesh, world_size=mesh.world_size, backend=None if "RANK" in os.environ else "threads")
