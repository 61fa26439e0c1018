"""Checkpoints of sharded parameters: written by shards, read under any layout, with any store or none."""

import math

import pytest
import torch

from crosscut.train.checkpoint_index import Index
from tests.train.test_checkpoint import read, write
from tests.train.test_resume import norm_wise, run, state, text  # noqa: F401  # text is a fixture
from tests.train.worlds import transformer, whole, world

# Odd shards everywhere: dim 0 is 24, 36 or 4, over 5 and 7 ranks.
LAYOUTS = [
    ("dp=5", {"zero": 1}),
    ("dp=2,tp=2", {"zero": 3, "micro_batches": 2}),
    ("dp=1", {}),
    ("rep=2,dp=2", {"zero": 2}),
    ("pp=2,dp=2", {"zero": 1, "micro_batches": 2}),
    ("dp=3", {"zero": 3, "reshard": "step"}),
    ("pp=2,dp=2,tp=3", {"zero": 3}),
    ("dp=6", {"zero": 2}),
]


@pytest.mark.parametrize("tied", [False, True])
def test_every_store_reads_what_any_store_wrote(tmp_path, tied, monkeypatch):
    """Bit for bit: parameters and optimizer state, scalars included."""
    monkeypatch.setattr("tests.train.worlds.BATCH", 60)
    cfg = transformer(tied=tied, bias=not tied, qk_norm=not tied)
    for i, (mesh, options) in enumerate(LAYOUTS):
        folder = tmp_path / str(i)
        wrote = world(write, mesh, cfg, folder, **options)
        shapes = wrote[0][1]
        expected = whole([pieces for pieces, _ in wrote], shapes)
        other, other_options = LAYOUTS[(i + 1) % len(LAYOUTS)]
        got = world(read, other, cfg, folder / "checkpoints" / "step-2", **other_options)
        found = whole([pieces for pieces, *_ in got], shapes)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), (mesh, other)


def test_each_rank_writes_its_shards_and_every_number_once(tmp_path):
    world(write, "dp=4", transformer(), tmp_path, zero=3)
    index = Index.open(tmp_path / "checkpoints" / "step-2")
    entries = [*index.body["parameters"].values()]
    entries += [e for named in index.body["optimizer"]["state"].values() for e in named.values()]
    for entry in entries:
        boxes = [math.prod(sum(b - a for a, b in dim) for dim in s["ranges"]) for s in entry["slices"]]
        assert sum(boxes) == math.prod(entry["shape"])
    sizes = [file["bytes"] for file in index.body["files"].values()]
    assert max(sizes) < 1.3 * min(sizes)  # no rank writes for the others


@pytest.mark.parametrize(
    "before, after",
    [
        ({"mesh": "dp=3", "zero": "3"}, {"mesh": "dp=2,tp=2", "zero": "1"}),
        ({"mesh": "dp=2,tp=2", "zero": "2", "sp": True}, {"mesh": "dp=1"}),
        ({"mesh": "pp=2,dp=2", "zero": "1"}, {"mesh": "dp=4", "zero": "3"}),
    ],
)
def test_training_goes_on_under_another_store(tmp_path, text, before, after):  # noqa: F811
    """Ten steps under one layout are five under one store and five under another, and what was sent was predicted."""
    sgd = {"optimizer.name": "sgd"}
    run(tmp_path / "whole", text, **sgd)
    first = run(tmp_path / "first", text, **sgd, **before)
    second = run(tmp_path / "second", text, checkpoint=tmp_path / "first" / "checkpoints" / "step-5", **sgd, **after)
    for summary, options in ((first, before), (second, after)):
        sent = [(op, pair) for ops in summary["bytes"].values() for op, pair in ops.items()]
        assert all(pair["predicted"] == pair["counted"] > 0 for _, pair in sent)
        assert {"reduce_scatter", "all_gather"} <= {op for op, _ in sent} or "zero" not in options
    assert second["step"] == 10
    norm_wise(*(state(tmp_path / name / "checkpoints" / "step-10")[0] for name in ("second", "whole")))
