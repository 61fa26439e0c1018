"""The correctness column: what the operations are by definition, and that a wrong result is seen."""

import pytest
import torch

from crosscut.bench.calls import Buffers
from crosscut.bench.data import DTYPES, expected, is_correct, pattern
from crosscut.bench.definitions import CUT, OPS


def by_definition(op, n, inputs):
    """Every rank's result, from all ranks' inputs (None: nothing)."""
    total = torch.stack([x.to(torch.float64) for x in inputs]).sum(0) if op not in ("scatter",) else None
    if op == "all_reduce":
        return [total] * n
    if op == "reduce":
        return [total] + [None] * (n - 1)
    if op == "broadcast":
        return [inputs[0]] * n
    if op == "all_gather":
        return [torch.cat(inputs)] * n
    if op == "gather":
        return [inputs] + [None] * (n - 1)
    if op == "reduce_scatter":
        return list(total.chunk(n))
    if op == "scatter":
        return list(inputs[0].chunk(n))
    if op == "all_to_all":
        return [torch.cat([x.chunk(n)[rank] for x in inputs]) for rank in range(n)]
    return [inputs[(rank - 1) % n] for rank in range(n)]


def make(op, n, count, dtype):
    inputs = []
    for rank in range(n):
        b = Buffers.make(op, rank, n, count, dtype, torch.device("cpu"))
        b.fill()
        inputs.append(b.x)
    return inputs


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_the_definition_is_met_and_any_change_is_seen(op, n):
    count = 12 * n
    results = by_definition(op, n, make(op, n, count, torch.float32))
    for rank, result in enumerate(results):
        if result is None:
            assert expected(op, rank, n, count) is None
            continue
        result = [part.float() for part in result] if isinstance(result, list) else result.float()
        assert is_correct(result, op, rank, n, count)
        flat = torch.cat(result) if isinstance(result, list) else result
        for place in range(flat.numel()):
            wrong = flat.clone()
            wrong[place] += 1
            assert not is_correct(wrong, op, rank, n, count), place
        assert not is_correct(flat.roll(1), op, rank, n, count)
        assert not is_correct(flat[:-1], op, rank, n, count)
        if rank and op not in ("all_reduce", "broadcast", "all_gather"):
            assert not is_correct(flat, op, rank - 1, n, count)  # another rank's result


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_adds_the_numbers_exactly(name):
    for n in (2, 4, 8, 16):
        inputs = make("all_reduce", n, 500, DTYPES[name])
        total = inputs[0].clone()
        for x in inputs[1:]:
            total += x
        assert is_correct(total, "all_reduce", 0, n, 500)
        assert total.to(torch.float64).equal(torch.stack([x.to(torch.float64) for x in inputs]).sum(0))


def test_longer_data_than_a_chunk():
    """Filled and compared in pieces of 2^20; a number beyond the first piece counts."""
    count = 2**20 + 7
    x = make("broadcast", 2, count, torch.uint8)[0]
    assert x[-1] == pattern(0, 2, count - 1, count)[0]
    assert is_correct(x, "broadcast", 1, 2, count)
    x[2**20 + 3] += 1
    assert not is_correct(x, "broadcast", 1, 2, count)


def test_data_differs_between_ranks_and_places():
    for n in (2, 3, 4, 8):
        rows = [pattern(rank, n, 0, 64).tolist() for rank in range(n)]
        assert len({tuple(row) for row in rows}) == n
        assert all(len(set(row)) > 5 for row in rows)


def test_buffers_hold_a_whole_array_once():
    for op in OPS:
        whole = [Buffers.make(op, rank, 4, 16, torch.float32, torch.device("cpu")) for rank in range(4)]
        largest = max(max(b.x.numel(), b.out.numel()) for b in whole)
        assert largest == 16
        if op in CUT:
            assert any(b.x.numel() == 4 or b.out.numel() == 4 for b in whole) or op == "all_to_all"
