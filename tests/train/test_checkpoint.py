"""A checkpoint is whole or absent, is what was saved, loads under any layout, and a damaged one is refused by name."""

import json
import math
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open

from crosscut.models.config import MLPConfig
from crosscut.train import checkpoint_index as index_module
from crosscut.train import durable
from crosscut.train.checkpoint import Moment, SaveError, save
from crosscut.train.checkpoint_index import CheckpointError, Index, newest, saved_steps
from crosscut.train.checkpoint_load import load, read_parameters
from tests.train.worlds import held, make, train, transformer, whole, world

MLP = MLPConfig(dim=8, layers=2, form="pairs")


def write(ctx, mesh, cfg, run, steps=(0, 1), optimizer="adamw", **layout):
    """Train, save a checkpoint of the last step, and say what this rank held."""
    model, opt = make(ctx, cfg, mesh, optimizer, **layout)
    train(model, opt, cfg, steps)
    save(run, model, opt, Moment(len(steps), 7 * len(steps), "", {"rank": ctx.rank}))
    return held(model, opt), {name: plan.shape for name, plan in model.plan.params.items()}


def read(ctx, mesh, cfg, path, optimizer="adamw", **layout):
    """A model of other weights that loads the checkpoint, and what this rank then holds."""
    model, opt = make(ctx, cfg, mesh, optimizer, seed=9, **layout)
    train(model, opt, cfg, [5])  # state that loading must replace
    index = load(path, model, opt, seed=0)
    return held(model, opt), index.step, index.samples


def together(ranks):
    return whole([pieces for pieces, *_ in ranks[0]], ranks[1])


LAYOUTS = [
    ("dp=1", {}),
    ("tp=3", {}),
    ("pp=4", {"micro_batches": 4}),
    ("dp=3", {"micro_batches": 2}),
    ("pp=2,dp=2,tp=2", {"micro_batches": 2}),
]


