"""Samples of what `nvidia-smi topo -m` prints on machines of different kinds, written in its format."""

from pathlib import Path

import pytest

from crosscut.doctor.hardware import links
from crosscut.doctor.topology import Topology, parse

DATA = Path(__file__).parent / "data"


def sample(name):
    return (DATA / f"{name}.txt").read_text()


def test_nvlink_between_all_eight():
    text = sample("nvlink8")
    assert "\x1b[4m" in text  # the header is underlined, as on a terminal
    found = parse(text)
    assert found.gpus == tuple(f"GPU{i}" for i in range(8))
    assert len(found.links) == 28
    assert set(found.links.values()) == {"NV18"}
    assert found.numa == {i: "0" if i < 4 else "1" for i in range(8)}
    assert found.text() == "8 GPUs: NV18 (18 NVLinks) between all 28 pairs"
    assert links(text, 8).status == "ok"


def test_pcie_only():
    found = parse(sample("pcie8"))
    assert found.links[0, 1] == found.links[6, 7] == "PIX"
    assert found.links[0, 2] == "PXB"
    assert found.links[4, 6] == "NODE"
    assert found.links[3, 4] == found.slowest == "SYS"
    assert found.text() == (
        "8 GPUs: PIX (one PCIe switch) between 4 pairs, PXB (several PCIe switches) between 4 pairs, "
        "NODE (PCIe within a NUMA node) between 4 pairs, SYS (PCIe between NUMA nodes) between 16 pairs"
    )
    finding = links(sample("pcie8"), 8)
    assert finding.status == "warn"
    assert "tp within a NUMA node" in finding.fix


def test_bridges_between_some_pairs():
    found = parse(sample("bridged4"))
    assert [pair for pair, kind in found.links.items() if kind == "NV4"] == [(0, 1), (2, 3)]
    finding = links(sample("bridged4"), 4)
    assert finding.status == "warn"
    assert "not every pair has NVLink" in finding.fix


def test_one_gpu():
    found = parse(sample("one"))
    assert found == Topology(("GPU0",), {}, {0: "0"})
    assert found.slowest is None
    assert links(sample("one"), 1).text == "1 GPU, no links between GPUs"
    assert links(sample("one"), 1).status == "ok"


def test_no_gpu():
    with pytest.raises(ValueError, match="no matrix of GPUs"):
        parse(sample("none"))
    assert links(sample("none"), 0).status == links(None, 0).status == "ok"
    assert links(None, 2).status == links(sample("none"), 2).status == "warn"


def test_more_nvlinks_are_faster_and_any_is_faster_than_pcie():
    gpus = ("GPU0", "GPU1", "GPU2")
    assert Topology(gpus, {(0, 1): "NV12", (0, 2): "NV4", (1, 2): "NV12"}).slowest == "NV4"
    assert Topology(gpus, {(0, 1): "NV1", (0, 2): "PIX", (1, 2): "NV18"}).slowest == "PIX"


@pytest.mark.parametrize(
    "change, part",
    [(("NV18", "NW18"), "'NW18' between GPU0 and GPU1"), (("GPU7\tNV18", "XPU7\tNV18"), "names 8 GPUs and has 7")],
)
def test_a_matrix_that_is_not_understood_is_a_warning_not_a_guess(change, part):
    text = sample("nvlink8").replace(*change)
    with pytest.raises(ValueError, match=part):
        parse(text)
    assert links(text, 8).status == "warn"
