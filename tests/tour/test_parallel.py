"""`crosscut tour dp | tp | pp`: what is printed is what was computed, and it equals one device."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from crosscut.cli.main import main
from crosscut.tour import parallel, show_parallel

WAYS = [
    ("dp", 1, {}),
    ("dp", 2, {}),
    ("dp", 3, {}),
    ("dp", 4, {}),
    ("tp", 2, {}),
    ("tp", 3, {}),
    ("tp", 4, {"form": "pairs"}),
    ("pp", 2, {}),
    ("pp", 3, {"schedule": "gpipe"}),
    ("pp", 4, {"micro_batches": 1}),
]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{way[0]}{way[1]}{'-'.join(map(str, way[2].values()))}")
def step(request):
    name, size, options = request.param
    return parallel.run(name, size, **options)


def test_it_is_the_step_of_one_device(step):
    assert step.is_equal, [d for d in step.differences if d.error_over_bound > 1]
    assert {d.kind for d in step.differences} == {"loss", "norm", "gradient", "parameter"}
    assert step.largest("gradient") < 1e-13
    for name, grad in step.one_device.grads[0].items():
        assert grad.norm() > 0, name


def test_the_ranks_slices_cover_every_weight_and_every_row(step):
    size = len(step.ranks)
    rows = [row for rank in step.ranks for row in rank.rows]
    copies = 1 if step.name == "dp" else size
    assert sorted(rows) == sorted(list(range(step.batch)) * copies)
    for name, whole in step.one_device.params.items():
        counts = torch.zeros(whole.shape, dtype=torch.int64)
        for rank in step.ranks:
            held = rank.held(name)
            if held is not None:
                (a, b), (c, d) = held
                counts[a:b, c:d] += 1
        assert (counts == (size if step.name == "dp" else 1)).all(), name


def test_bytes_are_predicted(step):
    assert any(rank.sent for rank in step.ranks) == (len(step.ranks) > 1)
    for rank in step.ranks:
        assert [s.bytes for s in rank.sent] == [s.predicted_bytes for s in rank.sent]


def test_what_each_parallelism_sends(step):
    if len(step.ranks) == 1:
        return
    ops = {(s.what, s.op, s.axis) for rank in step.ranks for s in rank.sent}
    expected = {
        ("dp", "gather"): ("gradients", "all_reduce", "dp"),
        ("tp", "gather"): ("layers forward", "all_gather", "tp"),
        ("tp", "pairs"): ("layers forward", "all_reduce", "tp"),
        ("pp", "gather"): ("stage 0 -> 1 forward", "send", "pp"),
    }[step.name, step.cfg.form]
    assert expected in ops


def test_losses_of_the_rows_differ_and_average_to_the_loss():
    step = parallel.run("dp", 4)
    own = [rank.own_loss for rank in step.ranks]
    assert len(set(own)) == 4
    assert sum(own) / 4 == pytest.approx(step.one_device.losses[0], rel=1e-12)


def test_a_difference_is_said_and_is_an_error(capsys, monkeypatch):
    right = parallel.run("dp", 2)
    wrong = replace(right, differences=(replace(right.differences[0], error_over_bound=2.0), *right.differences[1:]))
    assert not wrong.is_equal
    monkeypatch.setattr(parallel, "run", lambda *args, **kwargs: wrong)
    assert main(["tour", "dp"]) == 1
    assert "NOT the step of one device" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100])
def test_what_is_printed(step, width):
    out = io.StringIO()
    show_parallel.step(step, Console(file=out, width=width, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "the step is equal to the step of one device" in text
    assert all(f"rank {r}" in text for r in range(len(step.ranks)))
    for name, norm in step.one_device.grads[0].items():
        row = [line for line in text.splitlines() if line.startswith(f"  {name} ") and "[" not in line]
        assert row[-1].split()[-1] == f"{float(norm.norm()):.6f}", name
    if len(step.ranks) > 1:
        assert "bytes over all ranks counted" in text
    if step.name == "pp":
        assert f"Schedule {step.layout.schedule.name}" in text
        assert "F0" in text
        assert "B0" in text


def test_the_command(capsys):
    assert main(["tour", "pp", "--schedule", "gpipe", "--micro-batches", "2", "--json", "-"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["schema"], out["version"], out["equal"]) == ("crosscut.tour.pp", 1, True)
    assert [row["rank"] for row in out["rows"]] == [0, 1]
    assert list(out["rows"][0]["parameters"]) == ["layers.0.weight", "layers.1.weight"]
    assert out["rows"][0]["parameters"]["layers.0.weight"] == [[0, 8], [0, 8]]
    assert out["one_device"]["loss"] == pytest.approx(out["rows"][1]["loss"], rel=1e-12)
    sent = {s["what"]: s["bytes"] for s in out["rows"][0]["sent"]}
    assert sent["stage 0 -> 1 forward"] == 4 * 8 * 8  # 4 rows of 8 numbers of 8 bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pp", "--schedule", "1f2b"], "unknown schedule '1f2b'; did you mean '1f1b'?"),
        (["pp", "--schedule", "interleaved"], "schedule 'interleaved' is not executable yet; use gpipe or 1f1b"),
        (["pp", "--micro-batches", "0"], "micro_batches=0 must be at least 1"),
        (["dp", "--micro-batches", "2"], "--micro-batches goes with tour pp, not with dp"),
        (["collectives", "--form", "pairs"], "--form goes with tour tp, not with collectives"),
    ],
)
def test_bad_usage(words, message, capsys):
    assert main(["tour", *words]) == 2
    assert capsys.readouterr().err == f"crosscut tour: error: {message}\n"
