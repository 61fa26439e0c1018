"""File operations that have reached the disk when they return: all that a checkpoint does to the disk.

A name is durable only once its folder is synced too: a file that was written, synced and renamed can still be missing
after a power cut.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def make_folder(path: Path) -> None:
    """An empty new folder; a leftover of the same name goes first."""
    remove(path)
    path.mkdir(parents=True)
    sync_folder(path.parent)


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write(path)` write the file, then sync its content."""
    write(path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """A small text file, synced."""

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    write_file(path, write)


def rename(source: Path, target: Path) -> None:
    """Give `source` the name `target`, in one step that cannot be seen half done."""
    os.replace(source, target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a folder or a file; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Windows cannot sync a folder, and does without."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
