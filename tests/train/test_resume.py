"""Going on: ten steps are five, a checkpoint, and five more. The run folder, and what a run leaves in it."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from crosscut import spawn
from crosscut.train import run_folder
from crosscut.train.checkpoint_index import Index, saved_steps
from crosscut.train.checkpoint_load import Reader, read_parameters
from crosscut.train.config import load_config
from crosscut.train.loop import DivergedError, Job, Trainer, run_rank
from crosscut.train.slices import whole

SMALL = {
    "model.vocab": 256,
    "model.embed": 24,
    "model.layers": 4,
    "model.heads": 6,
    "model.mlp": 36,
    "train.seq_len": 16,
    "train.global_batch_size": 12,
    "train.steps": 10,
    "train.eval_batches": 2,
    "train.log_every": 100,
    "optimizer.warmup_steps": 3,
    "run.save_every": 5,
    "run.sample_bytes": 0,
    "precision.compute": "fp64",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Text in which every place is different."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"part{i}.txt").write_text(" ".join(f"{i}.{j}" for j in range(120)))
    return folder


def run(folder, text, mesh="dp=1", checkpoint=None, **overrides):
    """A whole run in rank threads; returns its summary."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    config = load_config(None, {**SMALL, "data.path": str(text), "run.dir": str(folder), "mesh": mesh, **keys})
    job = Job(config, run_folder.start_of(config, checkpoint), to_stderr=True)
    return spawn(run_rank, job, world_size=config.layout.mesh.world_size, backend="threads")[0]


def state(path):
    """Everything in a checkpoint that training goes on from."""
    index = Index.open(path)
    out = read_parameters(path)
    with Reader(index) as reader:
        for name, entries in index.body["optimizer"]["state"].items():
            for key, entry in entries.items():
                out[f"{key} of {name}"] = reader.entry(key, entry, whole(tuple(entry["shape"])))
    return out, index.step, index.samples


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def norm_wise(found, expected, bound=1e-11):
    """||found - expected|| <= bound * max(||expected||, 1e-3 * the largest of its kind), per tensor."""
    assert found.keys() == expected.keys()
    kinds = {}
    for name, value in expected.items():
        kind = name.rpartition(" of ")[0]
        kinds[kind] = max(kinds.get(kind, 0.0), float(value.norm()))
    for name, value in expected.items():
        scale = max(float(value.norm()), 1e-3 * kinds[name.rpartition(" of ")[0]])
        assert float((found[name] - value).norm()) <= bound * scale, name


LAYOUTS = {
    "dp=1": {},
    "dp=2": {},
    "dp=2,tp=2": {},
    "pp=2": {"micro_batches": 2},
    "dp=3": {"micro_batches": 2},
    "pp=4": {"micro_batches": 4},
}


@pytest.mark.parametrize("mesh, name", [("dp=1", "adamw"), ("dp=2,tp=2", "adamw"), ("pp=2", "adamw"), ("dp=2", "sgd")])
def test_ten_steps_are_five_and_five_to_the_bit(tmp_path, text, mesh, name):
    options = {"optimizer.name": name, **LAYOUTS[mesh]}
    run(tmp_path / "ten", text, mesh, **options)
    expected, *place = state(tmp_path / "ten" / "checkpoints" / "step-10")
    assert place == [10, 120]
    # Stopped at five: as if killed then, the later checkpoint gone.
    shutil.copytree(tmp_path / "ten", tmp_path / "five")
    shutil.rmtree(tmp_path / "five" / "checkpoints" / "step-10")
    summary = run(tmp_path / "five", text, mesh, tmp_path / "five" / "checkpoints" / "step-5", **options)
    found, *place = state(tmp_path / "five" / "checkpoints" / "step-10")
    assert place == [10, 120]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    ten, five = metrics(tmp_path / "ten"), metrics(tmp_path / "five")
    assert [row["step"] for row in five] == list(range(1, 11))
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in five] == [row[key] for row in ten]
    assert len({row["loss"] for row in ten}) == 10
    both = summary["bytes"]
    assert both == json.loads((tmp_path / "ten" / "summary.json").read_text())["bytes"]
    assert all(pair["predicted"] == pair["counted"] > 0 for ops in both.values() for pair in ops.values())
    assert bool(both) == (mesh != "dp=1")


