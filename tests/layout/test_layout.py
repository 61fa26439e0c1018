"""Layouts: short forms, TOML out and in, adjustments, and every mistake in one line."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.layout.mesh import AXES


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.dictionaries(st.sampled_from(AXES), st.integers(1, 3), min_size=1))
    pp = sizes.get("pp", 1)
    interleaved = draw(st.booleans()) and pp > 1
    return Layout.of(
        sizes,
        zero=draw(st.sampled_from([0, 1, 3] if pp > 1 else [0, 1, 2, 3])),
        sp=draw(st.booleans()),
        schedule="interleaved" if interleaved else draw(st.sampled_from(["gpipe", "1f1b"])),
        micro_batches=pp * draw(st.integers(1, 3)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        regather=draw(st.booleans()),
        compute=draw(st.sampled_from(["fp64", "fp32", "bf16"])),
        context=draw(st.sampled_from(["ring", "allgather", "ulysses"])),
    )


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_toml_round_trip(layout: Layout) -> None:
    again = Layout.from_toml(layout.to_toml())
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.adjusted() == layout


def test_toml_round_trip_of_what_the_short_form_cannot_say() -> None:
    layout = Layout.from_toml(
        """
        [mesh]
        rep = 2
        dp = 3
        tp = 2
        order = ["tp", "rep", "dp"]
        [cuts]
        batch = ["rep", "dp"]
        heads = "tp"
        [store]
        optimizer = ["rep", "dp"]
        """
    )
    assert layout.mesh.axes == ("pp", "cp", "tp", "rep", "dp")
    assert layout.batch_axes == ("rep", "dp")
    assert layout.cuts["kv_heads"] == ("tp",)
    assert "mlp" not in layout.cuts
    assert layout.store.zero == 1
    assert Layout.from_toml(layout.to_toml()) == layout


def test_usual_cuts_of_the_axis_names() -> None:
    cuts = Layout.of("pp=2,dp=2,tp=2", micro_batches=2).cuts
    assert cuts == {
        "layers": ("pp",),
        "batch": ("dp",),
        "mlp": ("tp",),
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "vocab": ("tp",),
        "experts": ("dp",),
    }
    assert Layout.of("dp=2,tp=2", sp=True).cuts["seq"] == ("tp",)
    assert Layout.of("cp=2,tp=2", sp=True).cuts["seq"] == ("cp", "tp")
    assert Layout.of("dp=1") == Layout.of("tp=1") == Layout.of()
    assert Layout.of("tp=1", sp=True) == Layout.of()


def test_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.toml"
    path.write_text('[mesh]\ndp = "auto"\ntp = 2\n')
    assert Layout.from_toml(path, world_size=6) == Layout.from_toml(str(path), 6) == Layout.of("dp=3,tp=2")
    with pytest.raises(LayoutError, match=r"cannot read layout file .*none.toml"):
        Layout.from_toml(tmp_path / "none.toml")


def test_adjusted_flags_win() -> None:
    base = Layout.from_toml("[mesh]\ndp = 2\ntp = 2\n[store]\nzero = 1\n[schedule]\nmicro_batches = 4")
    assert base.adjusted(zero=3).store.zero == 3
    assert base.adjusted(sp=True).sp
    assert not base.adjusted(sp=True).adjusted(sp=False).sp
    assert base.adjusted(mesh="pp=2,dp=2").cuts == Layout.of("pp=2,dp=2").cuts
    assert base.adjusted(mesh="pp=2,dp=2").store.zero == 1
    assert base.adjusted(mesh="pp=2", schedule="interleaved").schedule.virtual_stages == 2
    by_hand = Layout.of("dp=2,tp=2", cuts={"batch": "dp", "mlp": "tp"})
    assert by_hand.adjusted(mesh="dp=3,tp=2").cuts == {"batch": ("dp",), "mlp": ("tp",)}
    assert Layout.of("pp=2", zero=3).store.reshard == "step"
    assert Layout.of("dp=2", zero=3).store.reshard == "use"


def test_fp64_is_reduced_in_fp64() -> None:
    assert Layout.of(compute="fp64").precision.reduce == "fp64"
    assert Layout.of(compute="bf16").precision.reduce == "fp32"
    assert [Layout.of(compute=c).precision.master for c in ("fp64", "fp32", "bf16")] == ["fp64", "fp32", "fp32"]
    assert Layout.of(compute="fp64").adjusted(compute="bf16").precision.reduce == "fp32"
    by_hand = Layout.of(compute="bf16", reduce="bf16")
    assert by_hand.adjusted(compute="fp32").precision.reduce == "bf16"
    with pytest.raises(LayoutError, match="loses what"):
        by_hand.adjusted(compute="fp64")
    with pytest.raises(LayoutError, match="loses what compute"):
        Layout.of(compute="fp64", reduce="fp32")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[mesh]\ndp = 2\n[cuts]\nbatsh = 'dp'", "unknown dim 'batsh'; did you mean 'batch'?"),
        ("[mesh]\ndp = 2\n[cuts]\nbatch = 'pd'", "[cuts] batch = 'pd': unknown axis; did you mean 'dp'?"),
        ("[mesh]\ntp = 2\n[cuts]\nheads = ['tp', 'tp']", "axis 'tp' cuts heads twice"),
        (
            "[mesh]\ntp = 2\n[cuts]\nheads = 'tp'\nbatch = 'tp'",
            "axis 'tp' is cut twice: it divides both batch and heads",
        ),
        ("[mesh]\ntp = 2\n[cuts]\nheads = 'tp'\nkv_heads = 'dp'", "must be cut like heads"),
        ("[mesh]\ndp = 2\n[cuts]\nheads = 'tp'", 'mesh axis dp=2 cuts no dim; add batch = "dp"'),
        ("[mesh]\npp = 2\n[cuts]\nbatch = 'pp'", "pp cuts layers only"),
        ("[mesh]\ntp = 2\n[cuts]\nlayers = 'tp'", "layers are cut over pp only"),
        ("[mesh]\ntp = 2\n[cuts]\nembed = 'tp'", "embed cannot be cut"),
        ("[mesh]\ndp = 2\nrep = 2\n[cuts]\nbatch = ['dp', 'rep']", "must be outermost first"),
        ("[mesh]\ndp = 2\n[stor]\nzero = 1", "unknown layout section [stor]; did you mean 'store'?"),
        ("[store]\nzeero = 1", "[store] unknown key 'zeero'; did you mean 'zero'?"),
        ("[store]\nzero = 4", "zero = 4 must be 0, 1, 2 or 3"),
        ("[store]\nzero = 1\ngradients = 'dp'", "already says gradients"),
        ("[store]\ngradients = 'dp'", "needs the optimizer over the same axes"),
        ("[store]\noptimizer = 'tp'", "a store runs over rep, dp, cp, not 'tp'"),
        ("[store]\nreshard = 'never'", "unknown reshard 'never'; known: use, step"),
        ("[schedule]\nname = '1f1c'", "unknown name '1f1c'; did you mean '1f1b'?"),
        ("[schedule]\nmicro_batches = 0", "micro_batches = 0 must be a whole number of at least 1"),
        ("[schedule]\nmicro_batches = true", "micro_batches = True must be a whole number"),
        ("[schedule]\nvirtual_stages = 2", 'needs name = "interleaved"'),
        ("[mesh]\npp = 2\n[schedule]\nname = 'interleaved'\nmicro_batches = 3", "in multiples of pp=2, not 3; use 4"),
        ("[mesh]\npp = 2\n[store]\nzero = 2", "zero=2 with pp=2"),
        ("[recompute]\npolicy = 'ful'", "unknown policy 'ful'; did you mean 'full'?"),
        ("[precision]\ncompute = 'fp23'", "unknown compute 'fp23'; did you mean 'fp32'?"),
        ("[context]\nmethod = 'rings'", "unknown method 'rings'; did you mean 'ring'?"),
        ("[mesh]\ndp = ", "not valid TOML"),
        ("mesh = 3", "must be a section"),
    ],
)
def test_mistakes_in_one_line(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.from_toml(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_describe_names_the_mesh(layout: Layout) -> None:
    described = layout.describe().split()[0]
    assert math.prod(int(p.split("=")[1]) for p in described.split(",")) == layout.mesh.world_size
