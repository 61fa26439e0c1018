"""Text split by file, and batches that know nothing of the layout."""

import itertools
import re
import subprocess
import sys

import pytest
import torch

from crosscut import Layout, local_batch, spawn
from crosscut.train import corpus
from crosscut.train.data import IGNORE, FloatData, TextData


@pytest.fixture
def folder(tmp_path):
    """Forty files with different content, one hidden, one not text."""
    for i in range(40):
        path = tmp_path / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{i}:{j} " for j in range(i + 5)))
    (tmp_path / ".hidden.txt").write_text("not seen")
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\0\1")
    return tmp_path


def text_of(size, seed=0, seq_len=8, path=None):
    """A text whose byte i tells i (in pairs), so that a window's content tells its place."""
    data = b"".join(int(i).to_bytes(2, "big") for i in range(1, size))
    path.write_bytes(data.replace(b"\0", b"\x01"))
    return TextData(corpus.find(str(path), 0.2), seq_len, seed)


# ---- which files


def test_a_folder_is_split_by_file_and_each_file_is_on_one_side(folder):
    found = corpus.find(str(folder), 0.25)
    train, val = set(found.train_files), set(found.val_files)
    assert len(train | val) == 40
    assert not train & val
    assert 3 <= len(val) <= 17
    assert found.num_skipped == 1
    text = found.read("val")
    assert len(text) == found.val_bytes
    for path in val:
        assert b"\0" + path.read_bytes() in text
    for path in train:
        assert path.read_bytes() + b"\0" not in text + b"\0"


def test_the_split_depends_on_the_names_alone(folder):
    before = corpus.find(str(folder), 0.25)
    moved = folder.with_name("moved")
    folder.rename(moved)
    after = corpus.find(str(moved), 0.25)
    assert [p.relative_to(folder) for p in before.val_files] == [p.relative_to(moved) for p in after.val_files]
    more = corpus.find(str(moved), 0.5)
    assert set(after.val_files) < set(more.val_files)  # a larger fraction only adds


def test_the_split_does_not_depend_on_pythons_hash():
    code = "from crosscut.train.corpus import find; f = find('stdlib', 0.1); print(len(f.val_files), f.val_bytes)"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_the_standard_library_is_found_without_tests_and_installed_packages():
    found = corpus.find("stdlib", 0.1)
    names = {path.name for path in (*found.train_files, *found.val_files)}
    assert {"argparse.py", "textwrap.py"} <= names
    for path in (*found.train_files, *found.val_files):
        assert path.suffix == ".py"
        assert not {"site-packages", "dist-packages", "test", "encodings"} & set(path.parts)
    assert 0.03 < found.val_bytes / found.train_bytes < 0.3


def test_few_files_still_give_both_sides(tmp_path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(f"{name} " * 30)
    for fraction in (0.0001, 0.9999):
        found = corpus.find(str(tmp_path), fraction)
        assert len(found.train_files) == len(found.val_files) == 1


def test_a_single_file_keeps_its_end_for_validation(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 201)))
    found = corpus.find(str(path), 0.1)
    assert found.read("train") + found.read("val") == path.read_bytes()
    assert len(found.read("val")) == found.val_bytes == 20


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda p: None, "no such file or folder"),
        (lambda p: p.write_bytes(b""), "the file is empty"),
        (lambda p: p.mkdir(), "no text file in the folder"),
        (lambda p: (p.mkdir(), (p / "empty.txt").write_bytes(b"")), "no text file in the folder"),
        (lambda p: (p.mkdir(), (p / "one.txt").write_bytes(b"alone")), "one file cannot be split by file"),
        (lambda p: (p.mkdir(), (p / "a.bin").write_bytes(b"\0\1")), "(1 not text)"),
    ],
)
def test_no_text_is_said(tmp_path, make, said):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        corpus.find(str(path), 0.1)
    assert str(path) in str(error.value)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("text")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))  # chmod does not stop root

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"secret\.txt: cannot be read \(Permission denied\)"):
        corpus.find(str(path), 0.1)


def test_text_shorter_than_one_sequence_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 100)
    assert corpus.find(str(path), 0.2).require(19) is None  # 20 validation bytes: 19 and the one after
    with pytest.raises(ValueError, match="validation text has 20 bytes, shorter than one sequence of 20"):
        corpus.find(str(path), 0.2).require(20)
    with pytest.raises(ValueError, match="training text has 80 bytes"):
        corpus.find(str(path), 0.2).require(80)


# ---- which samples


def test_an_epoch_has_every_sample_once_whatever_the_batch_size(tmp_path):
    data = text_of(400, path=tmp_path / "t")
    whole = data.order(0, data.num_samples)
    assert sorted(whole.tolist()) == list(range(data.num_samples))
    for size in (1, 7, 16, data.num_samples + 3):
        parts = [
            data.order(start, min(size, 3 * data.num_samples - start)) for start in range(0, 3 * data.num_samples, size)
        ]
        assert torch.equal(torch.cat(parts), data.order(0, 3 * data.num_samples))


