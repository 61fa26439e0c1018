"""The torch-free shape tables against the modules that they stand for, parameter by parameter."""

import subprocess
import sys

import pytest
import torch

from crosscut.layout.spec import ModelSpec
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.mlp import MLP
from crosscut.models.shapes import mlp_spec, transformer_spec
from crosscut.models.transformer import Transformer
from crosscut.parallel.inspect import spec_from_module


def on_meta(build: type, cfg: TransformerConfig | MLPConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return build(cfg)


def same(written: ModelSpec, built: ModelSpec) -> None:
    assert [p.name for p in written.params] == [p.name for p in built.params]
    for ours, theirs in zip(written.params, built.params, strict=True):
        assert ours == theirs
    assert written.num_parameters == built.num_parameters
    assert written.input_dims == built.input_dims
    assert written.loss == built.loss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_transformer(bias: bool, qk_norm: bool, tied: bool, kv_heads: int | None) -> None:
    cfg = TransformerConfig(
        vocab=50, embed=24, layers=3, heads=4, kv_heads=kv_heads, mlp=36, bias=bias, qk_norm=qk_norm, tied=tied
    )
    written = transformer_spec(cfg)
    module = on_meta(Transformer, cfg)
    same(written, spec_from_module(module, written.dims))
    assert written.num_parameters == sum(p.numel() for p in module.parameters())


def test_transformer_with_a_head_dim_of_its_own() -> None:
    cfg = TransformerConfig(vocab=50, embed=20, layers=2, heads=3, kv_heads=3, head_dim=10, mlp=36, bias=True)
    written = transformer_spec(cfg)
    same(written, spec_from_module(on_meta(Transformer, cfg), written.dims))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 4, 5])
@pytest.mark.parametrize("form", ["gather", "pairs"])
def test_mlp(bias: bool, layers: int, form: str) -> None:
    cfg = MLPConfig(dim=12, layers=layers, form=form, bias=bias)
    written = mlp_spec(cfg)
    same(written, spec_from_module(on_meta(MLP, cfg), written.dims))


def test_the_worked_example_has_39_parameters() -> None:
    spec = transformer_spec(TransformerConfig(vocab=256, embed=256, layers=4, heads=8, mlp=1024))
    assert len(spec.params) == 39
    assert spec.num_parameters == 4_327_680


def test_shapes_and_layouts_need_no_torch() -> None:
    code = (
        "import sys, crosscut, crosscut.layout.rules, crosscut.layout.collapse, crosscut.models.shapes; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
