"""Every layout file in layouts/ is valid, derives on 8 ranks, and round-trips."""

from pathlib import Path

import pytest

from crosscut.layout.layout import Layout
from crosscut.layout.rules import derive
from crosscut.models.config import TransformerConfig
from crosscut.models.shapes import transformer_spec

FILES = sorted((Path(__file__).parents[2] / "layouts").glob("*.toml"))


def test_there_are_some() -> None:
    assert len(FILES) >= 6


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_file(path: Path) -> None:
    layout = Layout.from_toml(path, world_size=8)
    assert layout.mesh.world_size == 8
    assert Layout.from_toml(layout.to_toml()) == layout
    plan = derive(transformer_spec(TransformerConfig()), layout, batch=32, seq=64)
    assert plan.rules()
    assert path.read_text().startswith("# ")
