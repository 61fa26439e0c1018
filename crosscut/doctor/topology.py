"""`nvidia-smi topo -m` as data. No torch.

The matrix names, for each two GPUs, the slowest part of the path between them:

    NV18  18 NVLink links        PIX  one PCIe switch       PHB  the CPU's PCIe bridge
    PXB   several PCIe switches  NODE within a NUMA node    SYS  between NUMA nodes
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

KINDS = {  # slowest last
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "PCIe within a NUMA node",
    "SYS": "PCIe between NUMA nodes",
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")


@dataclass(frozen=True)
class Topology:
    """gpus: their names, `GPU0`; links: (i, j), i < j -> the kind of path; numa: GPU -> NUMA node, where it is said."""

    gpus: tuple[str, ...]
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    numa: dict[int, str] = field(default_factory=dict)

    @property
    def slowest(self) -> str | None:
        """The kind of the slowest path between two GPUs; None if there are no two."""
        return max(self.links.values(), key=_slowness, default=None)

    def text(self) -> str:
        """In a line: `8 GPUs: NV18 between all 28 pairs`."""
        if len(self.gpus) < 2:
            return f"{len(self.gpus)} GPU, no links between GPUs" if self.gpus else "no GPUs"
        counts = Counter(self.links.values())
        if len(counts) == 1:
            kind, pairs = next(iter(counts.items()))
            how = f"{_said(kind)} between all {pairs} pairs" if pairs > 1 else f"{_said(kind)} between them"
        else:
            kinds = sorted(counts, key=_slowness)
            how = ", ".join(f"{_said(kind)} between {counts[kind]} pairs" for kind in kinds)
        return f"{len(self.gpus)} GPUs: {how}"


def _slowness(kind: str) -> tuple[int, int]:
    """Orders kinds from the fastest to the slowest: more NVLinks are faster, and any NVLink is faster than PCIe."""
    return (0, -int(kind[2:])) if kind.startswith("NV") else (1, list(KINDS).index(kind))


def _said(kind: str) -> str:
    links = kind.removeprefix("NV")
    return f"{kind} ({links} NVLinks)" if kind.startswith("NV") else f"{kind} ({KINDS[kind]})"


def parse(text: str) -> Topology:
    """Raises ValueError if the text is not such a matrix."""
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    head = next((i for i, line in enumerate(lines) if line.split()[:1] and _GPU.fullmatch(line.split()[0])), None)
    if head is None:
        raise ValueError("nvidia-smi topo -m printed no matrix of GPUs")
    columns = [cell.strip() for cell in lines[head].split("\t")]
    names = [name for name in columns if _GPU.fullmatch(name)]
    links, numa = {}, {}
    rows = 0
    for line in lines[head + 1 :]:
        cells = [cell.strip() for cell in line.split("\t")]
        if cells[0] not in names:
            continue
        i, rows = names.index(cells[0]), rows + 1
        for j, name in enumerate(names):
            place = columns.index(name)
            cell = cells[place] if place < len(cells) else ""
            if i < j:
                if not _LINK.fullmatch(cell):
                    raise ValueError(
                        f"nvidia-smi topo -m: {cell!r} between {names[i]} and {name} is no known kind of link"
                    )
                links[i, j] = cell
        if "NUMA Affinity" in columns and columns.index("NUMA Affinity") < len(cells):
            node = cells[columns.index("NUMA Affinity")]
            if re.fullmatch(r"[\d,-]+", node):
                numa[i] = node
    if rows != len(names):
        raise ValueError(f"nvidia-smi topo -m names {len(names)} GPUs and has {rows} rows of them")
    return Topology(tuple(names), links, numa)
