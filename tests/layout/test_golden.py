"""The worked example, line by line: a transformer of 4 layers on dp=2, tp=2. The numbers are written out by hand."""

import pytest

from crosscut.layout.layout import Layout
from crosscut.layout.plan import Plan, Rule
from crosscut.layout.rules import derive
from crosscut.models.config import TransformerConfig
from crosscut.models.shapes import transformer_spec

A = 2_097_152  # 8 rows x 256 tokens x 256 numbers x 4 bytes: one activation of a rank
T = 8_192  # 8 x 256 x 4: one number a token
LOCAL_BYTES = 8_659_968  # of the 2,164,992 numbers a rank holds
NORMS_BYTES = 9 * 256 * 4
BLOCKS = [f"layers.{i}.{part}" for i in range(4) for part in ("attn", "mlp")]


def plan(**options: object) -> Plan:
    spec = transformer_spec(TransformerConfig(vocab=256, embed=256, layers=4, heads=8, mlp=1024))
    return derive(spec, Layout.of("dp=2,tp=2", **options), batch=16, seq=256)  # type: ignore[arg-type]


def lines(rules: tuple[Rule, ...], site: str, phase: str) -> list[tuple[str, str, str, int | None, int]]:
    """(where, op, axis, calls, bytes) of one site and phase, sorted."""
    return sorted((r.where, r.op, r.axis, r.calls, r.bytes) for r in rules if (r.site, r.phase) == (site, phase))


def test_the_model_is_the_one_of_the_example() -> None:
    derived = plan()
    assert len(derived.params) == 39
    assert (
        sum(p.local_shape[0] * (p.local_shape[1] if len(p.local_shape) > 1 else 1) for p in derived.params.values())
        == 2_164_992
    )
    assert derived.num_parameters == 4_327_680


@pytest.mark.parametrize("zero", [0, 1])
def test_without_sequence_parallelism_line_by_line(zero: int) -> None:
    rules = plan(zero=zero).rules()
    assert lines(rules, "embed", "forward") == [("exit", "all_reduce", "tp", 1, A)]
    assert lines(rules, "embed", "backward") == []
    for block in BLOCKS:
        assert lines(rules, block, "forward") == [("exit", "all_reduce", "tp", 1, A)]
        assert lines(rules, block, "backward") == [("entry", "all_reduce", "tp", 1, A)]
    assert lines(rules, "head", "forward") == []
    assert lines(rules, "head", "backward") == [("entry", "all_reduce", "tp", 1, A)]
    assert lines(rules, "loss", "forward") == [("", "all_reduce", "tp", 3, 3 * T)]
    if zero:
        assert lines(rules, "gradients", "step") == [("", "reduce_scatter", "dp", None, LOCAL_BYTES)]
        assert lines(rules, "parameters", "step") == [("", "all_gather", "dp", None, LOCAL_BYTES)]
    else:
        assert lines(rules, "gradients", "step") == [("", "all_reduce", "dp", None, LOCAL_BYTES)]
        assert lines(rules, "parameters", "step") == []
    check_once_a_step(rules)
    assert {r.site for r in rules} <= {"embed", "head", "loss", "gradients", "parameters", "clip", *BLOCKS}


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_with_sequence_parallelism_line_by_line(zero: int, regather: bool) -> None:
    rules = plan(zero=zero, sp=True, regather=regather).rules()
    again = [("entry", "all_gather", "tp", 1, A)] if regather else []
    assert lines(rules, "embed", "forward") == [("exit", "reduce_scatter", "tp", 1, A)]
    assert lines(rules, "embed", "backward") == [("exit", "all_gather", "tp", 1, A)]
    for block in BLOCKS:
        assert lines(rules, block, "forward") == [
            ("entry", "all_gather", "tp", 1, A),
            ("exit", "reduce_scatter", "tp", 1, A),
        ]
        assert lines(rules, block, "backward") == sorted(
            [("exit", "all_gather", "tp", 1, A), ("entry", "reduce_scatter", "tp", 1, A), *again]
        )
    assert lines(rules, "head", "forward") == [("entry", "all_gather", "tp", 1, A)]
    assert lines(rules, "head", "backward") == sorted([("entry", "reduce_scatter", "tp", 1, A), *again])
    assert lines(rules, "loss", "forward") == [("", "all_reduce", "tp", 3, 3 * T)]
    if zero:
        assert lines(rules, "gradients", "step") == [
            ("", "all_reduce", "tp", None, NORMS_BYTES // 2),
            ("", "reduce_scatter", "dp", None, LOCAL_BYTES),
        ]
        assert lines(rules, "parameters", "step") == [("", "all_gather", "dp", None, LOCAL_BYTES)]
    else:
        assert lines(rules, "gradients", "step") == [
            ("", "all_reduce", "dp", None, LOCAL_BYTES - NORMS_BYTES),
            ("", "all_reduce", "dp+tp", None, NORMS_BYTES),
        ]
    check_once_a_step(rules)


def check_once_a_step(rules: tuple[Rule, ...]) -> None:
    once = [
        (r.site, r.op, r.axis, r.dtype, r.calls, r.bytes)
        for r in rules
        if r.site in ("loss", "clip") and r.phase == "step"
    ]
    assert once == [
        ("loss", "all_reduce", "dp", "int64", 1, 8),
        ("loss", "all_reduce", "dp", "fp32", 1, 4),
        ("clip", "all_reduce", "dp+tp", "fp32", 1, 4),
    ]


@pytest.mark.parametrize(
    "options, totals",
    [
        ({}, {"tp": {"all_reduce": 37_773_312}, "dp": {"all_reduce": 8_659_968 + 12}, "dp+tp": {"all_reduce": 4}}),
        (
            {"sp": True},
            {
                "tp": {"all_gather": 37_748_736, "reduce_scatter": 37_748_736, "all_reduce": 24_576},
                "dp": {"all_reduce": 8_650_752 + 12},
                "dp+tp": {"all_reduce": 9_216 + 4},
            },
        ),
        (
            {"sp": True, "regather": True},
            {
                "tp": {"all_gather": 56_623_104, "reduce_scatter": 37_748_736, "all_reduce": 24_576},
                "dp": {"all_reduce": 8_650_752 + 12},
                "dp+tp": {"all_reduce": 9_216 + 4},
            },
        ),
        (
            {"zero": 1},
            {
                "tp": {"all_reduce": 37_773_312},
                "dp": {"reduce_scatter": 8_659_968, "all_gather": 8_659_968, "all_reduce": 12},
                "dp+tp": {"all_reduce": 4},
            },
        ),
        (
            {"zero": 1, "sp": True},
            {
                "tp": {"all_gather": 37_748_736, "reduce_scatter": 37_748_736, "all_reduce": 24_576 + 4_608},
                "dp": {"reduce_scatter": 8_659_968, "all_gather": 8_659_968, "all_reduce": 12},
                "dp+tp": {"all_reduce": 4},
            },
        ),
    ],
)
def test_totals(options: dict, totals: dict) -> None:
    derived = plan(**options)
    assert derived.totals() == totals
    assert derived.world_totals() == {a: {op: 4 * n for op, n in ops.items()} for a, ops in totals.items()}
