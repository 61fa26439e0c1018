"""Where each value comes from, that the merged config reads back, and that a mistake is one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from crosscut.layout.layout import Layout
from crosscut.train import toml
from crosscut.train.config import load_config
from crosscut.train.keys import keys_of
from crosscut.train.model import plan_of
from crosscut.train.sections import LAYOUT_TABLES, MODEL_KEYS, SECTIONS

CONFIG = """
[model]
embed = 96
heads = 4

[train]
steps = 7
seq_len = 32

[mesh]
dp = 2
tp = 2

[schedule]
micro_batches = 2
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def test_flag_beats_file_beats_default_and_origins_say_so(config_file):
    config = load_config(config_file, {"train.steps": "9", "seed": "5", "optimizer.betas": "0.8,0.9"})
    assert (config.train.steps, config.origins["train.steps"]) == (9, "--train.steps")
    assert (config.train.seed, config.origins["train.seed"]) == (5, "--seed")
    assert (config.train.seq_len, config.origins["train.seq_len"]) == (32, str(config_file))
    assert config.optimizer.betas == (0.8, 0.9)
    assert "train.log_every" not in config.origins
    assert config.layout == Layout.of("dp=2,tp=2", micro_batches=2)
    assert config.origins["mesh"] == str(config_file)


def test_layout_file_replaces_the_layout_of_the_config_and_flags_adjust_it(config_file, tmp_path):
    other = tmp_path / "layout.toml"
    other.write_text(Layout.of("pp=2,tp=2", micro_batches=4).to_toml())
    config = load_config(config_file, {"layout": str(other)})
    assert config.layout == Layout.of("pp=2,tp=2", micro_batches=4)
    assert config.origins["mesh"] == str(other)
    config = load_config(config_file, {"layout": str(other), "micro_batches": "8", "sp": True})
    assert config.layout == Layout.of("pp=2,tp=2", micro_batches=8, sp=True)
    assert config.origins["schedule"] == "--micro-batches"
    config = load_config(config_file, {"layout": str(other), "mesh": "dp=3"})
    assert config.layout == Layout.of("dp=3", micro_batches=4)
    assert config.origins["mesh"] == "--mesh"
    config = load_config(config_file, {"mesh.tp": "4", "schedule.name": "gpipe"})
    assert config.layout == Layout.of("dp=2,tp=4", micro_batches=2, schedule="gpipe")


