"""Counts beyond 32 bits: nothing is allocated here, only sizes are."""

import pytest
import torch

from crosscut.comm import checks
from crosscut.comm.backends import torchdist
from crosscut.comm.ledger import Ledger


def test_splits_beyond_32_bits():
    rows = 3_000_000_000
    x = torch.empty(rows, 0)  # that many rows, no bytes
    ins, outs = checks.splits("all_to_all over ep", x, [rows - 5, 5], [rows - 5, 2**40], 2, 0)
    assert ins == [rows - 5, 5]
    assert outs[1] == 2**40


def test_ledger_bytes_beyond_32_bits():
    ledger = Ledger()
    ledger.add("step", "x", "dp", "all_reduce", 1, 3_000_000_000 * 4)
    assert Ledger.from_json(ledger.to_json()).totals() == {"dp": {"all_reduce": 12_000_000_000}}


def beyond(ctx):
    """The limit of Gloo's all_to_all, lowered to 5 elements."""
    before, torchdist._MAX_COUNT = torchdist._MAX_COUNT, 5
    try:
        with pytest.raises(ValueError, match="6 elements on one rank are more than the 5"):
            ctx.world.all_to_all(torch.ones(6))
    finally:
        torchdist._MAX_COUNT = before
    ctx.barrier()


def test_gloos_limit_is_said_before_data_moves(pool):
    pool.run(beyond, world_size=2)
