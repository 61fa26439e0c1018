"""What the tables of `crosscut explain` share: colors of axes, a plain table, bytes for a person."""

from __future__ import annotations

from rich.box import Box
from rich.table import Table
from rich.text import Text

AXIS_COLORS = {"pp": "magenta", "rep": "yellow", "dp": "green", "cp": "bright_blue", "tp": "cyan"}
RULE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")  # a line under the head and nothing else


def size(num_bytes: int | float) -> str:
    """Bytes for a person, in powers of 1000: `2.10 MB`."""
    if num_bytes < 1000:
        return f"{num_bytes:g} B"
    for unit in ("kB", "MB", "GB", "TB"):
        num_bytes /= 1000
        if num_bytes < 1000 or unit == "TB":
            return f"{num_bytes:.{2 if num_bytes < 100 else 1}f} {unit}"
    raise AssertionError


def axes_in_color(label: str, sep: str = ",") -> Text:
    """`dp=2,tp=2` or `dp+tp` with each axis in its color."""
    text = Text()
    for i, word in enumerate(label.split(sep)):
        if i:
            text.append(sep, style="dim")
        axis = word.partition("=")[0]
        text.append(word, style=f"bold {AXIS_COLORS.get(axis, 'white')}")
    return text


def grid() -> Table:
    """A table with one line under its head and no other."""
    return Table(box=RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
