"""The placement checker: whatever is left out of a derivation, or doubled in it, is an error before a rank starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crosscut.layout import grads, rules, sites
from crosscut.layout.errors import LayoutError
from crosscut.layout.layout import Layout
from crosscut.layout.placements import FEATURES, OWED, SHARED, WHOLE, Flow, Inside, cut, step, walk
from crosscut.layout.plan import Action, Site
from crosscut.layout.rules import derive
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.shapes import mlp_spec, transformer_spec

CFG = TransformerConfig(vocab=48, embed=24, layers=2, heads=4, mlp=36, bias=True, qk_norm=True)


def derived(spec_of=transformer_spec, cfg=CFG, seq: int | None = 4, **options):  # type: ignore[no-untyped-def]
    return derive(spec_of(cfg), Layout.of("dp=2,tp=2", **options), batch=4, seq=seq)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("module", ["embed", "layers.1.attn", "layers.0.mlp"])
def test_a_dropped_exit_reduction(monkeypatch: pytest.MonkeyPatch, sp: bool, module: str) -> None:
    real = sites.exit_actions
    monkeypatch.setattr(sites, "exit_actions", lambda d, *a: () if d.module == module else real(d, *a))
    missing = "`scatter_sum` (reduce_scatter)" if sp else "`leave` (all_reduce)"
    with pytest.raises(LayoutError) as error:
        derived(sp=sp)
    assert f"boundary {module!r} over tp" in str(error.value)
    assert f"partial sum and is read as whole: {missing} is missing at the exit" in str(error.value)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("module", ["layers.1.attn", "layers.0.mlp", "head"])
def test_a_dropped_entry(monkeypatch: pytest.MonkeyPatch, sp: bool, module: str) -> None:
    real = sites.entry_actions
    monkeypatch.setattr(sites, "entry_actions", lambda d, *a: () if d.module == module else real(d, *a))
    missing = "`gather` along seq is missing" if sp else "`enter` (all_reduce in backward) is missing"
    with pytest.raises(LayoutError) as error:
        derived(sp=sp)
    assert f"boundary {module!r} over tp" in str(error.value)
    assert missing in str(error.value)


def test_a_dropped_gather_of_the_lectures_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "exit_actions", lambda *a: ())
    with pytest.raises(LayoutError, match=r"`gather_replicated` .all_gather. is missing at the exit"):
        derived(mlp_spec, MLPConfig(dim=8), None)


def test_the_wrong_gather_of_the_lectures_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather whose backward is a reduce_scatter: the gradient would come back tp times too large."""
    real = sites.exit_actions

    def wrong(*args):  # type: ignore[no-untyped-def]
        return tuple(replace(a, fn="gather") for a in real(*args))

    monkeypatch.setattr(sites, "exit_actions", wrong)
    with pytest.raises(LayoutError, match="the gradient of the output is partial and nothing sums it"):
        derived(mlp_spec, MLPConfig(dim=8), None)


def test_a_doubled_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sites.exit_actions
    monkeypatch.setattr(sites, "exit_actions", lambda *a: (*real(*a), *real(*a)))
    with pytest.raises(LayoutError, match="`leave` at the exit meets a value that is replicated"):
        derived()


@pytest.mark.parametrize(
    "name, sp",
    [
        ("layers.0.attn_norm.weight", True),
        ("layers.0.attn.o.bias", True),
        ("layers.0.attn.q_norm.weight", False),
        ("layers.1.mlp.up.weight", False),
        ("norm.weight", True),
    ],
)
@pytest.mark.parametrize("wrong", ["drop", "add"])
def test_a_gradient_summed_over_other_axes(monkeypatch: pytest.MonkeyPatch, name: str, sp: bool, wrong: str) -> None:
    real = rules.sum_axes

    def changed(p, *args):  # type: ignore[no-untyped-def]
        axes = real(p, *args)
        if p.name != name:
            return axes
        return axes[:-1] if wrong == "drop" else (*axes, "tp") if "tp" not in axes else axes[1:]

    monkeypatch.setattr(rules, "sum_axes", changed)
    with pytest.raises(LayoutError, match=f"parameter {name}: its gradient is partial over .* but is summed over"):
        derived(sp=sp)


def test_one_axis_too_many_in_the_token_count(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rules._loss_plan
    monkeypatch.setattr(rules, "_loss_plan", lambda *a: replace(real(*a), label_axes=("dp", "tp")))
    with pytest.raises(LayoutError, match="the token count sums over it"):
        derived()


def test_a_forgotten_axis_in_the_token_count(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rules._loss_plan
    monkeypatch.setattr(rules, "_loss_plan", lambda *a: replace(real(*a), label_axes=()))
    with pytest.raises(LayoutError, match="the token count does not sum over it"):
        derived()


def test_a_loss_that_reads_cut_logits_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rules._loss_plan
    monkeypatch.setattr(rules, "_loss_plan", lambda *a: replace(real(*a), vocab_axes=()))
    with pytest.raises(LayoutError, match="cut along its last dim"):
        derived()


def test_every_action_from_every_state() -> None:
    """The algebra, in full: each action applies to one state and leads to one."""
    states = {"whole": WHOLE, "shared": SHARED, "owed": OWED, "seq": cut("seq"), "features": cut(FEATURES)}
    found = {
        (fn, dim, name): after
        for fn in ("enter", "leave", "gather", "gather_replicated", "scatter_sum", "slice")
        for dim in ((None,) if fn in ("enter", "leave") else ("seq", FEATURES))
        for name, flow in states.items()
        if (after := step(flow, Action(fn, ("tp",), 0), dim)) is not None
    }
    assert found == {
        ("enter", None, "whole"): SHARED,
        ("leave", None, "owed"): WHOLE,
        ("gather", "seq", "seq"): SHARED,
        ("gather", FEATURES, "features"): SHARED,
        ("gather_replicated", "seq", "seq"): WHOLE,
        ("gather_replicated", FEATURES, "features"): WHOLE,
        ("scatter_sum", "seq", "owed"): cut("seq"),
        ("scatter_sum", FEATURES, "owed"): cut(FEATURES),
        ("slice", "seq", "shared"): cut("seq"),
        ("slice", FEATURES, "shared"): cut(FEATURES),
    }


@pytest.mark.parametrize(
    "start, inside, message",
    [
        (cut("seq"), Inside(vocab=True), "needs all of them on every rank"),
        (WHOLE, Inside(rows=True), "the rows need an input cut along its features, but it is replicated"),
        (cut("seq"), Inside(rows=True), "the rows need an input cut along its features"),
        (OWED, Inside(columns=True), "the columns read a value that is partial"),
    ],
)
def test_values_that_weights_cannot_read(start: Flow, inside: Inside, message: str) -> None:
    site = Site("block", ("batch", "seq", "embed"), ("batch", "seq", "embed"))
    with pytest.raises(LayoutError, match="boundary 'block' over tp: ") as error:
        walk(site, "tp", start, inside, WHOLE)
    assert message in str(error.value)


def test_the_checker_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the mutations above would pass."""
    monkeypatch.setattr(rules, "check", lambda *a: None)
    monkeypatch.setattr(sites, "exit_actions", lambda *a: ())
    assert derived().rules()
    assert grads.check is not rules.check
