"""Meshes: parsing, coordinates and groups, for every mesh that a few ranks admit."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.layout.errors import LayoutError
from crosscut.layout.mesh import AXES, Mesh

MESHES = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), min_size=1).filter(
    lambda sizes: math.prod(sizes.values()) <= 64
)


def test_axes_stand_in_one_order_however_typed() -> None:
    assert Mesh.of("tp=2,pp=3") == Mesh.of("pp=3,tp=2") == Mesh.of({"tp": 2, "pp": 3, "dp": 1})
    assert Mesh.of("tp=2,pp=3").axes == ("pp", "rep", "dp", "cp", "tp")
    assert Mesh.of("tp=2,pp=3").coords(5) == {"pp": 2, "rep": 0, "dp": 0, "cp": 0, "tp": 1}


def test_order_overrides() -> None:
    mesh = Mesh.of("dp=2,tp=3", order=("tp", "dp"))
    assert mesh.axes == ("pp", "rep", "cp", "tp", "dp")
    assert mesh.coords(1)["dp"] == 1
    assert mesh.label(("dp", "tp")) == "tp+dp"


def test_groups_of_a_three_way_mesh() -> None:
    mesh = Mesh.of("pp=2,dp=2,tp=2")
    assert mesh.group_ranks(("tp",), 5) == (4, 5)
    assert mesh.group_ranks(("dp",), 5) == (5, 7)
    assert mesh.group_ranks("pp", 5) == (1, 5)
    assert mesh.group_ranks(("tp", "pp"), 5) == (0, 1, 4, 5)
    assert mesh.partition(("dp",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.label(("tp", "cp", "dp")) == "dp+tp"
    assert mesh.label(("cp",)) == ""


@settings(max_examples=60, deadline=None)
@given(MESHES)
def test_rank_and_coords_are_inverse_and_groups_partition(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(sizes)
    ranks = range(mesh.world_size)
    assert [mesh.rank(mesh.coords(r)) for r in ranks] == list(ranks)
    for n in range(1, 3):
        for axes in itertools.combinations(AXES, n):
            groups = mesh.partition(axes)
            assert sorted(r for g in groups for r in g) == list(ranks)
            for group in groups:
                assert len(group) == mesh.size(axes)
                assert list(group) == sorted(group)
                others = [{a: c for a, c in mesh.coords(r).items() if a not in axes} for r in group]
                assert all(o == others[0] for o in others)


@pytest.mark.parametrize(
    "spec, world_size, message",
    [
        ("tpp=2", None, "unknown mesh axis 'tpp'; did you mean 'tp'?"),
        ("dp=2,dp=4", None, "gives axis 'dp' twice"),
        ("dp=0", None, "mesh axis dp=0 must be a whole number of at least 1"),
        ("dp", None, "'dp' is not of the form axis=size"),
        ("", None, "is empty"),
        ("dp=2,tp=2", 8, "mesh dp=2,tp=2 has 4 ranks but the world size is 8; dp=4 would fit"),
        ("dp=2,tp=3", 8, "has 6 ranks but the world size is 8"),
        ("dp=auto,tp=3", 8, "take 3 ranks, which does not divide the world size of 8"),
        ("dp=auto,tp=auto", 8, "only one axis can be"),
        ("ep=2", None, 'experts = "dp"'),
        ("sp=2", None, "--sp"),
    ],
)
def test_bad_meshes(spec: str, world_size: int | None, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        Mesh.of(spec, world_size)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_auto_takes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Mesh.of("dp=auto,tp=2", 8) == Mesh.of("dp=4,tp=2")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert Mesh.of("dp=auto,tp=2").size("dp") == 3
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("crosscut.layout.mesh.num_gpus", lambda: 4)
    assert Mesh.of("dp=auto,tp=2").size("dp") == 2
    monkeypatch.setattr("crosscut.layout.mesh.num_gpus", lambda: 0)
    with pytest.raises(LayoutError, match="needs a world size"):
        Mesh.of("dp=auto,tp=2")


def test_coordinates_out_of_range_are_refused() -> None:
    mesh = Mesh.of("dp=2,tp=2")
    with pytest.raises(LayoutError, match=r"rank 4 is not in 0\.\.3"):
        mesh.coords(4)
    with pytest.raises(LayoutError, match=r"tp=2 is not in 0\.\.1"):
        mesh.rank({"tp": 2})
    with pytest.raises(LayoutError, match="unknown mesh axis 'tq'; did you mean 'tp'"):
        mesh.size("tq")
