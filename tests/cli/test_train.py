"""The command line: what a user types, what comes out, and that every mistake is one line with an exit code."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from crosscut.cli.main import main

REPO = Path(__file__).resolve().parents[2]
SMALL = """
[model]
embed = 24
layers = 2
heads = 4
mlp = 32

[data]
path = "text"

[train]
steps = 6
global_batch_size = 8
seq_len = 16
eval_batches = 2
log_every = 2

[optimizer]
warmup_steps = 2

[run]
save_every = 3
sample_bytes = 12
backend = "threads"

[mesh]
dp = 2
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a small config and some text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    Path("small.toml").write_text(SMALL)
    Path("text").mkdir()
    for i in range(12):
        Path(f"text/part{i}.txt").write_text(" ".join(f"{i}.{j}" for j in range(150)))
    return tmp_path


def call(capsys, *argv):
    """(exit code, stdout, stderr) of a command line."""
    code = main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def process(*argv, **kwargs):
    """The same in a process of its own, through `python -m crosscut`."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        env.pop(name, None)
    command = [sys.executable, "-m", "crosscut", *map(str, argv)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


# ---- end to end


def test_a_run_in_processes_and_what_can_be_done_with_it(here, capsys):
    """Two Gloo processes train; the run is then evaluated, sampled, gone on with under another layout."""
    ranks = process("train", "small.toml", "--backend", "gloo", "--run.dir", "runs/one", "--json", "result.json")
    out, err = ranks.communicate(timeout=100)
    assert ranks.returncode == 0, err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["device", "back", "checked", "layout"]  # tests run checked
    assert "gloo" in lines[1]
    assert "dp=2, 2 ranks: from small.toml" in lines[3]
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["2/6", "4/6", "6/6"]
    assert re.search(r"validation loss \d\.\d+ nats a byte \(counting bytes reaches", out)
    assert "a sample of what it writes:" in out
    result = json.loads(Path("result.json").read_text())
    assert list(result)[:2] == ["schema", "version"]
    assert result["status"] == "finished"
    pair = result["bytes"]["dp"]["all_reduce"]
    assert pair["predicted"] == pair["counted"] > 0
    rows = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert os.readlink("runs/latest") == "one"

    threads = ["--backend", "threads"]
    code, out, err = call(capsys, "train", "--resume", "latest", "--eval-only", "--mesh", "tp=2", *threads)
    assert (code, err) == (0, "")
    assert f"validation loss {result['val_loss']:.4f}" in out
    code, out, _ = call(capsys, "sample", "runs/latest", "--prompt", "1.2 ", "--max-bytes", 9)
    assert (code, out[:4]) == (0, "1.2 ")
    assert call(capsys, "sample", "runs/one", "--prompt", "1.2 ", "--max-bytes", 9)[1] == out  # the same seed
    assert call(capsys, "sample", "runs/one/checkpoints/step-3", "--step", 3)[0] == 0
    argv = ["train", "--resume", "runs/one", "--mesh", "pp=2", "--micro-batches", 2, "--steps", 8, "--json", "-"]
    code, out, err = call(capsys, *argv, *threads)
    assert code == 0, err
    result = json.loads(out)  # stdout is JSON alone, the lines are on stderr
    assert (result["step"], result["layout"]) == (8, "pp=2 1f1b micro_batches=2")
    assert set(result["bytes"]) == {"dp", "pp"}  # of the whole run
    assert "goes on from runs/one/checkpoints/step-6" in err
    rows = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    code, out, _ = call(capsys, "train", "--resume", "auto", *threads)
    assert code == 0
    assert "nothing to train: at step 8 of 8" in out


def test_one_rank_without_a_mesh_and_the_mlp(here, capsys):
    code, out, err = call(
        capsys, "train", "--model", "mlp", "--model.dim", 16, "--steps", 2, "--train.global_batch_size", 4,
        "--train.eval_batches", 1, "--run.dir", "mlp", "--deterministic",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "layout    dp=1, 1 rank: from the default: one rank" in out
    assert re.search(r"^validation loss \d", out, re.M)
    assert "sample" not in out.replace("crosscut sample", "")
    assert json.loads(Path("mlp/summary.json").read_text())["bytes"] == {}


OWN_MODEL = """
import threading

import torch

import crosscut

