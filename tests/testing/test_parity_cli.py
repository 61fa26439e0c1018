"""`crosscut parity`: the small matrix, one layout, what it refuses, and the example that finds a wrong gradient."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crosscut.cli.main import main
from crosscut.layout.layout import Layout
from crosscut.testing import assert_parity, matrix
from crosscut.testing.parity import single_device

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_find_a_wrong_gradient.py"


def body_of(capsys, *words: str, code: int = 0):  # type: ignore[no-untyped-def]
    assert main(["parity", *words, "--json", "-"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_small_matrix_is_equal(capsys):  # type: ignore[no-untyped-def]
    body = body_of(capsys, "--matrix", "small")
    assert body["equal"] is True
    assert body["failures"] == []
    assert body["worst"]["error_over_bound"] < 0.1
    count = Counter(row["outcome"] for row in body["layouts"])
    assert count["equal"] >= 50
    assert set(count) <= {"equal", "refused"}
    assert all(row["why"] for row in body["layouts"] if row["outcome"] == "refused")
    ways = {
        way for row in body["layouts"] if row["outcome"] == "equal" for way in row["layout"].replace(",", " ").split()
    }
    assert {"dp=2", "dp=3", "tp=2", "tp=3", "pp=2", "pp=3", "rep=2", "sp", "zero=1", "zero=2", "zero=3"} <= ways


def test_the_full_matrix_holds_every_mesh() -> None:
    cells = matrix.full(8)
    assert len({cell.mesh for cell in cells}) == 96  # ways to write 1 to 8 as a product of five factors
    assert len(set(map(str, cells))) > 1000
    assert {cell.kind for cell in cells} == {"transformer", "mlp"}
    executed = [cell for cell in cells[::7] if not matrix.refusal(cell)]
    assert len(executed) > 90


@pytest.mark.parametrize(
    "words",
    [("--mesh", "dp=3"), ("--mesh", "tp=3", "--sp"), ("--mesh", "pp=2,dp=2", "--micro-batches", "3", "--zero", "1"),
     ("--model", "mlp", "--mesh", "dp=2,tp=2"), ("--mesh", "dp=2", "--model.layers", "3", "--zero", "3"),
     ("--mesh", "dp=2", "--dtype", "fp32", "--steps", "3"), ("--mesh", "dp=2,tp=2", "--dtype", "bf16"),
     ("--mesh", "dp=2", "--dtype", "bf16", "--precision.reduce", "bf16")],
)  # fmt: skip
def test_one_layout(capsys, words):  # type: ignore[no-untyped-def]
    body = body_of(capsys, *words)
    assert list(body)[:3] == ["schema", "version", "equal"]
    assert body["equal"] is True
    assert [row["outcome"] for row in body["layouts"]] == ["equal"]


def test_on_processes(capsys):  # type: ignore[no-untyped-def]
    assert main(["parity", "--mesh", "dp=2", "--backend", "gloo", "--steps", "1"]) == 0
    assert "EQUAL: the largest error is" in capsys.readouterr().out


TEXT_MODEL = """
import torch, crosscut as cc
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 6)
        self.head = torch.nn.Linear(6, 256)
    def forward(self, ids):
        return self.head(self.embed(ids))
