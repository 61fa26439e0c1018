"""Derivations: what each layout makes of the reference models, and of small models with unusual tables."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.layout.plan import Plan
from crosscut.layout.rules import derive
from crosscut.layout.spec import Dims, ModelSpec, ParamSpec
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.shapes import mlp_spec, transformer_spec

SMALL = {"vocab": 48, "embed": 24, "layers": 12, "heads": 12, "kv_heads": 12, "head_dim": 2, "mlp": 36}
EVERYTHING = TransformerConfig(**SMALL, bias=True, qk_norm=True)


def transformer(mesh: str, cfg: TransformerConfig = EVERYTHING, batch: int = 144, seq: int = 12, **options) -> Plan:  # type: ignore[no-untyped-def]
    return derive(transformer_spec(cfg), Layout.of(mesh, **options), batch=batch, seq=seq)


def mlp(mesh: str, batch: int = 24, **options) -> Plan:  # type: ignore[no-untyped-def]
    layout = {k: options.pop(k) for k in list(options) if k not in ("dim", "layers", "form", "bias")}
    return derive(mlp_spec(MLPConfig(**{"dim": 12, **options})), Layout.of(mesh, **layout), batch=batch)


def actions(plan: Plan, module: str) -> tuple[list[tuple], list[tuple]]:  # type: ignore[type-arg]
    site = next(s for s in plan.sites if s.module == module)
    return ([(a.fn, a.axes, a.dim) for a in site.entry], [(a.fn, a.axes, a.dim) for a in site.exit])


# ---- boundaries ---------------------------------------------------------------------------------------------------


def test_pairs_without_and_with_sequence_parallelism() -> None:
    plan = transformer("dp=2,tp=2")
    assert actions(plan, "layers.3.attn") == ([("enter", ("tp",), None)], [("leave", ("tp",), None)])
    assert actions(plan, "embed") == ([], [("leave", ("tp",), None)])
    assert actions(plan, "head") == ([("enter", ("tp",), None)], [])
    plan = transformer("dp=2,tp=2", sp=True)
    assert actions(plan, "layers.3.mlp") == ([("gather", ("tp",), 1)], [("scatter_sum", ("tp",), 1)])
    assert actions(plan, "embed") == ([], [("scatter_sum", ("tp",), 1)])
    assert actions(plan, "head") == ([("gather", ("tp",), 1)], [])
    assert plan.loss.vocab_axes == ("tp",)
    assert plan.loss.label_axes == ("dp",)


def test_row_biases_are_added_after_the_exit() -> None:
    sites = {s.module: s for s in transformer("tp=2").sites}
    assert sites["layers.0.attn"].row_biases == ("layers.0.attn.o.bias",)
    assert sites["layers.0.mlp"].row_biases == ("layers.0.mlp.down.bias",)


def test_vocab_uncut_under_sequence_parallelism_cuts_ids_and_labels() -> None:
    plan = transformer("dp=2,tp=2", cuts={"batch": "dp", "heads": "tp", "mlp": "tp", "seq": "tp"})
    assert actions(plan, "embed") == ([("slice", ("tp",), 1)], [])
    assert not next(s for s in plan.sites if s.module == "embed").entry[0].needs_grad
    assert actions(plan, "head") == ([], [])
    assert plan.loss.label_axes == ("dp", "tp")
    assert plan.loss.label_seq_axes == ("tp",)
    assert plan.params["embed.weight"].sum_axes == ("dp", "tp")
    assert plan.params["head.weight"].sum_axes == ("dp", "tp")
    assert sum(r.bytes for r in plan.rules() if r.dtype == "int64") == 8


def test_the_lectures_form_gathers_after_each_layer() -> None:
    plan = mlp("dp=2,tp=3", bias=True)
    for i in range(4):
        assert actions(plan, f"layers.{i}") == ([("enter", ("tp",), None)], [("gather_replicated", ("tp",), -1)])
    backward = [r for r in plan.rules() if r.phase == "backward"]
    assert [r.site for r in backward] == ["layers.1", "layers.2", "layers.3"]  # data needs no gradient
    assert plan.loss.label_axes == ("dp",)


def test_pairs_of_the_mlp_need_no_boundary_rows() -> None:
    plan = mlp("tp=3", form="pairs", layers=5, bias=True)
    assert actions(plan, "layers.2") == ([("enter", ("tp",), None)], [])
    assert actions(plan, "layers.3") == ([], [("leave", ("tp",), None)])
    assert [s.module for s in plan.sites] == [f"layers.{i}" for i in range(4)]  # the fifth is whole
    assert plan.params["layers.4.weight"].cut_axes == ()
    with pytest.raises(LayoutError, match=r"stage 0 ends with 'layers\.0', whose output stays cut over tp"):
        mlp("pp=4,tp=3", form="pairs", layers=4, batch=24)
    assert mlp("pp=2,tp=3", form="pairs", layers=4).layer_stages == (0, 0, 1, 1)


def test_an_undeclared_attention_pays_for_each_of_its_linears() -> None:
    spec = transformer_spec(EVERYTHING)
    table = {k: tuple(e.text for e in row) for k, row in spec.dims.params}
    plain = ModelSpec("plain", spec.params, Dims(table, sizes=spec.dims.sizes), ("batch", "seq"))
    plan = derive(plain, Layout.of("tp=2"), batch=2, seq=4)
    for name in "qkv":
        assert actions(plan, f"layers.0.attn.{name}") == ([("enter", ("tp",), None)], [])
    assert actions(plan, "layers.0.attn.o") == ([], [("leave", ("tp",), None)])
    assert plan.params["layers.0.attn.q_norm.weight"].sum_axes == ("tp",)


def test_output_cut_by_columns_under_sequence_parallelism_is_gathered_then_sliced() -> None:
    spec = ModelSpec(
        "columns",
        (ParamSpec("up.weight", (8, 8), "linear.weight", "up"), ParamSpec("up.bias", (8,), "linear.bias", "up")),
        Dims({"up": "batch seq embed -> batch seq embed", "up.weight": ("mlp", "embed"), "up.bias": "mlp"}),
        ("batch", "seq"),
        "mean",
    )
    plan = derive(spec, Layout.of("tp=2", sp=True), batch=3, seq=4)
    assert actions(plan, "up") == ([("gather", ("tp",), 1)], [("gather", ("tp",), -1), ("slice", ("tp",), 1)])
    whole = 3 * 4 * 8 * 4
    assert [(r.phase, r.where, r.op, r.bytes) for r in plan.rules() if r.site == "up"] == [
        ("forward", "entry", "all_gather", whole),
        ("forward", "exit", "all_gather", whole),
        ("backward", "exit", "reduce_scatter", whole),
    ]
    assert plan.loss.label_axes == ("tp",)


def test_data_parallelism_and_stores_need_no_table() -> None:
    spec = ModelSpec(
        "bare",
        (
            ParamSpec("tok.weight", (10, 4), "embedding.weight", "tok"),
            ParamSpec("out.weight", (10, 4), "linear.weight", "out"),
            ParamSpec("out.bias", (10,), "linear.bias", "out"),
        ),
        Dims(),
        ("batch", "seq"),
    )
    plan = derive(spec, Layout.of("rep=2,dp=2", zero=2), batch=4, seq=3)
    assert all(p.sum_axes == ("rep", "dp") for p in plan.params.values())
    assert plan.loss.label_axes == ("rep", "dp")
    with pytest.raises(LayoutError, match=r"tp=2 needs a row for every .* of bare; without one: tok\.weight, out"):
        derive(spec, Layout.of("tp=2"), batch=4, seq=3)


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_gradients_are_summed_over_what_cuts_the_value_and_not_the_weight() -> None:
    plain, sp = transformer("dp=2,tp=2").params, transformer("dp=2,tp=2", sp=True).params
    for name, without, with_sp in [
        ("embed.weight", "dp", "dp"),
        ("layers.0.attn_norm.weight", "dp", "dp tp"),
        ("layers.0.attn.q.weight", "dp", "dp"),
        ("layers.0.attn.q.bias", "dp", "dp"),
        ("layers.0.attn.o.weight", "dp", "dp"),
        ("layers.0.attn.o.bias", "dp", "dp tp"),
        ("layers.0.attn.q_norm.weight", "dp tp", "dp tp"),
        ("layers.0.attn.k_norm.weight", "dp tp", "dp tp"),
        ("layers.0.mlp.down.bias", "dp", "dp tp"),
        ("norm.weight", "dp", "dp tp"),
        ("head.weight", "dp", "dp"),
    ]:
        assert plain[name].sum_axes == tuple(without.split()), name
        assert sp[name].sum_axes == tuple(with_sp.split()), name


def test_two_batch_axes_are_one_group() -> None:
    plan = transformer("rep=2,dp=3,tp=2", zero=1)
    assert plan.params["layers.0.attn.q.weight"].sum_axes == ("rep", "dp")
    assert {(r.op, r.axis) for r in plan.rules() if r.site == "gradients"} == {
        ("reduce_scatter", "dp"), ("all_reduce", "rep"), ("all_reduce", "rep+tp"),
    }  # fmt: skip
    assert ("rep", "dp", "tp") in plan.group_axes


# ---- store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3])
def test_zero_stages_of_an_odd_parameter(m: int) -> None:
    """5 rows over dp=2: chunks of 3, so 6 rows are in flight; 0-d tensors stay whole."""
    spec = ModelSpec(
        "odd",
        (
            ParamSpec("w", (5, 7), "other", ""),
            ParamSpec("scale", (), "other", ""),
            ParamSpec("frozen", (3,), "other", "", requires_grad=False),
        ),
        Dims(),
        ("batch", "embed"),
        "mean",
    )

    def moved(**options) -> dict[tuple[str, str, str], int]:  # type: ignore[no-untyped-def]
        plan = derive(spec, Layout.of("dp=2", micro_batches=m, **options), batch=6 * m)
        return {(r.site, r.phase, r.op): r.bytes for r in plan.rules() if r.site in ("gradients", "parameters")}

    w, scale, frozen = 6 * 7 * 4, 4, 4 * 4
    assert moved() == {("gradients", "step", "all_reduce"): 5 * 7 * 4 + scale}
    assert moved(zero=1) == {
        ("gradients", "step", "reduce_scatter"): w,
        ("gradients", "step", "all_reduce"): scale,
        ("parameters", "step", "all_gather"): w,
    }
    assert moved(zero=2) == {
        ("gradients", "step", "reduce_scatter"): w * m,
        ("gradients", "step", "all_reduce"): scale,
        ("parameters", "step", "all_gather"): w,
    }
    assert moved(zero=3) == {
        ("parameters", "forward", "all_gather"): (w + frozen) * m,
        ("parameters", "backward", "all_gather"): (w + frozen) * m,
        ("gradients", "step", "reduce_scatter"): w * m,
        ("gradients", "step", "all_reduce"): scale,
    }
    assert moved(zero=3, reshard="step") == {
        ("parameters", "forward", "all_gather"): w + frozen,
        ("gradients", "step", "reduce_scatter"): w * m,
        ("gradients", "step", "all_reduce"): scale,
    }


def test_stage_three_in_a_pipeline_reduces_once() -> None:
    plan = transformer("pp=2,dp=2", zero=3, micro_batches=4)
    for pp in (0, 1):
        held = sum(math.prod(p.local_shape) for p in plan.stage_params(pp).values()) * 4
        totals = plan.totals(pp)["dp"]
        assert totals["reduce_scatter"] == totals["all_gather"] == held


def test_bf16_gathers_parameters_narrow_and_sums_gradients_wide() -> None:
    totals = transformer("dp=2", zero=1, compute="bf16").totals()["dp"]
    assert totals["reduce_scatter"] == 2 * totals["all_gather"]


# ---- pipeline -----------------------------------------------------------------------------------------------------


def test_stages_and_transfers() -> None:
    plan = transformer("pp=3,dp=2,tp=2", micro_batches=4)
    assert plan.layer_stages == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert (plan.before, plan.after, plan.layers) == (("embed",), ("norm", "head"), "layers")
    assert plan.hidden_shape == (144 // 4 // 2, 12, 24)
    value = math.prod(plan.hidden_shape) * 4
    moves = [
        [(r.site, r.phase, r.op, r.calls, r.bytes) for r in plan.rules(pp) if r.op in ("send", "recv")]
        for pp in range(3)
    ]
    assert moves[0] == [("stage 0 -> 1", "forward", "send", 4, 4 * value), ("stage 0 -> 1", "backward", "recv", 4, 0)]
    assert moves[1] == [
        ("stage 0 -> 1", "forward", "recv", 4, 0),
        ("stage 0 -> 1", "backward", "send", 4, 4 * value),
        ("stage 1 -> 2", "forward", "send", 4, 4 * value),
        ("stage 1 -> 2", "backward", "recv", 4, 0),
    ]
    assert transformer("pp=3,tp=2", sp=True).hidden_shape == (144, 6, 24)
    for pp in range(3):
        sites = {r.site for r in plan.rules(pp)}
        assert ("embed" in sites) == (pp == 0)
        assert ("head" in sites) == (pp == 2)
        assert [r.op for r in plan.rules(pp) if r.site == "loss" and r.phase == "step"] == (
            ["all_reduce", "all_reduce", "broadcast"] if pp == 2 else ["all_reduce", "broadcast"]
        )


def test_interleaved_stages_go_round() -> None:
    plan = transformer("pp=2,dp=2", schedule="interleaved", virtual_stages=3, micro_batches=4)
    assert plan.layer_stages == tuple(s for s in range(6) for _ in range(2))
    assert [r.site for r in plan.rules(0) if r.op == "send" and r.phase == "forward"] == [
        "stage 0 -> 1", "stage 2 -> 3", "stage 4 -> 5",
    ]  # fmt: skip
    assert set(plan.stage_params(0)) | set(plan.stage_params(1)) == set(plan.params)
    assert not set(plan.stage_params(0)) & set(plan.stage_params(1))


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("zero", [0, 1])
def test_tied_ends(pp: int, zero: int) -> None:
    plan = transformer(f"pp={pp},dp=2,tp=2", TransformerConfig(**SMALL, tied=True), zero=zero)
    rules = [[r for r in plan.rules(p) if r.site == "tied embed.weight"] for p in range(pp)]
    assert plan.params["head.weight"].tied_to == "embed.weight"
    if pp == 1:
        assert plan.tied == ()
        assert rules == [[]]
        return
    size = 48 // 2 * 24 * 4 // (2 if zero else 1)
    assert [len(r) for r in rules] == [1] + [0] * (pp - 2) + [1]
    assert all((r.op, r.axis, r.calls, r.bytes) == ("all_reduce", "pp", 1, size) for held in rules for r in held)
    assert plan.tied[0].names == ("embed.weight", "head.weight")
    assert plan.tied[0].stages == (0, pp - 1)
    assert plan.tied[0].tag == rules[0][0].tag
    assert plan.params["embed.weight"].stages == plan.params["head.weight"].stages == (0, pp - 1)
    assert plan.num_parameters == transformer_spec(TransformerConfig(**SMALL, tied=True)).num_parameters


def test_full_recompute_repeats_the_forward_of_layers_only() -> None:
    plan = transformer("tp=2", recompute="full", sp=True)
    again = [r for r in plan.rules() if r.phase == "recompute"]
    assert {r.site for r in again} == {f"layers.{i}.{p}" for i in range(12) for p in ("attn", "mlp")}
    forward = [r for r in plan.rules() if r.phase == "forward" and r.site.startswith("layers")]
    assert sum(r.bytes for r in again) == sum(r.bytes for r in forward)


# ---- every product ------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[TransformerConfig, Layout]:
    sizes = {a: draw(st.sampled_from([1, 2, 3, 4])) for a in ("pp", "rep", "dp", "tp")}
    cfg = TransformerConfig(**SMALL, bias=draw(st.booleans()), qk_norm=draw(st.booleans()), tied=draw(st.booleans()))
    cuts = None
    if draw(st.booleans()):  # any subset of the width cuts
        cuts = {"batch": ["rep", "dp"], "layers": "pp"}
        width = draw(st.sets(st.sampled_from(["heads", "mlp", "vocab"]), min_size=1))
        cuts |= dict.fromkeys(sorted(width), "tp")
    zero = draw(st.sampled_from([0, 1, 3] if sizes["pp"] > 1 else [0, 1, 2, 3]))
    layout = Layout.of(sizes, zero=zero, sp=draw(st.booleans()), cuts=cuts, regather=draw(st.booleans()))
    return cfg, layout


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_layout_holds_every_number_once(case: tuple[TransformerConfig, Layout]) -> None:
    """Over the axes that cut it, a parameter's ranges cover it exactly once; every derivation passes the checker."""
    cfg, layout = case
    plan = derive(transformer_spec(cfg), layout, batch=144, seq=12)
    mesh = layout.mesh
    for p in plan.params.values():
        seen: dict[tuple[int, ...], int] = {}
        owners = [
            c
            for c in map(mesh.coords, range(mesh.world_size))
            if all(c[a] == 0 for a in mesh.axes if a not in p.cut_axes)
        ]
        for coords in owners:
            ranges = p.ranges(coords, mesh.sizes)
            assert tuple(sum(b - a for a, b in dim) for dim in ranges) == p.local_shape
            for start, stop in ranges[0]:
                for row in range(start, stop):
                    key = (row, *(dim[0][0] for dim in ranges[1:]))
                    seen[key] = seen.get(key, 0) + math.prod(sum(b - a for a, b in dim) for dim in ranges[1:])
        assert sum(seen.values()) == math.prod(p.shape)
        assert all(n == math.prod(p.local_shape[1:]) for n in seen.values())
    everyone = {mesh.label(axes) for axes in plan.group_axes}
    for pp in range(mesh.size("pp")):
        assert {r.axis for r in plan.rules(pp)} <= everyone
        assert all(r.axis for r in plan.rules(pp))
    assert plan.num_parameters == plan.spec.num_parameters


