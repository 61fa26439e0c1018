"""The vocab-cut cross-entropy against torch's on whole logits, and what a user's loss may do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.comm.context import Context
from crosscut.comm.launch import spawn
from crosscut.parallel.loss import LossMode, vocab_cross_entropy


def data(vocab: int, tokens: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[0], labels[1], labels[2] = 0, vocab - 1, -100  # first and last column, and one that is ignored
    return logits, labels


def _cut(ctx: Context, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    mine = logits.chunk(ctx.world_size, -1)[ctx.rank].clone().requires_grad_()
    loss = vocab_cross_entropy(mine, labels, ctx.world)
    (loss * 0.5).backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize("n", (1, 2, 3, 4))
@pytest.mark.parametrize("vocab", (12, 24))
def test_vocab_cross_entropy(n: int, vocab: int) -> None:
    logits, labels = data(vocab)
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole, labels, reduction="sum")
    (want * 0.5).backward()
    out = spawn(_cut, logits, labels, world_size=n, backend="threads")
    for loss, _ in out:
        torch.testing.assert_close(loss, want.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.cat([g for _, g in out], -1), whole.grad, rtol=1e-12, atol=1e-15)


def test_large_logits_do_not_overflow() -> None:
    logits, labels = data(12)
    for loss, grad in spawn(_cut, logits * 1000, labels, world_size=3, backend="threads"):
        assert torch.isfinite(loss)
        assert torch.isfinite(grad).all()


def test_nothing_of_the_size_of_the_vocab_is_communicated() -> None:
    def bytes_sent(ctx: Context) -> dict:
        _cut(ctx, *data(24))
        return ctx.ledger.totals()

    for totals in spawn(bytes_sent, world_size=2, backend="threads"):
        assert totals == {"world": {"all_reduce": 3 * 7 * 8}}


def test_a_label_outside_the_vocab_is_named() -> None:
    logits, labels = data(12)
    labels[3] = 12
    with pytest.raises(ValueError, match=r"label 12 is outside the vocab \[0, 12\)"):
        spawn(_cut, logits, labels, world_size=2, backend="threads")


def _user_loss(ctx: Context, fn) -> Tensor:  # type: ignore[no-untyped-def]
    logits, labels = data(12)
    mine = logits.chunk(ctx.world_size, -1)[ctx.rank].clone()
    with LossMode(mine, ctx.world):
        return fn(mine.view(1, 7, -1), labels)


def test_a_user_loss_reaches_the_cut_one() -> None:
    logits, labels = data(12)
    want = F.cross_entropy(logits, labels)
    for fn in (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y),
        lambda x, y: torch.nn.CrossEntropyLoss()(x.reshape(-1, x.size(-1)).double(), y),
        lambda x, y: F.cross_entropy(x[0], target=y, reduction="mean"),
    ):
        for loss in spawn(_user_loss, fn, world_size=2, backend="threads"):
            torch.testing.assert_close(loss, want)


@pytest.mark.parametrize(
    "fn, said",
    [
        (lambda x, y: x.logsumexp(-1).mean(), "logsumexp"),
        (lambda x, y: F.log_softmax(x, -1).mean(), "log_softmax"),
        (lambda x, y: F.cross_entropy(x[0], y) + 0.1 * x.square().mean(), "square"),
        (lambda x, y: F.cross_entropy(x.transpose(1, 2), y[None]), "transpose"),
        (lambda x, y: F.cross_entropy(x[0], y, label_smoothing=0.1), "label_smoothing"),
        (lambda x, y: F.cross_entropy(x[0], y, weight=torch.ones(12)), "weight"),
        (lambda x, y: F.cross_entropy(x[0], y, ignore_index=0), "ignore_index=0"),
    ],
)
def test_what_would_see_a_part_of_the_vocab_is_refused(fn, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=said):
        spawn(_user_loss, fn, world_size=2, backend="threads")


def test_no_valid_label_is_zero_not_nan() -> None:
    def all_ignored(ctx: Context) -> Tensor:
        logits, labels = data(12)
        x = logits.clone().requires_grad_()
        with LossMode(x, ctx.group(())):
            loss = F.cross_entropy(x, torch.full_like(labels, -100))
        loss.backward()
        assert x.grad is not None
        assert not x.grad.any()
        return loss.detach()

    def with_mesh(ctx: Context) -> Tensor:
        from crosscut.layout.mesh import Mesh

        ctx.set_mesh(Mesh.of("dp=1"))
        return all_ignored(ctx)

    assert float(spawn(with_mesh, world_size=1, backend="threads")[0]) == 0.0