DIMS = crosscut.Dims({"embed.weight": ("vocab", "embed"), "head.weight": ("vocab", "embed")})

class Own(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = torch.nn.Embedding(256, width)
        self.head = torch.nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids))

def build(width=8):
    return Own(width)

class Broken(Own):
    calls = 0
    def forward(self, ids):
        self.calls += 1
        if threading.current_thread().name == "crosscut-rank-1" and self.calls == 3:
            raise RuntimeError("the tap is dry")
        return super().forward(ids)

def build_broken():
    return Broken(8)
"""


def test_a_model_of_ones_own(here, capsys):
    Path("own.py").write_text(OWN_MODEL)
    argv = ["train", "small.toml", "--model", "own.py:build", "--run.dir", "own"]
    code, out, err = call(capsys, *argv, "--model.args", "{ width = 12 }")
    assert code == 0, err
    assert json.loads(Path("own/summary.json").read_text())["num_parameters"] == 2 * 256 * 12
    code, out, _ = call(capsys, "train", "--resume", "own", "--dry-run")
    assert code == 0
    assert "6,144 parameters" in out


def test_print_config_is_a_config_with_origins(here, capsys):
    code, out, _ = call(capsys, "train", "small.toml", "--optimizer.lr=0.002", "--seed", "4", "--print-config")
    assert code == 0
    assert re.search(r"^lr = 0\.002 +# --optimizer\.lr$", out, re.M)
    assert re.search(r"^seed = 4 +# --seed$", out, re.M)
    assert re.search(r"^embed = 24 +# small\.toml$", out, re.M)
    assert re.search(r"^eps = 1e-08 +# default$", out, re.M)
    Path("printed.toml").write_text(out)
    again = call(capsys, "train", "printed.toml", "--print-config")[1]
    assert re.sub(" +#.*", "", again) == re.sub(" +#.*", "", out)
    assert not Path("runs").exists()


@pytest.mark.parametrize("zero, mesh", [("1", "dp=2"), ("2", "rep=2,dp=2"), ("3", "dp=2,tp=2")])
def test_training_with_a_store_sends_what_was_predicted(here, capsys, zero, mesh):
    code, out, err = call(capsys, "train", "small.toml", "--mesh", mesh, "--zero", zero, "--run.dir", "runs/store")
    assert code == 0, err
    assert f"zero={zero}" in out
    for op in ("reduce_scatter", "all_gather"):
        assert re.search(rf"^bytes +dp {op}: .* as predicted$", out, re.M)
    assert "were predicted" not in out


def test_dry_run_starts_nothing_and_says_what_would_be_sent(here, capsys):
    argv = ["train", "small.toml", "--mesh", "dp=2,tp=2,pp=2", "--micro-batches", "2", "--dry-run"]
    code, out, err = call(capsys, *argv)
    assert (code, err) == (0, "")
    for word in ("layout", "model", "batch", "text", "disk", "folder", "memory", "bytes"):
        assert re.search(f"^{word} ", out, re.M)
    assert not Path("runs").exists()
    code, out, _ = call(capsys, *argv, "--json", "-")
    found = json.loads(out)
    assert found["schema"] == "crosscut.dry_run"
    rows = {(row["pp"], row["axis"]) for row in found["rows"]}
    assert rows >= {(0, "dp"), (1, "dp"), (0, "tp"), (1, "tp"), (0, "pp")}
    assert all(set(row) == {"pp", "axis", "op", "bytes"} for row in found["rows"])
    # weights, gradients and two AdamW numbers of 4 bytes: the parameters are cut over tp and pp
    whole = found["num_parameters"] * 4
    kept = [sum(stage.values()) for stage in found["state_bytes"]]
    assert whole * 4 / 4 < sum(kept) / 2 < whole * 4 / 3
    assert call(capsys, *argv, "--train.global_batch_size", "6")[0] == 2


# ---- stopped from outside


def alive_in_session(sid):
    """The command lines of the session's processes, those apart that have ended and are not yet reaped."""
    found = []
    for one in psutil.process_iter():
        try:
            if os.getsid(one.pid) == sid and one.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(one.cmdline()))
        except (psutil.Error, OSError):  # noqa: PERF203 (it ended while we looked)
            continue
    return found