@pytest.mark.parametrize(
    "before, after", [("dp=1", "dp=2,tp=2"), ("dp=2,tp=2", "pp=2"), ("pp=2", "dp=3"), ("dp=3", "pp=4")]
)
def test_ten_steps_are_five_and_five_under_another_layout(tmp_path, text, before, after):
    options = {"optimizer.name": "sgd"}
    run(tmp_path / "ten", text, "dp=1", **options)
    run(tmp_path / "a", text, before, **options, **LAYOUTS[before])
    run(tmp_path / "b", text, after, tmp_path / "a" / "checkpoints" / "step-5", **options, **LAYOUTS[after])
    norm_wise(*(state(tmp_path / name / "checkpoints" / "step-10")[0] for name in ("b", "ten")))
    losses = {row["step"]: row["loss"] for row in metrics(tmp_path / "ten")}
    for row in metrics(tmp_path / "b"):
        assert row["loss"] == pytest.approx(losses[row["step"]], rel=1e-11)
    assert [row["step"] for row in metrics(tmp_path / "b")] == [6, 7, 8, 9, 10]
    assert list(saved_steps(tmp_path / "a")) == [5, 10]  # a run that another goes on from is left as it was


def test_a_bound_that_every_seed_passes_would_prove_nothing(tmp_path, text):
    run(tmp_path / "a", text, optimizer__name="sgd")
    run(tmp_path / "b", text, optimizer__name="sgd", optimizer__lr=3.0001e-3)
    with pytest.raises(AssertionError):
        norm_wise(*(state(tmp_path / name / "checkpoints" / "step-10")[0] for name in ("b", "a")))


def test_the_run_folder_says_what_happened(tmp_path, text):
    summary = run(tmp_path / "run", text, "dp=2,tp=2", train__eval_every=4)
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"layout.toml", "config.toml", "metrics.jsonl", "summary.json", "ledger", "checkpoints"}
    assert (tmp_path / "latest").resolve() == folder.resolve()
    assert run_folder.latest_run(tmp_path).resolve() == folder.resolve()
    written = json.loads((folder / "summary.json").read_text())
    assert {**written, "run": str(folder)} == {"schema": "crosscut.run", "format_version": 1, **summary}
    assert written["status"] == "finished"
    assert (written["world_size"], written["layout"]) == (4, "dp=2,tp=2")
    rows = metrics(folder)
    keys = {"step", "loss", "tokens", "tokens_per_s", "step_time_s", "grad_norm", "lr"}
    assert all(set(row) - {"val_loss"} == keys for row in rows)
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8]
    assert (written["first_loss"], written["last_loss"]) == (rows[0]["loss"], rows[-1]["loss"])
    assert rows[-1]["tokens"] == 10 * 12 * 16
    assert written["num_parameters"] == sum(
        t.numel() for t in read_parameters(folder / "checkpoints" / "step-10").values()
    )
    assert len(written["peak_memory_bytes"]) == 4
    assert 0 < written["unigram_loss"] < math.log(256)
    assert 0 < written["bigram_loss"] < math.log(256)
    # counted bytes are those of the ledgers, which hold evaluation and checkpoints apart
    counted = {}
    for rank in range(4):
        for row in json.loads((folder / "ledger" / f"rank-{rank}.json").read_text())["rows"]:
            if row["kind"] == "step":
                key = (row["axis"], row["op"])
                counted[key] = counted.get(key, 0) + row["bytes"]
    listed = {(axis, op): pair for axis, ops in written["bytes"].items() for op, pair in ops.items()}
    assert {key: pair["counted"] for key, pair in listed.items()} == {k: v for k, v in counted.items() if v}
    assert all(pair["predicted"] == pair["counted"] for pair in listed.values())
    again = load_config(folder / "config.toml")
    assert again.layout.to_toml() == (folder / "layout.toml").read_text()


def test_evaluation_is_the_same_under_every_layout(tmp_path, text):
    losses = [
        run(tmp_path / mesh, text, mesh, train__steps=0, **options)["val_loss"] for mesh, options in LAYOUTS.items()
    ]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)


def test_a_loss_that_is_no_number_stops_every_rank_with_a_sentence(tmp_path, text, monkeypatch):
    real = Trainer._cut

    def poisoned(self, inputs, labels):
        if self.step == 6:
            next(self.model.module.parameters()).data.fill_(float("nan"))
        return real(self, inputs, labels)

    monkeypatch.setattr(Trainer, "_cut", poisoned)
    with pytest.raises(RuntimeError) as error:
        run(tmp_path / "run", text, "dp=2")
    assert isinstance(getattr(error.value, "original", error.value), DivergedError)
    assert "step 7: the loss is nan" in str(error.value)
    assert "checkpoint step-5 is kept" in str(error.value)
    assert list(saved_steps(tmp_path / "run")) == [5]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


# ---- the folder


def start(folder, checkpoint=None):
    return run_folder.Start(folder, checkpoint)


def test_an_existing_folder_is_refused_replaced_or_gone_on_with(tmp_path, text):
    folder = tmp_path / "run"
    run(folder, text)
    with pytest.raises(
        ValueError, match=r"run folder .*run exists: --resume .*run goes on with it, --overwrite replaces it"
    ):
        run(folder, text)
    run(folder, text, run__overwrite=True, train__steps=3)
    assert list(saved_steps(folder)) == [3]
    assert len(metrics(folder)) == 3
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"thesis\.tex, which no run wrote"):
        run(folder, text, run__overwrite=True)
    assert (folder / "thesis.tex").exists()


