"""What a derivation refuses, each in one line with the offending value and the fix."""

from __future__ import annotations

import pytest

from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.layout.rules import derive
from crosscut.layout.spec import Dims, ModelSpec, ParamSpec
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.shapes import mlp_spec, transformer_spec


@pytest.mark.parametrize(
    "cfg, mesh, options, message",
    [
        ({"heads": 6, "embed": 384}, "tp=4", {}, "heads=6 cannot be cut over tp=4; use tp in {1,2,3,6}"),
        ({"heads": 8, "kv_heads": 2}, "tp=4", {}, "kv_heads=2 cannot be cut over tp=4; use tp in {1,2}"),
        (
            {"mlp": 1026},
            "tp=4",
            {},
            "mlp=1026 cannot be cut over tp=4; use tp in {1,2,3,6,9,18,19,27,38,54,57,114,...}",
        ),
        ({"vocab": 257}, "tp=2", {}, "vocab=257 cannot be cut over tp=2; use tp in {1,257}"),
        ({"layers": 6}, "pp=4", {}, "layers=6 cannot be cut over pp=4; use pp in {1,2,3,6}"),
        (
            {"layers": 4},
            "pp=2",
            {"schedule": "interleaved", "virtual_stages": 4, "micro_batches": 2},
            "layers=4 cannot be cut into pp=2 x virtual_stages=4 = 8 stages; use a number of stages in {1,2,4}",
        ),
        ({}, "dp=3", {}, "global batch 16 is not divisible by dp=3 x micro_batches=1 = 3; use a batch of 15 or 18"),
        (
            {},
            "dp=4",
            {"micro_batches": 8},
            "global batch 16 is not divisible by dp=4 x micro_batches=8 = 32; use a batch of 32",
        ),
        ({}, "rep=2,dp=3", {}, "global batch 16 is not divisible by rep+dp=6 x micro_batches=1"),
        ({}, "cp=2", {}, "seq over cp=2 is context parallelism, which cannot be derived yet"),
    ],
)
def test_what_does_not_divide(cfg: dict, mesh: str, options: dict, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        derive(transformer_spec(TransformerConfig(**cfg)), Layout.of(mesh, **options), batch=16, seq=256)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_sequence_must_divide() -> None:
    with pytest.raises(LayoutError, match=r"seq=10 cannot be cut over tp=4; use tp in \{1,2,5,10\}"):
        derive(transformer_spec(TransformerConfig()), Layout.of("tp=4", sp=True), batch=1, seq=10)
    derive(mlp_spec(MLPConfig(dim=8)), Layout.of("tp=4", sp=True), batch=1)  # a model without that dim ignores the cut


def weight(name: str, *shape: int, kind: str = "linear.weight", **more: object) -> ParamSpec:
    return ParamSpec(name, shape, kind, name.rpartition(".")[0], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params, table, more, message",
    [
        (
            [weight("up.weight", 8, 4), weight("down.weight", 4, 8)],
            {"up.weight": ("mlp", "embed")},
            {},
            "tp=2 needs a row for every parameter of m; without one: down.weight; a row reads Dims({'down.weight': ",
        ),
        (
            [weight("up.weight", 8, 4)],
            {"upp.weight": ("mlp", "embed")},
            {},
            "dims table: row 'upp.weight' fits no parameter of m; did you mean 'up.weight'?",
        ),
        (
            [weight("up.weight", 8, 4)],
            {"up.weight": ("mlp", "embed"), "u": "batch embed -> batch embed"},
            {},
            "dims table: boundary 'u' fits no module of m; did you mean 'up'?",
        ),
        (
            [weight("up.weight", 8, 4)],
            {"up.weight": ("mlp",)},
            {},
            "up.weight has shape (8, 4), but its row names 1 dims: (mlp)",
        ),
        (
            [weight("up.weight", 8, 4), weight("down.weight", 4, 6)],
            {"up.weight": ("mlp", "embed"), "down.weight": ("embed", "mlp")},
            {},
            "parameter down.weight: dim 1 has size 6, but mlp = 8 with mlp=8 (from up.weight)",
        ),
        (
            [weight("q.weight", 8, 4)],
            {"q.weight": ("heads*head_dim", "embed")},
            {},
            "q.weight, dim 'heads*head_dim' of size 8: heads and head_dim not told by shapes; give one: "
            "Dims(..., sizes={'heads': ...})",
        ),
        (
            [weight("q.weight", 8, 4)],
            {"q.weight": ("heads*head_dim", "embed")},
            {"sizes": {"heads": 3}},
            "q.weight: dim 0 has size 8, which 'heads*head_dim' makes with no whole head_dim",
        ),
        (
            [weight("q.weight", 8, 4)],
            {"q.weight": ("head_dim*heads", "embed")},
            {"sizes": {"heads": 4}},
            "heads is cut but stands inside head_dim*heads; a cut dim must be the outermost factor",
        ),
        (
            [weight("x.weight", 8, 8)],
            {"x.weight": ("mlp", "heads")},
            {},
            "parameter x.weight: axis 'tp' is cut twice: both mlp and heads take it",
        ),
        (
            [weight("n.weight", 8, kind="other")],
            {"n.weight": "mlp"},
            {},
            "parameter n.weight (other) is cut over tp but is inside no boundary",
        ),
        (
            [weight("a.b.weight", 8, 4)],
            {"a.b.weight": ("mlp", "embed"), "a": "batch embed -> batch embed", "a.b": "batch embed -> batch embed"},
            {},
            "boundary 'a.b' is inside boundary 'a'",
        ),
        (
            [weight("b.down.weight", 4, 8)],
            {"b.down.weight": ("embed", "mlp"), "b": "batch embed -> batch embed"},
            {},
            "boundary 'b' over tp: the rows need an input cut along its features",
        ),
        (
            [weight("up.weight", 8, 4)],
            {"up.weight": ("mlp", "embed")},
            {},
            "is cut along its last dim, and a mean loss reads it as whole",
        ),
        (
            [
                weight("e.tok.weight", 8, 4, kind="embedding.weight"),
                weight("e.pos.weight", 6, 4, kind="embedding.weight"),
            ],
            {"e.tok.weight": ("vocab", "embed"), "e.pos.weight": ("_", "embed"), "e": "batch -> batch embed"},
            {},
            "make them boundaries of their own",
        ),
        (
            [weight("e.tok.weight", 8, 4, kind="embedding.weight"), weight("e.norm.weight", 4, kind="other")],
            {"e.tok.weight": ("vocab", "embed"), "e.norm.weight": "embed", "e": "batch -> batch embed"},
            {},
            "e.norm.weight acts on a look-up that is still partial",
        ),
        (
            [weight("tok.weight", 8, 4, kind="embedding.weight"), weight("head.weight", 8, 4, tied_to="tok.weight")],
            {"tok.weight": ("vocab", "embed"), "head.weight": ("_", "embed")},
            {},
            "head.weight is tied to tok.weight, but their rows cut them differently",
        ),
    ],
)
def test_tables(params: list, table: dict, more: dict, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        derive(
            ModelSpec("m", tuple(params), Dims(table, **more), ("batch", "embed"), "mean"), Layout.of("tp=2"), batch=4
        )
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "table, message",
    [
        ({"a.weight": ("mpl", "embed")}, "dims table, row 'a.weight': unknown dim 'mpl'; did you mean 'mlp'?"),
        ({"a": "batch sek embed -> batch seq embed"}, "unknown dim 'sek'; did you mean 'seq'?"),
        ({"a": "batch -> "}, "is not of the form"),
        ({"a.weight": ("heads**head_dim",)}, "is not a name, a product a*b, or a fusion"),
    ],
)
def test_rows_that_cannot_be_read(table: dict, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        Dims(table)
    assert message in str(error.value)


def test_two_rows_for_one_name() -> None:
    with pytest.raises(LayoutError, match=r"rows 'a\.\*' and '\*\.weight' both fit 'a\.weight'"):
        Dims({"a.*": "embed", "*.weight": "mlp"}).row("a.weight")
    row = Dims({"a.*": "embed", "a.weight": "mlp"}).row("a.weight")
    assert row is not None
    assert row[0].text == "mlp"


def test_pipelines_need_one_list_of_layers() -> None:
    pair = tuple(weight(f"{f}.{i}.weight", 4, 4) for f in ("enc", "dec") for i in range(2))
    table = {f"{f}.*.weight": ("embed", "embed") for f in ("enc", "dec")}
    with pytest.raises(LayoutError, match=r"several families of numbered modules .enc, dec.; name one"):
        derive(ModelSpec("m", pair, Dims(table), ("batch", "embed"), "mean"), Layout.of("pp=2"), batch=4)
    plan = derive(
        ModelSpec("m", pair, Dims(table, layers="dec"), ("batch", "embed"), "mean"), Layout.of("pp=2"), batch=4
    )
    assert (plan.before, plan.layer_stages) == (("enc",), (0, 1))
    flat = ModelSpec(
        "m", (weight("a.weight", 4, 4),), Dims({"a.weight": ("embed", "embed")}), ("batch", "embed"), "mean"
    )
    with pytest.raises(LayoutError, match="pp=2 needs a ModuleList of layers in m, and it has none"):
        derive(flat, Layout.of("pp=2"), batch=4)


def test_experts_are_refused_only_where_there_are_some() -> None:
    w = ParamSpec("layers.0.w", (4, 8, 6), "other", "layers.0")
    spec = ModelSpec("moe", (w,), Dims({"layers.0.w": ("experts", "mlp", "embed")}), ("batch", "embed"), "mean")
    with pytest.raises(LayoutError, match="experts over dp=2 is expert parallelism, which cannot be derived yet"):
        derive(spec, Layout.of("dp=2"), batch=4)
    assert derive(spec, Layout.of("dp=2", cuts={"batch": "dp"}), batch=4).params["layers.0.w"].sum_axes == ("dp",)
    ignored = next(
        d for d in derive(mlp_spec(MLPConfig(dim=8)), Layout.of("dp=2"), batch=4).decisions if d.dim == "experts"
    )
    assert ignored.resolved == "ignored"


@pytest.mark.parametrize("cls, values, message", [
    (TransformerConfig, {"heads": 6}, "embed = 256 is not a multiple of heads = 6"),
    (TransformerConfig, {"heads": 8, "kv_heads": 3}, "heads = 8 is not a multiple of kv_heads = 3"),
    (TransformerConfig, {"head_dim": 7}, "head_dim = 7 must be even"),
    (TransformerConfig, {"layers": 0}, "layers = 0 must be a whole number"),
    (TransformerConfig, {"bias": "yes"}, "bias = 'yes' must be true or false"),
    (MLPConfig, {"form": "rows"}, "form = 'rows' must be"),
    (MLPConfig, {"dim": -1}, "dim = -1 must be"),
])  # fmt: skip
def test_model_sizes(cls: type, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match="model") as error:
        cls(**values)
    assert message in str(error.value)