@pytest.mark.parametrize("number, code, backend", [(signal.SIGTERM, 143, "gloo"), (signal.SIGINT, 130, "threads")])
def test_a_signal_stops_all_ranks_at_once_and_leaves_the_run_readable(here, number, code, backend):
    argv = ["train", "small.toml", "--backend", backend, "--steps", "100000", "--run.dir", "run"]
    ranks = process(*argv, "--run.save_every", "50", start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while not (Path("run/checkpoints/step-50").exists() and Path("run/metrics.jsonl").read_text().count("\n") > 55):
            assert ranks.poll() is None, ranks.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(ranks.pid, number)
        _, err = ranks.communicate(timeout=30)
        assert time.monotonic() - began < 10
        assert ranks.returncode == code, err
        assert "Traceback" not in err
        assert "interrupted" in err
        assert "death signal" not in err  # elastic's own words
        while left := alive_in_session(ranks.pid):
            assert time.monotonic() - began < 15, left
            time.sleep(0.1)
    finally:
        if ranks.poll() is None:
            os.killpg(ranks.pid, signal.SIGKILL)
    assert json.loads(Path("run/summary.json").read_text())["status"] == "interrupted"
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert main(["train", "--resume", "run", "--eval-only", "--backend", "threads"]) == 0


def test_under_torchrun_this_process_is_a_rank(here):
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "crosscut"]
    argv = ["train", "small.toml", "--run.backend", "gloo", "--mesh", "tp=2"]
    done = subprocess.run([*command, *argv], env=env, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("back end  gloo") == 1  # rank 0 alone speaks
    runs = [path for path in Path("runs").iterdir() if path.name != "latest"]
    assert len(runs) == 1
    assert json.loads((runs[0] / "summary.json").read_text())["status"] == "finished"


# ---- mistakes


def one_line(err):
    assert err.startswith("crosscut")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


BAD = [
    (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    (["train", "--mesj", "dp=2"], "unknown flag --mesj; did you mean '--mesh'?"),
    (["train", "small.toml", "more"], "unexpected argument 'more'"),
    (["train", "--world-size", "two"], "argument --world-size: invalid int value: 'two'"),
    (["train", "missing.toml"], "missing.toml: no such file"),
    (["train", "small.toml", "--train.stepz", "3"], "did you mean 'steps'?"),
    (["train", "small.toml", "--trian.steps", "3"], "did you mean 'train'?"),
    (["train", "small.toml", "--train.steps", "many"], "train.steps = 'many' (from --train.steps): must be a"),
    (["train", "small.toml", "--mesh", "dp=2,tp=2", "--world-size", "3"], "has 4 ranks but the world size is 3"),
    (["train", "small.toml", "--mesh", "dq=2"], "unknown mesh axis 'dq'"),
    (["train", "small.toml", "--mesh", "dp=2,dp=3"], "gives axis 'dp' twice"),
    (["train", "small.toml", "--cuts.seq", "dp"], "axis 'dp' is cut twice: it divides both batch and seq"),
    (["train", "small.toml", "--cuts.head", "tp"], "did you mean 'heads'?"),
    (["train", "small.toml", "--mesh", "tp=3"], "vocab=256 cannot be cut over tp=3; use tp in {1,2,4,"),
    (["train", "small.toml", "--mesh", "tp=3", "--model.vocab", "258"], "heads=4 cannot be cut over tp=3"),
    (["train", "small.toml", "--mesh", "tp=4", "--model.kv_heads", "2"], "kv_heads=2 cannot be cut over tp=4"),
    (["train", "small.toml", "--mesh", "pp=3"], "layers"),
    (["train", "small.toml", "--schedule", "gpip"], "did you mean 'gpipe'?"),
    (["train", "small.toml", "--mesh", "pp=2", "--micro-batches", "0"], "micro_batches = 0"),
    (["train", "small.toml", "--micro-batches", "3"], "8"),
    (["train", "small.toml", "--train.global_batch_size", "7"], "7"),
    (["train", "small.toml", "--data.path", "nothing"], "data.path = 'nothing': no such file or folder"),
    (["train", "small.toml", "--data.path", "empty.txt"], "data.path = 'empty.txt': the file is empty"),
    (["train", "small.toml", "--train.seq_len", "90000"], "shorter than one sequence of 90000"),
    (["train", "small.toml", "--model.vocab", "100"], "model.vocab = 100 cannot hold text as bytes"),
    (["train", "small.toml", "--model", "tranformer"], "did you mean 'transformer'?"),
    (["train", "small.toml", "--model", "none.py:build"], "there is no file none.py"),
    (["train", "small.toml", "--model", "own.py:bild"], "own.py has no function bild"),
    (["train", "small.toml", "--model", "own.py:print"], "own.py has no function print"),
    (["train", "small.toml", "--model", "no_model.py:build"], "build gave a tuple, not a torch.nn.Module"),
    (["train", "small.toml", "--model", "no_model.py:needs"], "needs cannot be called with model.args: missing"),
    (["train", "small.toml", "--model", "own.py:build", "--mesh", "tp=2,pp=2"], ""),
    (["train", "small.toml", "--backend", "glue"], "backend='glue' is unknown"),
    (["train", "small.toml", "--backend", "nccl"], "nccl"),
    (["train", "small.toml", "--zero", "4"], "zero"),
    (["train", "small.toml", "--resume", "latest"], "there is no run in runs/"),
    (["train", "small.toml", "--resume", "nowhere"], "--resume nowhere: no such run folder"),
    (["train", "small.toml", "--run.dir", "text"], "run folder text exists"),
    (["train", "small.toml", "--run.dir", "text", "--overwrite"], "which no run wrote"),
    (["train", "small.toml", "--run.dir", "small.toml"], "is a file"),
    (["train", "small.toml", "--run.dir", "small.toml/run", "--dry-run"], "small.toml is a file; give a folder"),
    (["train", "small.toml", "--json", "nowhere/x.json", "--dry-run"], "--json nowhere/x.json: cannot be written"),
    (["sample", "nowhere"], "nowhere: no such run folder"),
    (["sample", "text"], "text: no checkpoint in it"),
    (["sample", "text", "--temperature", "-1"], "--temperature -1.0: must be 0 or more"),
    (["sample", "text", "--temperature", "nan"], "--temperature nan: must be 0 or more, and finite"),
    (["sample", "text", "--model.embed", "3"], "sample takes no config"),
]


@pytest.mark.parametrize("argv, said", BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_a_mistake_is_one_line_exit_code_2_and_nothing_is_written(here, capsys, argv, said):
    Path("own.py").write_text(OWN_MODEL)
    Path("no_model.py").write_text("def build():\n    return 1, 2\n\n\ndef needs(width):\n    pass\n")
    Path("empty.txt").write_bytes(b"")
    before = sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts)
    code, out, err = call(capsys, *argv)
    assert said in one_line(err)
    assert (code, out) == (2, "")
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts) == before


def test_a_rank_that_raises_is_named_and_debug_shows_the_traceback(here, capsys):
    Path("own.py").write_text(OWN_MODEL)
    argv = ["train", "small.toml", "--model", "own.py:build_broken", "--run.dir", "run"]
    code, _, err = call(capsys, *argv)
    assert code == 1
    last = err.splitlines()[-1]
    assert re.match(
        r"crosscut train: error: rank 1 of 2 raised RuntimeError: the tap is dry; stopped rank 0 after", last
    )
    assert "Traceback" not in err
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    code, _, err = call(capsys, *argv, "--overwrite", "--debug")
    assert code == 1
    assert "in forward" in err


def test_a_damaged_newest_checkpoint_is_refused_by_name(here, capsys):
    assert call(capsys, "train", "small.toml", "--run.dir", "run")[0] == 0
    path = Path("run/checkpoints/step-6/rank-0.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    code, _, err = call(capsys, "train", "--resume", "run", "--steps", "7")
    assert code == 2
    assert "checkpoint run/checkpoints/step-6: rank-0.safetensors is damaged" in one_line(err)
    assert json.loads(Path("run/summary.json").read_text())["status"] == "finished"  # untouched
    assert call(capsys, "train", "--resume", "run/checkpoints/step-3", "--steps", "7")[0] == 0


def test_help_and_usage_are_quick(capsys):
    for argv in (["--help"], ["train", "--help"], ["sample", "--help"], [], ["--version"]):
        code, out, err = call(capsys, *argv)
        assert (code, err) == (0, "")
        assert out
    code = "import sys; from crosscut.cli.main import main; main(['train', '-h']); assert 'torch' not in sys.modules"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - began < 2  # half a second on an idle machine
