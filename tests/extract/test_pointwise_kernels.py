"""Which layers get a kernel of ours instead of compiled code: only those that compute the same."""

import importlib

import pytest
import torch
from torch import nn

from drafttrain.extract import pointwise_kernels as kernels

from .factory import make_model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "qwen3_next", "mistral"])
def test_rotary_functions_that_pair_halves_are_recognised(kind):
    home = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    assert kernels.turns_halves(home.apply_rotary_pos_emb)


def test_rotary_functions_that_pair_neighbours_are_left_alone(monkeypatch):
    home = importlib.import_module("transformers.models.glm.modeling_glm")
    assert not kernels.turns_halves(home.apply_rotary_pos_emb)
    monkeypatch.setattr(kernels, "AVAILABLE", True)
    otherwise = object()
    assert kernels.faster_rotary(home.apply_rotary_pos_emb, otherwise) is otherwise  # type: ignore[arg-type]


def test_shapes_the_kernel_does_not_take_run_the_models_own_function(monkeypatch):
    home = importlib.import_module("transformers.models.llama.modeling_llama")
    own = home.apply_rotary_pos_emb
    monkeypatch.setattr(kernels, "AVAILABLE", True)
    rotate = kernels.faster_rotary(own, own)
    generator = torch.Generator().manual_seed(0)
    for batch, width in ((2, 8), (1, 12)):  # two samples a batch; half of 12 is no power of two
        q, k, cos, sin = (
            torch.randn(batch, *shape, generator=generator)
            for shape in ((2, 5, width), (1, 5, width), (5, width), (5, width))
        )
        for found, wanted in zip(rotate(q, k, cos, sin), own(q, k, cos, sin), strict=True):
            assert torch.equal(found, wanted)


def test_only_mlps_of_three_projections_and_silu_are_gated():
    mlp = make_model("llama").model.layers[0].mlp
    assert kernels.is_gated_mlp(mlp)
    mlp.act_fn = nn.GELU()
    assert not kernels.is_gated_mlp(mlp)
    experts = make_model("llama").model.layers[0].mlp
    experts.shared = nn.Linear(2, 2)
    assert not kernels.is_gated_mlp(experts)