def test_world_size_fills_auto_and_stands_in_for_a_mesh():
    assert load_config(None, {"mesh": "dp=auto,tp=2"}, world_size=6).layout == Layout.of("dp=3,tp=2")
    assert load_config(None, {}, world_size=3).layout == Layout.of("dp=3")
    assert load_config().layout == Layout.of("dp=1")
    with pytest.raises(ValueError, match="2 ranks but the world size is 3"):
        load_config(None, {"mesh": "tp=2"}, world_size=3)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"mesh": "dp=2,tp=2,pp=2", "sp": True, "zero": "1", "micro_batches": "4"},
        {"model": "mlp", "model.form": "pairs", "optimizer.name": "sgd"},
        {"model": "models/own.py:build", "model.args": '{ width = 3, names = ["a", "b"] }'},
        {"data.path": 'a "quoted"\tpath\\x', "run.dir": "runs/ünï"},
        {"model.kv_heads": "2", "model.head_dim": "32", "train.deterministic": "true"},
    ],
)
@pytest.mark.parametrize("comments", [True, False])
def test_printed_config_reads_back_equal(tmp_path, overrides, comments):
    config = load_config(None, overrides)
    path = tmp_path / "printed.toml"
    path.write_text(config.to_toml(comments), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert toml.parse(again.to_toml(), "again") == toml.parse(config.to_toml(), "first")


def test_every_value_of_the_printed_config_has_its_origin(config_file):
    text = load_config(config_file, {"optimizer.lr": "1e-3"}).to_toml()
    for line in text.splitlines():
        if line.startswith("lr "):
            assert line.endswith("# --optimizer.lr")
        if line.startswith("embed "):
            assert line.endswith(f"# {config_file}")
        if line.startswith(("vocab = 256", "momentum ", "[store]")):
            assert line.endswith("# default")
        if line.startswith("[mesh]"):
            assert line.endswith(f"# {config_file}")


def test_the_mlp_has_defaults_of_its_own_which_a_file_still_beats(config_file):
    assert load_config(None, {"model": "mlp"}).train.global_batch_size == 128
    assert load_config(None, {"model": "mlp", "train.global_batch_size": "6"}).train.global_batch_size == 6
    config = load_config(config_file, {"model": "mlp"})  # the file's heads are of the model that the flag replaced
    assert config.kind == "mlp"
    assert config.train.steps == 7


@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"train.stepz": "3"}, "--train.stepz: unknown key train.stepz; did you mean 'steps'?"),
        ({"model.lr": "3"}, "unknown key model.lr; it is optimizer.lr"),
        ({"trian.steps": "3"}, "unknown section 'trian'; did you mean 'train'?"),
        ({"train.steps": "abc"}, "train.steps = 'abc' (from --train.steps): must be a whole number"),
        ({"train.steps": "2.5"}, "train.steps = 2.5"),
        ({"steps": "-1"}, "train.steps = -1 (from --steps): must be >= 0"),
        ({"train.deterministic": "1"}, "train.deterministic = 1 (from --train.deterministic): must be true or false"),
        (
            {"optimizer.name": "adamx"},
            "optimizer.name = 'adamx' (from --optimizer.name): must be one of",
        ),
        ({"optimizer.betas": "0.9"}, "optimizer.betas = [0.9] (from --optimizer.betas): must be a list of 2 numbers"),
        (
            {"optimizer.betas": "[0.9,1]"},
            "optimizer.betas = [0.9, 1] (from --optimizer.betas): each must be >= 0 and < 1",
        ),
        ({"optimizer.lr": "inf"}, "optimizer.lr = inf (from --optimizer.lr): must be finite"),
        ({"optimizer.lr": "nan"}, "optimizer.lr = nan (from --optimizer.lr): must be finite"),
        ({"seed": "9" * 20}, "(from --seed): must be below 2^63"),
        ({"data.val_fraction": "1"}, "data.val_fraction = 1 (from --data.val_fraction): must be > 0 and < 1"),
        ({"model": "transfomer"}, "model.name = 'transfomer' is unknown; did you mean 'transformer'?"),
        ({"model": "mlp", "model.heads": "3"}, "model.heads is a key of transformer; model.name is 'mlp'"),
        ({"model.embed": "100"}, "embed = 100 is not a multiple of heads = 6"),
        ({"mesh": "dq=2"}, "unknown mesh axis 'dq'"),
        ({"zero": "x"}, "--zero x: must be a whole number"),
        ({"micro_batches": "0"}, "micro_batches = 0 must be a whole number of at least 1"),
        ({"schedule": "gpip"}, "did you mean 'gpipe'?"),
        ({"schedule.naem": "gpipe"}, "--schedule.naem: unknown key schedule.naem; did you mean 'name'?"),
        ({"cuts.head": "tp"}, "unknown dim 'head'; did you mean 'heads'?"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_fix(overrides, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_config(None, overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, said",
    [
        ("[trian]\nsteps = 3\n", "unknown section [trian]; did you mean 'train'?"),
        ("[train]\nstep = 3\n", "unknown key train.step; did you mean 'steps'?"),
        ("[train]\nsteps = '3'\n", "train.steps = '3'"),
        ("[train\n", "not valid TOML"),
        ("train = 3\n", "[train] is a section"),
        ("[model]\nname = 'mlp'\nheads = 3\n", "model.heads is a key of transformer"),
        ("[mesh]\nexperts = 3\n", "unknown mesh axis 'experts'"),
        ("mesh = 3\n", "must be a section"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_config(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_said():
    with pytest.raises(ValueError, match=r"nowhere\.toml: no such file"):
        load_config("nowhere.toml")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_the_configs_of_the_repository_fit_their_layout(path):
    config = load_config(path)
    plan = plan_of(config)
    assert plan.layout.mesh.world_size == config.layout.mesh.world_size
    assert "mesh" in config.origins


def test_every_key_of_a_model_is_a_key_of_its_section_and_no_section_is_called_like_a_layout_table():
    for keys in MODEL_KEYS.values():
        assert set(keys) <= set(keys_of(SECTIONS["model"]))
    assert not set(SECTIONS) & set(LAYOUT_TABLES)


def test_config_needs_no_torch():
    code = "import sys; from crosscut.train.config import load_config; load_config(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("value", ["none", "[]", ""])
def test_a_cut_by_flag_holds_on_the_mesh_of_another_flag(value):
    """Whichever comes first: the usual cuts of --mesh are taken, and then changed."""
    for flags in (["mesh", "cuts.vocab"], ["cuts.vocab", "mesh"]):
        given = {"mesh": "tp=2", "cuts.vocab": value, "model.vocab": "257"}
        config = load_config(None, {**{flag: given[flag] for flag in flags}, "model.vocab": "257"})
        assert config.layout.cuts["mlp"] == ("tp",)
        assert not config.layout.cuts.get("vocab")