@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_reads_what_any_layout_wrote(tmp_path, tied):
    """Bit for bit: parameters and optimizer state, scalars included. Each layout's file is read by two others."""
    cfg = transformer(tied=tied, bias=not tied, qk_norm=not tied)
    for i, (mesh, options) in enumerate(LAYOUTS):
        run = tmp_path / str(i)
        wrote = world(write, mesh, cfg, run, **options)
        shapes = wrote[0][1]
        expected = whole([pieces for pieces, _ in wrote], shapes)
        assert any(name.startswith("exp_avg_sq of") for name in expected)
        assert float(expected["step of embed.weight"]) == 2
        for other, other_options in (LAYOUTS[(i + 1) % len(LAYOUTS)], LAYOUTS[(i + 2) % len(LAYOUTS)]):
            got = world(read, other, cfg, run / "checkpoints" / "step-2", **other_options)
            assert all(step == 2 and samples == 14 for _, step, samples in got)
            found = whole([pieces for pieces, *_ in got], shapes)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value), (mesh, other, name)
        alone = read_parameters(run / "checkpoints" / "step-2")
        assert alone.keys() == shapes.keys()
        assert torch.equal(alone["head.weight"], expected["embed.weight" if tied else "head.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_optimizers_with_less_state(tmp_path, optimizer):
    cfg = transformer(kv_heads=2)
    wrote = world(write, "dp=2,tp=2", cfg, tmp_path, optimizer=optimizer)
    expected = whole([pieces for pieces, _ in wrote], wrote[0][1])
    assert any("momentum_buffer" in name for name in expected) == (optimizer == "momentum")
    got = world(read, "pp=2", cfg, tmp_path / "checkpoints" / "step-2", optimizer=optimizer, micro_batches=2)
    found = whole([pieces for pieces, *_ in got], wrote[0][1])
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_index_names_every_slice_once_and_files_hold_only_what_a_rank_is_first_to_hold(tmp_path):
    world(write, "dp=2,tp=2", transformer(tied=True), tmp_path)
    index = Index.open(tmp_path / "checkpoints" / "step-2")
    assert index.body["tied"] == {"head.weight": "embed.weight"}
    assert "head.weight" not in index.body["parameters"]
    entries = [*index.body["parameters"].values()]
    entries += [e for state in index.body["optimizer"]["state"].values() for e in state.values()]
    named = set()
    for entry in entries:
        boxes = [math.prod(sum(b - a for a, b in dim) for dim in s["ranges"]) for s in entry["slices"]]
        assert sum(boxes) == math.prod(entry["shape"])
        named |= {(s["file"], s["key"]) for s in entry["slices"]}
    named |= {(place["file"], place["key"]) for kinds in index.body["rng"].values() for place in kinds.values()}
    inside = set()
    for name in index.body["files"]:
        with safe_open(index.path / name, framework="pt") as file:
            inside |= {(name, key) for key in file.keys()}  # noqa: SIM118
    assert inside == named
    assert not [
        key for file, key in inside if file == "rank-2.safetensors" and not key.startswith("rng")
    ]  # dp=1: replicas
    assert [part["rank"] for part in index.body["progress"]] == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2"]
    assert sorted(path.name for path in index.path.iterdir()) == [
        "index.json",
        *(f"rank-{r}.safetensors" for r in range(4)),
    ]


# ---- random numbers


def draw_after(ctx, mesh, cfg, run, path=None, seed=0):
    model, opt = make(ctx, cfg, mesh, "sgd")
    torch.manual_seed(1000 + ctx.rank)
    torch.rand(3)
    if path is None:
        save(run, model, opt, Moment(4, 0, "", {}))
    else:
        load(path, model, opt, seed)
    return torch.rand(4)


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path):
    expected = world(draw_after, "dp=3", MLP, tmp_path)
    path = tmp_path / "checkpoints" / "step-4"
    again = world(draw_after, "dp=3", MLP, tmp_path, path)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert len({tuple(x.tolist()) for x in again}) == 3
    other = world(draw_after, "dp=2", MLP, tmp_path, path)
    assert not any(torch.equal(a, b) for a in other for b in expected)
    assert not torch.equal(other[0], other[1])
    assert all(torch.equal(a, b) for a, b in zip(other, world(draw_after, "dp=2", MLP, tmp_path, path), strict=True))
    assert not torch.equal(other[0], world(draw_after, "dp=2", MLP, tmp_path, path, 8)[0])


# ---- damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("saved")
    world(write, "dp=2,tp=2", transformer(), run)
    return run / "checkpoints" / "step-2"


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(bytes(data))


def newer(path):
    body = json.loads((path / "index.json").read_text())
    body["format_version"] = 99
    (path / "index.json").write_text(json.dumps(body))


def move_slice(path):
    text = (path / "index.json").read_text()
    assert '"sha256"' in text
    (path / "index.json").write_text(text.replace('"step": 2', '"step": 3', 1))


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda p: shutil.rmtree(p), "no such folder"),
        (lambda p: (p / "index.json").unlink(), "it has no index.json"),
        (lambda p: (p / "index.json").write_text("{"), "index.json is damaged"),
        (lambda p: (p / "index.json").write_text("[]"), "index.json is not the index of a checkpoint"),
        (move_slice, "index.json is damaged (its content does not match its digest)"),
        (newer, "format_version 99 is newer than 1"),
        (lambda p: (p / "rank-1.safetensors").unlink(), "rank-1.safetensors is missing"),
        (lambda p: flip(p / "rank-1.safetensors", -5), "rank-1.safetensors is damaged (its content does not match"),
        (lambda p: flip(p / "rank-3.safetensors", 20), "rank-3.safetensors is damaged"),
        (lambda p: (p / "rank-0.safetensors").write_bytes((p / "rank-0.safetensors").read_bytes()[:-1]), "bytes, "),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_nothing_is_changed(saved, tmp_path, damage, said):
    path = tmp_path / "checkpoints" / "step-2"
    shutil.copytree(saved, path)
    damage(path)

    def attempt(ctx, mesh):
        model, opt = make(ctx, transformer(), mesh, seed=9)
        before = held(model, opt)
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            load(path, model, opt, 0)
        after = held(model, opt)
        assert all(torch.equal(before[name][1], after[name][1]) for name in before)
        return str(error.value)

    for message in world(attempt, "dp=2"):
        assert said in message
        assert f"checkpoint {path}" in message
    if path.exists():
        with pytest.raises(CheckpointError, match="checkpoint"):
            read_parameters(path)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"layers": 5}, "layers.4.attn_norm.weight is not in it"),
        ({"layers": 3}, "this one has no layers.3.attn_norm.weight"),
        ({"mlp": 48}, "layers.0.mlp.gate.weight is (36, 24) there and (48, 24) here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, change, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        world(read, "dp=1", transformer(**change), saved)
    assert "it is of another model" in str(error.value)


def test_a_checkpoint_of_another_optimizer_is_refused(saved):
    with pytest.raises(ValueError, match=r"its optimizer is AdamW and this one SGD; keep optimizer\.name"):
        world(read, "dp=1", transformer(), saved, optimizer="sgd")


# ---- killed at any moment


class Killed(BaseException):
    """Not an Exception: nothing in the program may catch it and go on, as nothing goes on after kill -9."""


OPERATIONS = ("make_folder", "write_file", "rename", "remove", "sync_folder")


class Killer:
    """Wraps every operation on the disk; kills the run at the n-th, before it, half way through, or after."""

    def __init__(self, monkeypatch, at=None, when=None):
        self.count, self.at, self.when, self.killed = 0, at, when, False
        for name in OPERATIONS:
            monkeypatch.setattr(durable, name, self.wrap(name, getattr(durable, name)))

    def wrap(self, name, real):
        def call(path, *args):
            if self.killed:
                raise Killed  # the whole process is gone, all its ranks
            mine = self.count
            self.count += 1
            if mine != self.at:
                return real(path, *args)
            self.killed = True
            if self.when == "half" and name == "write_file":
                args[0](path)
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            elif self.when == "half" and name == "remove" and path.is_dir():
                next(iter(sorted(path.iterdir()))).unlink()
            elif self.when == "after":
                self.killed = False
                real(path, *args)
                self.killed = True
            raise Killed

        return call


def save_at(ctx, mesh, run, step):
    model, opt = make(ctx, MLP, mesh, "momentum", seed=step)
    train(model, opt, MLP, [step])
    save(run, model, opt, Moment(step, step, "", {}))
    return held(model, opt), {name: plan.shape for name, plan in model.plan.params.items()}


@pytest.mark.parametrize("scenario", ["a new step", "the same step again"])
def test_killed_at_any_operation_a_whole_checkpoint_is_left(tmp_path, monkeypatch, scenario):
    first = tmp_path / "first"
    before = world(save_at, "dp=2", first, 3)
    contents = {3: [whole([p for p, _ in before], before[0][1])]}
    step = 4 if scenario == "a new step" else 3

    def attempt(run, **kill):
        """Save another checkpoint (of other weights if it is the same step) and be killed."""
        with monkeypatch.context() as patch:
            killer = Killer(patch, **kill)
            done = None
            with nullcontext() if killer.at is None else pytest.raises(BaseException, match="Killed"):
                done = world(lambda ctx, mesh: save_other(ctx, mesh, run, step), "dp=2")
            return killer, done

    def save_other(ctx, mesh, run, step):
        model, opt = make(ctx, MLP, mesh, "momentum", seed=77)
        train(model, opt, MLP, [8])
        save(run, model, opt, Moment(step, step, "", {}))
        return held(model, opt), {name: plan.shape for name, plan in model.plan.params.items()}

    trial = tmp_path / "trial"
    shutil.copytree(first, trial)
    killer, done = attempt(trial)
    contents.setdefault(step, []).append(whole([p for p, _ in done], done[0][1]))
    total = killer.count
    assert total >= 10
    outcomes = set()
    for at in range(total):
        for when in ("before", "half", "after"):
            shutil.rmtree(trial)
            shutil.copytree(first, trial)
            killer, _ = attempt(trial, at=at, when=when)
            assert killer.killed
            found = newest(trial)
            values = read_parameters(found)
            saved_step = Index.open(found).step
            whole_ones = [
                i
                for i, content in enumerate(contents[saved_step])
                if all(torch.equal(content[n], v) for n, v in values.items())
            ]
            assert whole_ones, (at, when)
            outcomes.add((saved_step, whole_ones[0]))
            # and the next save of the same step works, and leaves nothing behind
            if when == "half":
                attempt(trial)
                assert list(saved_steps(trial))[-1] == step
                assert all(not path.name.startswith(".") for path in (trial / "checkpoints").iterdir())
    assert len(outcomes) == 2  # some kills left the old one, some the new one


def test_a_rank_that_cannot_write_stops_all_of_them_and_the_old_checkpoint_stays(tmp_path, monkeypatch):
    world(save_at, "dp=2", tmp_path, 3)
    real = durable.write_file

    def full(path, write):
        if path.name == "rank-1.safetensors":
            raise OSError(28, "No space left on device", str(path))
        real(path, write)

    monkeypatch.setattr(durable, "write_file", full)

    def attempt(ctx, mesh):
        with pytest.raises(SaveError) as error:
            save_at(ctx, mesh, tmp_path, 4)
        return str(error.value)

    messages = world(attempt, "dp=2")
    assert len(set(messages)) == 1
    assert "step-4 could not be written: No space left on device" in messages[0]
    assert list(saved_steps(tmp_path)) == [3]
    assert Index.open(newest(tmp_path)).step == 3


def test_versions_in_one_place():
    assert index_module.FORMAT_VERSION == 1
    text = index_module.seal({"step": 1})
    assert list(json.loads(text))[:2] == ["schema", "format_version"]
