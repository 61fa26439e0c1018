"""Training in bf16: it learns as fp32 does, what it saves is fp32 and loads under any layout and dtype."""

import json
from pathlib import Path

import pytest
import torch

from crosscut.cli.main import main
from crosscut.parallel.supported import DTYPES
from crosscut.train.checkpoint_index import Index
from tests.train.test_checkpoint import read, write
from tests.train.test_resume import run, state, text  # noqa: F401  # text is a fixture
from tests.train.worlds import make, transformer, whole, world

LAYOUTS = [
    ("dp=2", {"zero": 1, "compute": "bf16"}),
    ("tp=3", {"compute": "fp32"}),
    ("dp=4", {"zero": 3, "compute": "bf16"}),  # 30 rows over 4 ranks
    ("pp=2", {"compute": "bf16"}),
]


def test_checkpoints_are_fp32_and_every_dtype_reads_them(tmp_path):
    """Bit for bit, tied weights and optimizer state included."""
    cfg = transformer(tied=True, layers=2, mlp=30)
    for i, (mesh, options) in enumerate(LAYOUTS):
        folder = tmp_path / str(i)
        wrote = world(write, mesh, cfg, folder, **options)
        expected = whole([pieces for pieces, _ in wrote], wrote[0][1])
        assert {value.dtype for value in expected.values()} == {torch.float32}
        index = Index.open(folder / "checkpoints" / "step-2")
        assert {entry["dtype"] for entry in index.body["parameters"].values()} == {"float32"}
        other, other_options = LAYOUTS[(i + 1) % len(LAYOUTS)]
        got = world(read, other, cfg, index.path, **other_options)
        found = whole([pieces for pieces, *_ in got], wrote[0][1])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), (mesh, other)


def initial(ctx, mesh, cfg, **layout):
    model, _ = make(ctx, cfg, mesh, **layout)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_masters_begin_with_what_fp32_begins_with():
    (wide,) = world(initial, "dp=1", transformer(), compute="fp32")
    (masters,) = world(initial, "dp=1", transformer(), compute="bf16")
    assert all(torch.equal(wide[name], p) for name, p in masters.items())
    assert any(not torch.equal(p, p.bfloat16().float()) for p in masters.values())


def test_ten_steps_are_five_and_five(tmp_path, text):  # noqa: F811
    """Bit for bit in bf16; and the checkpoint goes on in fp32, under another layout, from the same numbers."""
    options = {"mesh": "dp=2", "zero": "1", "micro_batches": 2, "model.layers": 2, "precision.compute": "bf16"}
    run(tmp_path / "whole", text, **options)
    at5 = tmp_path / "whole" / "checkpoints" / "step-5"
    summary = run(tmp_path / "second", text, checkpoint=at5, **options)
    ended = [state(tmp_path / name / "checkpoints" / "step-10")[0] for name in ("whole", "second")]
    assert all(torch.equal(ended[1][name], value) for name, value in ended[0].items())
    assert all(p["predicted"] == p["counted"] > 0 for ops in summary["bytes"].values() for p in ops.values())
    wide = {"mesh": "tp=2", "model.layers": 2, "precision.compute": "fp32"}
    other = run(tmp_path / "wide", text, checkpoint=at5, **wide)
    assert other["step"] == 10
    assert other["val_loss"] == pytest.approx(summary["val_loss"], rel=2e-3)


SMALL = """
model = {embed = 32, layers = 2, heads = 4, mlp = 64}
data = {path = "text"}
train = {steps = 30, global_batch_size = 8, seq_len = 16, eval_batches = 2, log_every = 100}
optimizer = {lr = 0.01, warmup_steps = 5}
run = {sample_bytes = 0, backend = "threads"}
mesh = {dp = 2}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    Path("small.toml").write_text(SMALL)
    Path("text").mkdir()
    for i in range(12):
        Path(f"text/part{i}.txt").write_text(" ".join(f"{i}.{j}" for j in range(150)))
    return tmp_path


def test_the_command_line_trains_in_bf16_as_in_fp32(here, capsys):
    losses = {}
    for dtype in ("fp32", "bf16"):
        argv = ["train", "small.toml", "--zero", "1", "--precision.compute", dtype, "--run.dir", dtype]
        assert main(argv) == 0
        capsys.readouterr()
        summary = json.loads(Path(dtype, "summary.json").read_text())
        losses[dtype] = summary["val_loss"]
        assert summary["last_loss"] < summary["first_loss"] - 2
        assert all(p["predicted"] == p["counted"] for ops in summary["bytes"].values() for p in ops.values())
        assert 'compute = "' + dtype in Path(dtype, "layout.toml").read_text()
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]


@pytest.mark.parametrize("zero", range(4))
def test_dry_run_counts_narrow_copies_and_wide_masters(here, capsys, zero):
    """dp=2, all that is stored divides by two. Bytes sent: activations half as many as in fp32, gradients as many."""
    found = {}
    for dtype in ("fp32", "bf16"):
        argv = ["train", "small.toml", "--mesh", "dp=2", "--zero", str(zero), "--precision.compute", dtype]
        assert main([*argv, "--dry-run", "--json", "-"]) == 0
        found[dtype] = json.loads(capsys.readouterr().out)
    wide, mixed = (found[dtype]["state_bytes"][0] for dtype in DTYPES if dtype != "fp64")
    numbers = found["fp32"]["num_parameters"]
    masters, copies = 4 * numbers // (2 if zero else 1), 2 * numbers * (zero < 3)
    assert wide["parameters"] == 4 * numbers // (2 if zero == 3 else 1)
    assert mixed == {**wide, "parameters": masters + copies}
    assert found["bf16"]["checkpoint_bytes"] == found["fp32"]["checkpoint_bytes"] == 12 * numbers
    sent = {dtype: {row["op"]: row["bytes"] for row in body["rows"]} for dtype, body in found.items()}
    for op, size in sent["fp32"].items():
        assert sent["bf16"][op] * (2 if op == "all_gather" else 1) == size
