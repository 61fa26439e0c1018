"""What the tests of stand-alone parallelism share: a model with every oddity, its data, and one device as the judge.

Rank r of W sees its own rows, and takes its own branch; one device computes the mean of the W losses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crosscut as cc

BOUND = 1e-11  # of fp64, norm-wise (docs/design.md, "Equal")
Named = dict[str, Tensor | None]


class Block(nn.Module):
    """Odd sizes, a residual; `gate` is used by even ranks only."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 7), nn.Linear(7, dim)
        self.gate = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        out = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (out * torch.sigmoid(self.gate(x)) if rank % 2 == 0 else out)


class Odd(nn.Module):
    """Tied ends, a 0-d parameter, one of one number, a frozen one, one that nobody uses, one used twice; buffers."""

    def __init__(self, blocks: int = 3, recompute: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.twice = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 3)
        self.scale, self.shift = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(1))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("offset", torch.rand(6))
        self.recompute = recompute

    def forward(self, ids: Tensor, rank: int) -> Tensor:
        x = self.twice(self.emb(ids)) + self.offset
        for block in self.blocks:
            x = checkpoint(block, x, rank, use_reentrant=False) if self.recompute else block(x, rank)
        return self.head(self.twice(self.frozen(x)) * self.scale + self.shift)


def build(seed: int = 0, **kw) -> Odd:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    return Odd(**kw).double()


def loss_of(model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    """The mean over this rank's rows of a step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    ids, labels = torch.randint(5, (2, 4, 3), generator=generator)
    return nn.functional.cross_entropy(model(ids, rank).flatten(0, 1), labels.flatten())


def one_device(
    model: nn.Module, world_size: int, cls: type, kw: dict, steps: int = 3, micros: int = 1
) -> list[tuple[Named, Named]]:
    """(gradients, updated parameters) of each step: `model` is trained on all ranks' rows."""
    optimizer = cls(model.parameters(), **kw)
    out = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            sum(loss_of(model, step, rank, micro) / world_size for rank in range(world_size)).backward()
        grads = named(model, "grad")
        optimizer.step()
        out.append((grads, named(model)))
    return out


def named(model: nn.Module, what: str = "data") -> Named:
    return {n: None if getattr(p, what) is None else getattr(p, what).clone() for n, p in model.named_parameters()}


def worst(found: Named, ref: Named) -> float:
    """The largest error as a fraction of the bound. Missing and None must be missing and None in both."""
    assert found.keys() == ref.keys()
    assert [n for n in ref if found[n] is None] == [n for n in ref if ref[n] is None]
    kept = {n: r for n, r in ref.items() if r is not None}
    largest = max(r.norm() for r in kept.values())
    return max(float((found[n] - r).norm() / (BOUND * max(r.norm(), 1e-3 * largest))) for n, r in kept.items())


def on_threads(fn: Callable, world_size: int, *args, **kw) -> list:  # type: ignore[no-untyped-def]
    return cc.spawn(fn, *args, world_size=world_size, backend="threads", **kw)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
