"""The text: which files, and which of them are kept for validation. Imports no torch.

By default the text is the source of the running interpreter's standard library, so there is nothing to download. A
folder is split into training and validation by file, by a digest of each file's name: the same on every machine, and no
file is on both sides. A single file is split by position, its end being the validation text.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEPARATOR = b"\0"  # between files, and before the first: the model learns where a file begins and ends
STDLIB = "stdlib"
# Not written by hand, or not shipped by every distribution: tests, code-page tables, generated help topics, add-ons.
STDLIB_WITHOUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
SNIFF_BYTES = 8192  # a file with a zero byte this early is not text


@dataclass(frozen=True)
class Corpus:
    """The files of each side, in a fixed order. `num_skipped` files of the folder were not text.

    `train_tail` is not 0 for a single file: its last `tail_bytes` bytes are the validation text.
    """

    source: str
    train_files: tuple[Path, ...]
    val_files: tuple[Path, ...]
    train_bytes: int
    val_bytes: int
    num_skipped: int = 0
    tail_bytes: int = 0

    def read(self, side: str) -> bytes:
        """The text of `side` ("train" or "val"): its files, each after a zero byte."""
        if self.tail_bytes:
            text = _read(self.train_files[0])
            return text[: -self.tail_bytes] if side == "train" else text[-self.tail_bytes :]
        files = self.train_files if side == "train" else self.val_files
        return b"".join(SEPARATOR + _read(path) for path in files)

    def require(self, seq_len: int) -> None:
        """Raise ValueError unless both sides hold at least one sequence of `seq_len` bytes and the byte after it."""
        for side, size, fix in (
            ("training", self.train_bytes, "more text"),
            ("validation", self.val_bytes, "more text or a larger data.val_fraction"),
        ):
            if size < seq_len + 1:
                raise ValueError(
                    f"data.path = {self.source!r}: the {side} text has {size:,} bytes, shorter than one sequence of "
                    f"{seq_len} and its next byte; give a smaller train.seq_len, or {fix}"
                )


def find(path: str, val_fraction: float) -> Corpus:
    """List and split the text at `path`: "stdlib", a file, or a folder (all its text files, hidden ones apart).

    Raises ValueError if there is none, or it cannot be read.
    """
    if path == STDLIB:
        return _folder(path, Path(sysconfig.get_paths()["stdlib"]), val_fraction, suffix=".py", without=STDLIB_WITHOUT)
    place = Path(path).expanduser()
    if place.is_dir():
        return _folder(path, place, val_fraction)
    if not place.exists():
        raise ValueError(f"data.path = {path!r}: no such file or folder")
    size = len(_read(place))
    if not size:
        raise ValueError(f"data.path = {path!r}: the file is empty")
    tail = max(1, round(size * val_fraction))
    return Corpus(path, (place,), (place,), size - tail, tail, tail_bytes=tail)


def validation_key(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the file's name: below `data.val_fraction` it is validation."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _folder(
    source: str, root: Path, val_fraction: float, suffix: str = "", without: frozenset[str] = frozenset()
) -> Corpus:
    sides: dict[str, list[tuple[str, Path, int]]] = {"train": [], "val": []}
    num_skipped = 0
    for path in _walk(root, without):
        if not path.name.endswith(suffix):
            continue
        size = path.stat().st_size
        if not size or _is_binary(path):
            num_skipped += size > 0
            continue
        name = path.relative_to(root).as_posix()
        sides["val" if validation_key(name) < val_fraction else "train"].append((name, path, size))
    if not sides["train"] and not sides["val"]:
        raise ValueError(
            f"data.path = {source!r}: no text file in the folder" + f" ({num_skipped} not text)" * bool(num_skipped)
        )
    for empty, full in (("train", "val"), ("val", "train")):  # few files: the digest may have put all on one side
        if not sides[empty] and len(sides[full]) > 1:
            pick = min if empty == "val" else max
            chosen = pick(sides[full], key=lambda entry: validation_key(entry[0]))
            sides[full].remove(chosen)
            sides[empty].append(chosen)
    if not sides["train"] or not sides["val"]:
        raise ValueError(
            f"data.path = {source!r}: one file cannot be split by file; name the file itself, not its folder"
        )
    train, val = (sorted(sides[side]) for side in ("train", "val"))
    return Corpus(
        source,
        tuple(path for _, path, _ in train),
        tuple(path for _, path, _ in val),
        sum(size + 1 for _, _, size in train),
        sum(size + 1 for _, _, size in val),
        num_skipped,
    )


def _walk(root: Path, without: frozenset[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(d for d in folders if not d.startswith((".", "__")) and d not in without)
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(SNIFF_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