DIMS = cc.Dims({"embed.weight": "vocab embed", "head.weight": "vocab embed", "head.bias": "vocab"})
"""


def test_a_model_of_ones_own(capsys, tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "own.py").write_text(TEXT_MODEL)
    for mesh in ("dp=2", "tp=2", "dp=2,tp=2"):
        assert body_of(capsys, "--model", f"{tmp_path / 'own.py'}:Model", "--mesh", mesh)["equal"] is True
    assert main(["parity", "--model", f"{tmp_path / 'own.py'}:Model", "--mesh", "dp=2", "--backend", "shm"]) == 2
    assert "on --backend threads" in capsys.readouterr().err


def test_a_wrong_layout_exits_1_and_says_why(capsys, monkeypatch):  # type: ignore[no-untyped-def]
    from tests.mutations import bugs

    bugs.gradients_are_averaged(monkeypatch)
    assert main(["parity", "--mesh", "dp=2"]) == 1
    said = capsys.readouterr().out
    assert (
        "NOT EQUAL: the first to diverge, at step 0: head.weight.grad is 0.5 x the reference on every element" in said
    )
    body = body_of(capsys, "--mesh", "dp=2", code=1)
    first = body["failures"][0]
    assert (first["name"], first["kind"], first["factor"]) == ("head.weight", "gradient", pytest.approx(0.5))
    assert first["factor_name"] == "1/dp"
    assert body["layouts"][0]["outcome"] == "not equal"


@pytest.mark.parametrize(
    "words, says",
    [
        (("--mesh", "dp=2", "--dtype", "bf16", "--precision.reduce", "fp16"), "precision reduce='fp16' cannot be"),
        (("--mesh", "dp=2", "--precision.reduce", "bf16"), 'loses what compute = "fp64" keeps'),
        (("--mesh", "cp=2"), "cp=2 cannot be"),
        (("--mesh", "dp=2", "--steps", "0"), "--steps 0: at least one"),
        (("--mesh", "dp=2", "--seed", str(2**63)), f"--seed {2**63}: must be below 2^62"),
        (("--matrix", "small", "--mesh", "dp=2"), "drop --mesh"),
        (("--matrix", "small", "--world-size", "2"), "drop --world-size"),
        (("--mesh", "dq=2"), "unknown mesh axis 'dq'"),
        (("--mesh", "dp=2", "--json", "no/such/folder/x.json"), "cannot be written"),
        (("--matrix", "huge"), "invalid choice"),
        (("--model", "examples/03_own_model.py:MyModel"), "use crosscut.testing.assert_parity with a batch of its own"),
        (("--model", "no.py:f"), "there is no file no.py"),
        (("contrast", "a", "b"), "invalid choice: 'contrast'"),
        (("compare", "a"), "RUN"),
    ],
)
def test_bad_usage(capsys, monkeypatch, words, says):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(EXAMPLE.parents[1])
    if words == ("--mesh", "cp=2") and not matrix.refusal(matrix.Cell("cp=2", (), "transformer", 0)):
        pytest.fail("cp is executed now: take this case out")
    assert main(["parity", *words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert len(out.err.splitlines()) == 1
    assert says in out.err


def test_assert_parity_takes_one_batch_or_several() -> None:
    cell = matrix.Cell("dp=2,tp=2", (), "transformer", 2)
    cfg = matrix._config(cell, cell.layout())
    build, spec, loss_fn = matrix.model_of(cfg)
    data = matrix.batches_for("transformer", cfg, cell.layout(), 2)
    assert len(assert_parity(build, spec.dims, data[0], Layout.of("dp=2,tp=2"), loss_fn=loss_fn, steps=2)) == 4
    reports = assert_parity(build, spec.dims, data, Layout.of("dp=2,tp=2"), loss_fn=loss_fn, dtype="fp32")
    assert len(reports[0].losses) == 2
    assert reports[0].grads[0]["norm.weight"].dtype == torch.float32


def test_what_differs_raises_with_the_sentence(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from tests.mutations import bugs

    bugs.gradients_are_summed_twice(monkeypatch)
    cell = matrix.Cell("dp=2", (), "transformer", 0)
    cfg = matrix._config(cell, cell.layout())
    build, spec, loss_fn = matrix.model_of(cfg)
    data = matrix.batches_for("transformer", cfg, cell.layout(), 1)
    with pytest.raises(AssertionError, match=r"dp=2 is not the single-device step .*\n.* is 2 x the reference"):
        assert_parity(build, spec.dims, data, Layout.of("dp=2"), loss_fn=loss_fn)


def test_below_fp64_correct_runs_are_inside_and_a_wrong_one_is_not() -> None:
    """A few of the runs whose count stands in docs/parity.md."""
    from tests.testing.noise_evidence import correct_runs

    found = correct_runs(6)
    assert len(found) == 5
    for name, errors in found:
        assert len(errors) >= 6 * 10, name
        assert 0 < max(errors) < 1, name


FEW = {
    "dp=3 micro_batches=2 zero=2 transformer", "rep=2,dp=2 zero=3 transformer", "tp=3 micro_batches=2 sp transformer",
    "dp=2,tp=2 sp zero=3 transformer", "pp=3 micro_batches=4 transformer", "tp=4 transformer", "tp=3 mlp",
    "pp=2,dp=2,tp=2 micro_batches=2 sp zero=3 transformer", "dp=2 micro_batches=2 zero=1 transformer",
}  # fmt: skip


def test_layouts_in_bf16_are_inside_the_noise_of_one_device_and_send_what_was_predicted() -> None:
    """A few of the small matrix (all of it: docs/parity.md)."""
    cells = [cell for cell in matrix.small() if str(cell) in FEW]
    assert len(cells) == len(FEW)
    for row in matrix.run_matrix(cells, dtype="bf16"):
        assert row.outcome == "equal", (row.cell, row.why)
        assert row.verdict is not None
        assert 0 < row.verdict.worst.error_over_bound < 0.5


@pytest.mark.parametrize(
    "name, says, over",
    [
        ("a_norm_gradient_is_divided_by_tp", r"attn_norm.weight.grad is 0\.\d+ x .* = 1/tp: a sum over tp is miss", 3),
        ("gradients_are_averaged", r"head.weight.grad is 0\.33\d+ x the reference on every element = 1/dp", 30),
        ("norm_gradients_are_not_summed_over_tp", r"norm.weight.grad differs .*: the sum over tp is missing", 30),
        ("a_micro_batch_is_lost", r"head.weight.grad lacks the contribution of micro-batch 1", 10),
        ("zero_grad_is_forgotten", r"the sum of this step's and that of the step before: it was not set to zero", 10),
        ("every_replica_counts", r"the gradient norm counts what several ranks hold once on each of them", 10),
    ],
)
def test_a_bug_is_seen_and_named_through_the_noise_of_bf16(name, says, over) -> None:  # type: ignore[no-untyped-def]
    from tests.mutations.bugs import BUGS
    from tests.mutations.score import try_bug

    result = try_bug(replace(next(bug for bug in BUGS if bug.name == name), says=says), dtype="bf16")
    assert result.found == "parity"
    assert result.named, result.text
    assert result.error_over_bound > over


def test_reference_in_pieces_is_the_reference() -> None:
    cell = matrix.Cell("dp=2", (("micro_batches", 2),), "transformer", 0)
    cfg = matrix._config(cell, cell.layout())
    build, _, loss_fn = matrix.model_of(cfg)
    data = matrix.batches_for("transformer", cfg, cell.layout(), 2, rows_each=2)
    from crosscut.testing.noise import reordered

    whole, pieces = single_device(build, data, loss_fn), reordered(build, data, loss_fn, torch.float64, 3, 4, 3)
    for name, grad in whole.grads[1].items():
        torch.testing.assert_close(pieces.grads[1][name], grad, rtol=1e-9, atol=1e-12)
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-12)


def test_the_example_finds_the_forgotten_parameter(tmp_path):  # type: ignore[no-untyped-def]
    judge = runpy.run_path(str(EXAMPLE))["main"]
    said = judge(str(tmp_path))
    assert said.startswith("the first to diverge, at step 0: 0.weight.grad differs between rank 0")
    assert said.endswith("their sum is the reference: the sum over ranks is missing")
    assert judge(str(tmp_path), "3.bias").startswith("the first to diverge, at step 0: 3.bias.grad")
    assert judge(str(tmp_path), None).startswith("equal: ")
    assert len(EXAMPLE.read_text().splitlines()) < 60
