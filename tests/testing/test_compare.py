"""`capture` and `crosscut parity compare` on programs that are not crosscut's: right ones are equal, and each seeded
error is named."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial

import pytest
import torch

import crosscut as cc
from crosscut.cli.main import main
from crosscut.testing import capture, compare_captures
from tests.testing import programs

RIGHT = [("ddp", 2, {}), ("ddp", 3, {}), ("fsdp", 2, {}), ("fsdp", 3, {}), ("fsdp", 2, {"clip": True}), ("tp", 2, {}),
         ("tp", 4, {}), ("tp", 2, {"clip": True}), ("by_hand", 2, {}), ("by_hand", 4, {}), ("tp_by_hand", 2, {}),
         ("tp_by_hand", 3, {})]  # fmt: skip
WRONG = [
    ("ddp", 2, "one_over_n", r"out.bias.grad is 0.5 x the reference on every element = 1/ranks: it is averaged over"),
    ("ddp", 3, "one_over_n", r"is 0.333333 x the reference on every element = 1/ranks"),
    ("ddp", 2, "missing_sync", r"down.bias.grad differs between rank 0 and rank 1, .* their mean is the reference"),
    ("ddp", 2, "averaged", r"losses agree, and the ranks hold unequal numbers of tokens \(rank 0 \d+, rank 1 \d+\)"),
    ("fsdp", 2, "one_over_n", r"is 0.5 x the reference on every element = 1/dp"),
    ("fsdp", 2, "averaged", r"losses agree, and the ranks hold unequal numbers of tokens"),
    ("fsdp", 2, "norm", r"is scaled by another factor on each part: .*; the gradient norm differs between the ranks: "
     r"each measured what it holds alone, not summed over the ranks"),
    ("tp", 2, "norm", r"ranks scale by different factors; the gradient norm differs between the ranks: each"),
    ("tp", 2, "missing_sync", r"norm.weight.grad differs between rank 0 and rank 1, .* the average over tp is missing"),
    ("by_hand", 2, "one_over_n", r"is 0.5 x the reference on every element = 1/ranks"),
    ("by_hand", 2, "missing_sync", r"norm.weight.grad differs .* their sum is the reference: the sum over ranks is"),
    ("by_hand", 2, "averaged", r"losses agree, and the ranks hold unequal numbers of tokens"),
    ("by_hand", 2, "wrong_rank", r"up.weight.grad differs .*; rank 0 has it right, rank 1 wrong"),
    ("by_hand", 2, "stale", r"out.bias.grad is the sum of this step's and 2 x that of the step before: it was not"),
    ("tp_by_hand", 2, "missing_sum", r"norm.bias.grad differs .* their sum is the reference"),
]  # fmt: skip


@pytest.fixture(scope="module")
def ref(tmp_path_factory):  # type: ignore[no-untyped-def]
    """The captures of the trusted run, without and with clipping."""
    folders = {clip: tmp_path_factory.mktemp("capture") / f"ref{clip}" for clip in (False, True)}
    for clip, folder in folders.items():
        programs.alone(folder, clip=clip)
    return folders


@pytest.mark.parametrize("program, size, options", RIGHT)
def test_a_right_program_is_equal(pool, ref, tmp_path, program, size, options):  # type: ignore[no-untyped-def]
    backend = ("gloo", "shm")[size == 2]
    run = tmp_path / "run"
    pool.run(getattr(programs, program), run, **options, world_size=size, backend=backend)
    result = compare_captures(ref["clip" in options], run)
    assert result.verdict.equal, result.verdict.sentence()
    assert result.run.world_size == size
    assert {d.kind for d in result.verdict.differences} == {"loss", "norm", "gradient", "parameter"}
    assert len(result.verdict.differences) == programs.STEPS * (2 + 2 * 8)


@pytest.mark.parametrize("program, size, bug, says", WRONG)
def test_a_seeded_error_is_named(pool, ref, tmp_path, program, size, bug, says, capsys):  # type: ignore[no-untyped-def]
    run = tmp_path / "run"
    pool.run(getattr(programs, program), run, bug, world_size=size, backend="shm")
    assert main(["parity", "compare", str(ref[bug == "norm"]), str(run)]) == 1
    shown = capsys.readouterr().out
    assert "NOT EQUAL: the first to diverge, at step" in shown
    assert re.search(says, shown.splitlines()[1]), shown


def test_a_crosscut_layout_can_be_compared(ref, tmp_path):  # type: ignore[no-untyped-def]
    cc.spawn(programs.with_crosscut, tmp_path / "run", world_size=4, backend="threads")
    result = compare_captures(ref[False], tmp_path / "run")
    assert result.verdict.equal, result.verdict.sentence()


def test_json_and_exit_codes(ref, tmp_path, capsys):  # type: ignore[no-untyped-def]
    programs.alone(tmp_path / "run")
    assert main(["parity", "compare", str(ref[False]), str(tmp_path / "run"), "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert list(body)[:3] == ["schema", "version", "equal"]
    assert body["worst"]["error_over_bound"] == 0
    assert body["failures"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_below_fp64(tmp_path, capsys, dtype):  # type: ignore[no-untyped-def]
    """The same run with its rows in another order: inside the default of its dtype, and inside a measured bound."""
    order = torch.randperm(programs.ROWS, generator=torch.Generator().manual_seed(3))
    folders = {name: str(tmp_path / name) for name in ("ref", "run", "noise", "wrong")}
    programs.alone(folders["ref"], dtype=dtype)
    programs.alone(folders["run"], dtype=dtype, order=order)
    programs.alone(folders["noise"], dtype=dtype, order=order.flip(0))
    programs.alone(folders["wrong"], dtype=dtype, order=order[: programs.ROWS // 2])
    name = str(dtype).removeprefix("torch.")
    assert main(["parity", "compare", folders["ref"], folders["run"]]) == 0
    assert f"the default for {name})" in capsys.readouterr().out
    assert main(["parity", "compare", folders["ref"], folders["run"], "--noise", folders["noise"]]) == 0
    assert "8 x the distance of" in capsys.readouterr().out
    for options in ([], ["--noise", folders["noise"]], ["--rtol", "0.01"]):
        assert main(["parity", "compare", folders["ref"], folders["wrong"], *options]) == 1


def test_other_weights_at_the_start_are_named(ref, tmp_path):  # type: ignore[no-untyped-def]
    programs.alone(tmp_path / "run", seed=1)
    said = compare_captures(ref[False], tmp_path / "run").verdict.sentence()
    assert "the runs start from different weights (up.weight)" in said


def test_a_later_capture_replaces_an_older_one(ref, tmp_path):  # type: ignore[no-untyped-def]
    programs.alone(tmp_path / "run", seed=1, steps=3)
    programs.alone(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-0", "step-1"]
    assert compare_captures(ref[False], tmp_path / "run").verdict.equal


def test_only_the_first_steps_are_kept(tmp_path):  # type: ignore[no-untyped-def]
    programs.alone(tmp_path / "run", steps=5)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-0", "step-1", "step-2"]


# ---- bad input ------------------------------------------------------------------------------------------------------


def refused(capsys, *words: str) -> str:  # type: ignore[no-untyped-def]
    assert main(["parity", "compare", *words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert len(out.err.splitlines()) == 1
    return out.err


def test_folders_that_are_no_captures(ref, tmp_path, capsys):  # type: ignore[no-untyped-def]
    good = str(ref[False])
    assert "there is no such folder" in refused(capsys, good, str(tmp_path / "none"))
    assert "is a file; give the folder that crosscut.testing.capture" in refused(capsys, good, __file__)
    (tmp_path / "empty").mkdir()
    assert "no capture in it" in refused(capsys, good, str(tmp_path / "empty"))
    assert "give one" in refused(capsys, good, good, "--noise", good, "--rtol", "0.1")
    for rtol in ("-1", "nan", "inf"):
        assert f"--rtol {rtol}: must be above 0 and finite" in refused(capsys, good, good, "--rtol", rtol)


def test_half_written_and_newer_captures(ref, tmp_path, capsys):  # type: ignore[no-untyped-def]
    good, run = str(ref[False]), tmp_path / "run"
    (run / ".step-0.tmp").mkdir(parents=True)
    assert "half written" in refused(capsys, good, str(run))
    shutil.rmtree(run)
    shutil.copytree(good, run)
    file = run / "step-1" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "cut short" in refused(capsys, good, str(run))
    index = run / "step-0" / "index.json"
    text = index.read_text()
    index.write_text(text[:-20])
    assert "not the index of a capture" in refused(capsys, good, str(run))
    index.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    assert "format_version 2 is newer" in refused(capsys, good, str(run))


def test_damaged_captures(ref, tmp_path, capsys):  # type: ignore[no-untyped-def]
    good, run = str(ref[False]), tmp_path / "run"
    shutil.copytree(good, run)
    (run / "step-x").mkdir()
    shutil.copy(run / "step-0" / "index.json", run / "step-x" / "index.json")
    assert main(["parity", "compare", good, str(run)]) == 0
    capsys.readouterr()
    index, file = run / "step-0" / "index.json", run / "step-0" / "rank-0.safetensors"
    whole = json.loads(index.read_text())
    for key in ("files", "losses", "tensors", "world_size", "step", "grad_norms"):
        index.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
        assert "step-0" in refused(capsys, good, str(run))
    index.write_text(json.dumps(whole))
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert "step-0: damaged (SafetensorError" in refused(capsys, good, str(run))


def test_a_reference_that_is_not_finite_is_refused(tmp_path, capsys):  # type: ignore[no-untyped-def]
    for folder, value in (("good", 1.0), ("bad", float("nan"))):
        model = torch.nn.Linear(3, 2).double()
        model.weight.grad, model.bias.grad = torch.full_like(model.weight, value), torch.ones(2).double()
        capture(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / folder)
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    assert "bad: weight.grad holds NaN or infinite values at step 0" in refused(capsys, bad, good)
    assert "bad: weight.grad holds NaN" in refused(capsys, good, str(tmp_path / "bad"), "--noise", bad)
    assert main(["parity", "compare", good, bad]) == 1


def test_json_may_come_before_compare_and_a_layout_may_not(ref, tmp_path, capsys):  # type: ignore[no-untyped-def]
    good, again = str(ref[False]), str(tmp_path / "again")
    shutil.copytree(good, again)
    assert main(["parity", "--json", str(tmp_path / "out.json"), "compare", good, again]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["equal"] is True
    assert main(["parity", "--mesh", "dp=2", "compare", good, good]) == 2
    assert "drop --mesh" in capsys.readouterr().err
    assert "unknown flag --mesh" in (said := refused(capsys, good, good, "--mesh", "dp=2"))
    assert "did you mean '--mesh'" not in said


def test_captures_of_other_steps_and_models(ref, tmp_path, capsys, monkeypatch):  # type: ignore[no-untyped-def]
    good = str(ref[False])
    programs.alone(tmp_path / "steps", steps=1)
    assert "holds steps [0, 1]" in refused(capsys, good, str(tmp_path / "steps"))
    monkeypatch.setattr(programs, "HIDDEN", 8)
    programs.alone(tmp_path / "shapes")
    said = refused(capsys, good, str(tmp_path / "shapes"))
    assert "different models: up.weight is (12, 7)" in said
    monkeypatch.setattr(programs, "net", lambda *_: torch.nn.Sequential(torch.nn.Linear(7, 5)).double())
    programs.alone(tmp_path / "names")
    assert "different models:" in refused(capsys, good, str(tmp_path / "names"))


@pytest.mark.parametrize("what, says", [("slice", "does not fit its shape"), ("name", "is no parameter of Net")])
def test_bad_names_fail_on_every_rank(pool, tmp_path, what, says):  # type: ignore[no-untyped-def]
    said = pool.run(programs.fails, tmp_path / "run", what, world_size=2, backend="shm")
    assert all(says in one for one in said)
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_folder_with_something_else_is_left_alone(tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds 'thesis.tex', which is no capture"):
        programs.alone(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_model_without_gradients_and_one_shared_by_threads(tmp_path):  # type: ignore[no-untyped-def]
    """Ranks that are threads: `ctx` says who they are. A frozen parameter has no gradient."""

    def run(ctx, frozen):  # type: ignore[no-untyped-def]
        model = programs.net()
        model.up.weight.requires_grad = not frozen
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        x, y = programs.batch(0)
        (programs.loss_sum(model, x, y) / programs.tokens(y)).backward()
        optimizer.step()
        from crosscut.testing import capture

        capture(model, optimizer, tmp_path / f"{ctx.world_size}", ctx=ctx)

    for size in (1, 3):
        cc.spawn(partial(run, frozen=True), world_size=size, backend="threads")
    assert compare_captures(tmp_path / "1", tmp_path / "3").verdict.equal
    index = json.loads((tmp_path / "3" / "step-0" / "index.json").read_text())
    assert "up.weight" not in index["tensors"]["gradient"]
    assert index["tensors"]["parameter"]["up.weight"]["pieces"][0]["ranks"] == [0, 1, 2]
