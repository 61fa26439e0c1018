"""Sizes, and what S, algbw and busbw are."""

import pytest

from crosscut.bench.definitions import OPS, algbw_gbs, busbw_gbs, elements, explain, factor, sent_per_rank_gbs
from crosscut.bench.sizes import parse_size, size_text


@pytest.mark.parametrize(
    "text, size",
    [
        ("8", 8),
        ("8B", 8),
        ("4KiB", 4096),
        ("4kB", 4000),
        ("4kb", 4000),
        (" 100MB ", 10**8),
        ("100 MiB", 100 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1GiB", 2**30),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_size(size_text(size).replace(",", "")) == size


@pytest.mark.parametrize(
    "text, part",
    [
        ("4KoB", "did you mean 4KiB?|did you mean 4kB?"),
        ("4 apples", "unknown unit 'apples'; use one of"),
        ("big", "is not a number of bytes"),
        ("-8", "is not a number of bytes"),
        ("0", "1 or more"),
        ("1.5B", "not a whole number"),
    ],
)
def test_sizes_that_are_none(text, part):
    with pytest.raises(ValueError, match=part.replace("?", r"\?")):
        parse_size(text)


@pytest.mark.parametrize(
    "size, text", [(8, "8 B"), (4096, "4 KiB"), (10**8, "100 MB"), (1234, "1,234 B"), (2**30, "1 GiB")]
)
def test_size_text(size, text):
    assert size_text(size) == text


def test_rates_of_nccl_tests():
    """Its documented factors, on 8 ranks; 1 GB in 10 ms."""
    want = {"all_reduce": 1.75, "all_gather": 0.875, "reduce_scatter": 0.875, "all_to_all": 0.875}
    want |= {"gather": 0.875, "scatter": 0.875, "broadcast": 1, "reduce": 1, "send_recv": 1}
    assert set(want) == set(OPS)
    for op, f in want.items():
        assert factor(op, 8) == f
        assert busbw_gbs(op, 8, 10**9, 0.01) == pytest.approx(100 * f)
    assert algbw_gbs(10**9, 0.01) == pytest.approx(100)
    assert factor("all_reduce", 2) == 1


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("size, seconds", [(8, 2.2e-5), (10**8, 0.037)])
def test_the_bandwidth_by_counting_what_is_sent_is_busbw(n, size, seconds):
    assert sent_per_rank_gbs(n, size, seconds) == pytest.approx(busbw_gbs("all_reduce", n, size, seconds), rel=1e-12)


@pytest.mark.parametrize(
    "op, n, num_bytes, itemsize, count",
    [
        ("all_reduce", 3, 8, 4, 2),
        ("all_reduce", 3, 9, 4, 3),
        ("all_gather", 3, 8, 4, 3),
        ("all_to_all", 4, 8, 8, 4),
        ("scatter", 2, 10**8, 4, 25_000_000),
        ("broadcast", 4, 1, 8, 1),
    ],
)
def test_sizes_are_rounded_up_to_whole_parts(op, n, num_bytes, itemsize, count):
    assert elements(op, n, num_bytes, itemsize) == count


def test_the_definitions_are_said_for_what_was_measured():
    lines = explain(["all_reduce", "all_gather", "gather"])
    assert "algbw = S / t" in lines[0]
    assert lines[1:] == [
        "all_reduce: S is the tensor, f = 2(n-1)/n",
        "all_gather: S is the whole output, f = (n-1)/n",
        "gather: S is all parts, f = (n-1)/n",
    ]