def test_going_on_from_an_older_checkpoint_sets_the_later_ones_aside(tmp_path, text):
    folder = tmp_path / "run"
    run(folder, text, run__save_every=2)
    assert list(saved_steps(folder)) == [2, 4, 6, 8, 10]
    run(folder, text, checkpoint=folder / "checkpoints" / "step-4", run__save_every=0, train__steps=7)
    assert list(saved_steps(folder)) == [2, 4, 7]
    assert [row["step"] for row in metrics(folder)] == list(range(1, 8))
    assert (folder / "checkpoints" / "step-6.abandoned").is_dir()


def test_a_half_written_last_line_of_metrics_is_dropped(tmp_path, text):
    folder = tmp_path / "run"
    run(folder, text)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    run(folder, text, checkpoint=folder / "checkpoints" / "step-10", train__steps=11)
    assert [row["step"] for row in metrics(folder)] == list(range(1, 12))


def test_resume_latest_auto_and_by_name(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_folder.find_checkpoint("auto", None) is None
    with pytest.raises(ValueError, match="there is no run in runs/; --resume auto starts afresh"):
        run_folder.find_checkpoint("latest", None)
    assert run_folder.find_checkpoint("auto", "elsewhere") is None
    run("runs/one", text)
    newest = run_folder.find_checkpoint("latest", None)
    assert newest.resolve() == (tmp_path / "runs/one/checkpoints/step-10").resolve()
    assert run_folder.find_checkpoint("auto", None) == newest
    assert run_folder.find_checkpoint("runs/one", None).name == "step-10"
    assert run_folder.find_checkpoint("runs/one/checkpoints/step-5", None).name == "step-5"
    with pytest.raises(ValueError, match="--resume nowhere: no such run folder"):
        run_folder.find_checkpoint("nowhere", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--resume empty: no checkpoint in it"):
        run_folder.find_checkpoint("empty", None)


def test_latest_is_a_file_where_there_are_no_links(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(type(tmp_path), "symlink_to", refuse)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run_folder.point_latest(tmp_path / name)
    assert run_folder.latest_run(tmp_path) == tmp_path / "two"


def test_a_newer_run_folder_is_refused_by_name(tmp_path):
    run_folder.write_summary(tmp_path, {"loss": float("nan")})
    assert run_folder.read_summary(tmp_path)["loss"] is None
    body = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps({**body, "format_version": 7}))
    with pytest.raises(ValueError, match="format_version 7 is newer than 1"):
        run_folder.read_summary(tmp_path)
    with pytest.raises(ValueError, match="format_version 7 is newer than 1"):  # before going on changes anything
        run_folder.check_folder(start(tmp_path, tmp_path / "checkpoints" / "step-1"), False)


def test_going_on_makes_what_the_folder_has_lost(tmp_path, text):
    folder = tmp_path / "run"
    run(folder, text)
    shutil.rmtree(folder / "ledger")
    (folder / "metrics.jsonl").unlink()
    run(folder, text, checkpoint=folder / "checkpoints" / "step-10", train__steps=11)
    assert (folder / "ledger" / "rank-0.json").exists()


def test_names_of_run_folders_tell_date_and_layout(tmp_path):
    config = load_config(None, {"mesh": "pp=2,tp=2"})
    folder = run_folder.start_of(config, None, now=0.0).folder
    assert folder.parent.name == "runs"
    assert folder.name.startswith(("1970-01-01", "1969-12-31"))
    assert folder.name.endswith("-pp2-tp2")
    named = replace(config, run=replace(config.run, dir=str(tmp_path)))
    assert run_folder.start_of(named, None).folder == tmp_path


def test_a_checkpoint_that_cannot_be_used_is_refused_before_anything_starts(tmp_path, text):
    """What a dry run can know of it: its version, that its files are there and whole in size, and its model."""
    from crosscut.train.preflight import check

    folder = tmp_path / "run"
    run(folder, text, train__steps=5)
    (saved,) = saved_steps(folder).values()

    def refused(message, **overrides):
        keys = {**SMALL, "data.path": str(text), "run.dir": str(folder), "mesh": "tp=2", **overrides}
        config = load_config(None, keys)
        with pytest.raises(ValueError, match=message):
            check(config, run_folder.start_of(config, saved), check_folder=False)

    refused(r"another model: layers.0.mlp.gate.weight is \(36, 24\) there and \(48, 24\) here", **{"model.mlp": 48})
    file = saved / "rank-0.safetensors"
    whole_file = file.read_bytes()
    file.write_bytes(whole_file[:-1])
    refused("rank-0.safetensors is damaged")
    file.unlink()
    refused("rank-0.safetensors is missing")
    (saved / "index.json").write_text("{")
    refused("index.json is damaged")