def test_one_rank_has_no_rules() -> None:
    plan = transformer("dp=1", zero=3, sp=True)
    assert plan.rules() == ()
    assert plan.group_axes == ()


def test_fused_dims_are_cut_inside_each_part() -> None:
    spec = ModelSpec(
        "fused",
        (
            ParamSpec("attn.qkv.weight", (8 * 4 + 2 * 4 * 4, 16), "linear.weight", "attn.qkv"),
            ParamSpec("attn.o.weight", (16, 32), "linear.weight", "attn.o"),
        ),
        Dims(
            {
                "attn": "batch seq embed -> batch seq embed",
                "attn.qkv.weight": ("q:heads*head_dim + k:kv_heads*head_dim + v:kv_heads*head_dim", "embed"),
                "attn.o.weight": ("embed", "heads*head_dim"),
            },
            sizes={"heads": 8, "kv_heads": 4},
        ),
        ("batch", "seq"),
        "mean",
    )
    plan = derive(spec, Layout.of("tp=2"), batch=2, seq=4)
    qkv = plan.params["attn.qkv.weight"]
    assert qkv.local_shape == (32, 16)
    assert qkv.parts[0] == ((0, 32), (32, 48), (48, 64))
    assert qkv.ranges({"tp": 1}, {"tp": 2}) == (((16, 32), (40, 48), (56, 64)), ((0, 16),))
