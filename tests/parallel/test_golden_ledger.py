"""The worked example of docs/design.md, run for real: what the ledger counts, line by line and in total, is the table.

Transformer of 4 layers, embed 256, 8 heads of 32, mlp 1024, vocab 256, fp32, dp=2,tp=2, batch 16 x 256, one
micro-batch.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from crosscut.comm.launch import spawn
from crosscut.layout.layout import Layout
from crosscut.models.config import TransformerConfig
from crosscut.models.dims import transformer_dims
from crosscut.models.transformer import Transformer, next_token_loss
from crosscut.parallel.batch import local_batch
from crosscut.parallel.distribute import distribute

A = 2_097_152  # one activation of a rank: 8 x 256 x 256 x 4 bytes
T = 8_192  # one number a token: 8 x 256 x 4
PARAMS = 8_659_968  # local parameters of a rank
NORMS = 9 * 256 * 4
CFG = TransformerConfig()


def _step(ctx, layout, update=False):  # type: ignore[no-untyped-def]
    model = distribute(partial(Transformer, CFG), transformer_dims(CFG), layout, ctx, loss_fn=next_token_loss)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (16, 257), generator=generator)
    model.forward_backward(local_batch(ids[:, :-1], ids[:, 1:], layout, ctx))
    model.clip_grad_norm_(1.0)
    if update:
        model.optimizer(torch.optim.SGD, lr=0.1).step()
    lines = {(tag, *key): value for tag, by in ctx.ledger.by_tag("step").items() for key, value in by.items()}
    held = dict(model.module.named_parameters())
    return lines, ctx.ledger.totals("step"), len(held), sum(p.numel() * 4 for p in held.values())


@pytest.fixture(scope="module")
def plain():  # type: ignore[no-untyped-def]
    return spawn(_step, Layout.of("dp=2,tp=2"), world_size=4, backend="threads")


@pytest.fixture(scope="module")
def sequence_cut():  # type: ignore[no-untyped-def]
    return spawn(_step, Layout.of("dp=2,tp=2", sp=True), world_size=4, backend="threads")


def test_without_sp_line_by_line(plain) -> None:  # type: ignore[no-untyped-def]
    blocks = [f"layers.{i}.{part}" for i in range(4) for part in ("attn", "mlp")]
    want = {
        ("embed/forward/exit", "tp", "all_reduce"): (1, A),
        **{(f"{b}/forward/exit", "tp", "all_reduce"): (1, A) for b in blocks},
        **{(f"{b}/backward/entry", "tp", "all_reduce"): (1, A) for b in blocks},
        ("head/backward/entry", "tp", "all_reduce"): (1, A),
        ("loss/forward", "tp", "all_reduce"): (3, 3 * T),
    }
    for lines, _, num_params, local_bytes in plain:
        assert (num_params, local_bytes) == (39, PARAMS)
        once = {k: v for k, v in lines.items() if k[1] != "tp"}
        assert {k: v for k, v in lines.items() if k[1] == "tp"} == want
        assert once.pop(("gradients/step", "dp", "all_reduce"))[1] == PARAMS
        assert once == {("loss/step", "dp", "all_reduce"): (2, 8 + 4), ("clip/step", "dp+tp", "all_reduce"): (1, 4)}


def test_without_sp_in_total(plain) -> None:  # type: ignore[no-untyped-def]
    for _, totals, _, _ in plain:
        assert totals == {
            "tp": {"all_reduce": 37_773_312},
            "dp": {"all_reduce": 8_659_968 + 8 + 4},
            "dp+tp": {"all_reduce": 4},
        }


def test_with_sp_line_by_line(sequence_cut) -> None:  # type: ignore[no-untyped-def]
    blocks = [f"layers.{i}.{part}" for i in range(4) for part in ("attn", "mlp")]
    want = {
        ("embed/forward/exit", "tp", "reduce_scatter"): (1, A),
        ("embed/backward/exit", "tp", "all_gather"): (1, A),
        **{(f"{b}/forward/entry", "tp", "all_gather"): (1, A) for b in [*blocks, "head"]},
        **{(f"{b}/forward/exit", "tp", "reduce_scatter"): (1, A) for b in blocks},
        **{(f"{b}/backward/exit", "tp", "all_gather"): (1, A) for b in blocks},
        **{(f"{b}/backward/entry", "tp", "reduce_scatter"): (1, A) for b in [*blocks, "head"]},
        ("loss/forward", "tp", "all_reduce"): (3, 3 * T),
    }
    for lines, totals, _, _ in sequence_cut:
        assert {k: v for k, v in lines.items() if k[1] == "tp"} == want
        assert totals["tp"] == {"all_gather": 37_748_736, "reduce_scatter": 37_748_736, "all_reduce": 24_576}
        assert totals["dp"] == {"all_reduce": PARAMS - NORMS + 8 + 4}
        assert totals["dp+tp"] == {"all_reduce": NORMS + 4}


@pytest.mark.parametrize("sp", [False, True])
def test_zero_1_in_total(sp: bool, plain, sequence_cut) -> None:  # type: ignore[no-untyped-def]
    """One reduce_scatter of every local gradient, one all_gather of every local parameter; under SP the shards of the
    norms are also summed over tp. What crosses tp in forward and backward is what it is without a store."""
    layout = Layout.of("dp=2,tp=2", sp=sp, zero=1)
    for lines, totals, num_params, local_bytes in spawn(_step, layout, True, world_size=4, backend="threads"):
        assert (num_params, local_bytes) == (39, PARAMS)
        assert lines["gradients/step", "dp", "reduce_scatter"][1] == PARAMS
        assert lines["parameters/step", "dp", "all_gather"][1] == PARAMS
        assert totals["dp"] == {"reduce_scatter": PARAMS, "all_gather": PARAMS, "all_reduce": 8 + 4}
        assert totals["dp+tp"] == {"all_reduce": 4}
        tp = dict((sequence_cut if sp else plain)[0][1]["tp"])
        if sp:
            assert lines["gradients/step", "tp", "all_reduce"][1] == 4_608 == NORMS // 2
            tp["all_reduce"] += 4_608
        assert totals["tp"] == tp


@pytest.mark.parametrize("reshard, gathers", [("use", 2), ("step", 1)])
def test_zero_3_in_total(reshard: str, gathers: int) -> None:
    layout = Layout.of("dp=2,tp=2", zero=3, reshard=reshard)
    for _, totals, _, _ in spawn(_step, layout, True, world_size=4, backend="threads"):
        assert totals["dp"] == {"reduce_scatter": PARAMS, "all_gather": gathers * PARAMS, "all_reduce": 8 + 4}