def test_epochs_and_seeds_have_their_own_order(tmp_path):
    data = text_of(400, path=tmp_path / "t")
    n = data.num_samples
    first, second = data.order(0, n), data.order(n, n)
    assert not torch.equal(first, second)
    assert torch.equal(data.order(0, n), first)  # going back gives the same again
    assert not torch.equal(text_of(400, seed=1, path=tmp_path / "t").order(0, n), first)


def test_windows_follow_each_other_without_gap_and_labels_are_the_next_bytes(tmp_path):
    data = text_of(300, path=tmp_path / "t")
    inputs, labels = data.batch(0, data.num_samples)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    text = data.train.long()
    place = torch.argsort(data.order(0, data.num_samples))
    assert torch.equal(inputs[place].flatten(), text[: data.num_samples * 8])
    assert torch.equal(labels[place].flatten(), text[1 : data.num_samples * 8 + 1])
    assert text.numel() - 1 - data.num_samples * 8 < 8  # what is left is shorter than a sequence


@pytest.mark.parametrize(
    "mesh, micro", [("dp=1", 1), ("dp=2", 1), ("dp=3", 2), ("dp=4", 1), ("dp=2,tp=2", 3), ("pp=2,dp=2", 2)]
)
def test_the_ranks_together_have_the_global_batch_in_its_order(tmp_path, mesh, micro):
    data = text_of(400, path=tmp_path / "t")
    inputs, labels = data.batch(5, 24)
    layout = Layout.of(mesh, micro_batches=micro)

    def rank(ctx):
        batch = local_batch(*data.batch(5, 24), layout, ctx)
        return ctx.coords, [(m.inputs, m.labels) for m in batch.micro]

    held = spawn(rank, world_size=layout.mesh.world_size, backend="threads")
    by_dp = {coords["dp"]: micro for coords, micro in held}
    for coords, micros in held:  # tp and pp neighbours have the same rows
        assert all(torch.equal(a, b) for a, b in zip(micros[0], by_dp[coords["dp"]][0], strict=True))
    pieces = [by_dp[d][m] for m in range(micro) for d in range(layout.mesh.size("dp"))]
    assert torch.equal(torch.cat([x for x, _ in pieces]), inputs)
    assert torch.equal(torch.cat([y for _, y in pieces]), labels)


def test_validation_is_the_same_sequences_however_batched(tmp_path):
    data = text_of(600, path=tmp_path / "t")
    total = data.num_val_samples

    def rows(num_batches, count):
        kept = []
        for inputs, labels in data.validation(num_batches, count):
            assert inputs.shape == labels.shape == (count, 8)
            valid = (labels != IGNORE).all(1)
            assert torch.equal(valid, (labels != IGNORE).any(1))
            kept.append(inputs[valid])
        return torch.cat(kept)

    assert torch.equal(rows(4, 6), rows(6, 4))
    everything = rows(100, 7)
    assert len(everything) == total
    assert torch.equal(everything.flatten(), data.val[: total * 8].long())


def test_baselines_are_the_cross_entropy_of_counting(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"ab" * 50 + b"ac" * 50 + b"ab" * 25)  # the last 50 bytes are validation
    data = TextData(corpus.find(str(path), 0.2), 7, 0)
    found = data.baselines(100)
    inputs, labels = (torch.cat(x) for x in zip(*data.validation(100, 1), strict=True))
    train = data.train.tolist()
    unigram, bigram = [], []
    for first, second in zip(inputs.flatten().tolist(), labels.flatten().tolist(), strict=True):
        p = (train.count(second) + 1 / 256) / (len(train) + 1)
        pairs = sum(a == first and b == second for a, b in itertools.pairwise(train))
        unigram.append(-torch.tensor(p, dtype=torch.float64).log())
        bigram.append(-torch.tensor((pairs + p) / (train[:-1].count(first) + 1), dtype=torch.float64).log())
    assert found["unigram"] == pytest.approx(float(torch.stack(unigram).mean()), rel=1e-12)
    assert found["bigram"] == pytest.approx(float(torch.stack(bigram).mean()), rel=1e-12)
    assert found["bigram"] < found["unigram"]


def test_float_rows_depend_on_seed_and_place_alone():
    data = FloatData(16, seed=3)
    whole, none = data.batch(0, 12)
    assert none is None
    assert torch.equal(torch.cat([data.batch(0, 5)[0], data.batch(5, 7)[0]]), whole)
    assert len({tuple(row.tolist()) for row in whole}) == 12
    assert not torch.equal(FloatData(16, seed=4).batch(0, 12)[0], whole)
    val = torch.cat([x for x, _ in data.validation(2, 6)])
    assert not (val[:, None] == whole[None]).all(-1).any()
