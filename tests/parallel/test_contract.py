"""Models that break the contract are refused by name, before a step; those that keep it pass `check_model`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosscut as cc
from crosscut.parallel.check_model import ContractError
from tests.parallel import models

TABLE = {
    "embed.weight": ("vocab", "embed"),
    "layers.*.up.weight": ("mlp", "embed"),
    "layers.*.down.weight": ("embed", "mlp"),
    "layers.*": "batch seq embed -> batch seq embed",
    "head.weight": ("vocab", "embed"),
    "head": "batch seq embed -> batch seq vocab",
}


class Block(nn.Module):
    def __init__(self, inside) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False), inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self, x)


class Model(nn.Module):
    """Embedding, two blocks whose inside is given, residual around them, head."""

    def __init__(self, inside, order=(0, 1)) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block(inside) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.order = order

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            if i in self.order:
                x = layer(x)
        return self.head(x)


def check(inside, layouts=("tp=2",), **kw):  # type: ignore[no-untyped-def]
    return cc.check_model(lambda: Model(inside, **kw), cc.Dims(TABLE), layouts=layouts)


def test_a_model_that_keeps_it() -> None:
    good = lambda m, x: m.down(F.gelu(m.up(x)))  # noqa: E731
    assert check(good, ("dp=2", "tp=2", "pp=2", "pp=2,tp=2")).layouts == ("dp=2", "tp=2", "pp=2", "pp=2,tp=2")


def test_linear_operations_on_a_partial_value_are_fine() -> None:
    check(lambda m, x: (m.down(m.up(x).tanh()) * 0.5).transpose(0, 1).reshape(x.size(1), x.size(0), -1).transpose(0, 1))
    check(lambda m, x: m.down(m.up(x).tanh()) + 2 * m.down(m.up(x).square()))


@pytest.mark.parametrize(
    "inside, said",
    [
        (lambda m, x: x + m.down(F.gelu(m.up(x))), "counted once by every rank"),
        (lambda m, x: m.down(F.gelu(m.up(x))) + 1.0, "counted once by every rank"),
        (lambda m, x: F.gelu(m.down(m.up(x))), "gelu is applied to the output of layers.0.down.weight"),
        (lambda m, x: m.down(F.layer_norm(m.up(x), (m.up.weight.size(0),))), "layer_norm looks across"),
        (lambda m, x: m.down(m.up(x).softmax(-1)), "softmax looks across"),
        (lambda m, x: m.down(F.gelu(m.up(x)) / m.up(x).norm(dim=-1, keepdim=True)), "norm looks across"),
        (
            lambda m, x: m.up(m.down(m.up(x))) @ torch.ones(m.up.weight.size(0), 8, dtype=x.dtype),
            "another Linear reads it",
        ),
    ],
)
def test_what_would_be_silently_wrong_is_refused_by_name(inside, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ContractError, match=said):
        check(inside)


def test_layers_out_of_order_or_skipped() -> None:
    class Backwards(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in reversed(self.layers):
                x = layer(x)
            return self.head(x)

    good = lambda m, x: m.down(F.gelu(m.up(x)))  # noqa: E731
    with pytest.raises(ContractError, match="pp=2"):
        cc.check_model(lambda: Backwards(good), cc.Dims(TABLE), layouts=("pp=2",))


def test_a_layer_called_twice() -> None:
    class Twice(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(layer(x))
            return self.head(x)

    with pytest.raises(ContractError, match="every layer runs once, in order"):
        cc.check_model(lambda: Twice(lambda m, x: m.down(F.gelu(m.up(x)))), cc.Dims(TABLE), layouts=("pp=2",))


def test_parameters_without_a_row_are_listed() -> None:
    table = {k: v for k, v in TABLE.items() if "up" not in k}
    with pytest.raises(ContractError, match=r"layers\.0\.up\.weight"):
        cc.check_model(lambda: Model(lambda m, x: m.down(m.up(x))), cc.Dims(table), layouts=("tp=2",))


@pytest.mark.parametrize("variant", sorted(models.VARIANTS))
def test_the_reference_transformer_keeps_it(variant: str) -> None:
    build, dims = models.transformer(variant)
    cc.check_model(build, dims)


@pytest.mark.parametrize("form", ["gather", "pairs"])
def test_the_reference_mlp_keeps_it(form: str) -> None:
    build, dims = models.mlp(form)
    cc.check_model(build, dims, batch=models.feature_batches(4, 24)[0])
