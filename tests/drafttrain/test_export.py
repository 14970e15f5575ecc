"""Exported drafters: rebuilt from the files alone, strict about names and shapes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.data.errors import CheckpointError
from drafttrain.drafter.session import DrafterSession
from drafttrain.export import expected_shapes, load_drafter, save_drafter

from .drafter.factory import drafter_config, make_drafter, make_head, make_sample

# The names in published checkpoints, for one layer: no prefix, no embedding, no LM head.
PUBLISHED_NAMES = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
}


@pytest.fixture
def exported(tmp_path):
    drafter = make_drafter(drafter_config(4, "sf", 6))
    save_drafter(drafter.config, drafter.state_dict(), tmp_path)
    return drafter, tmp_path


def test_names_and_shapes_are_those_of_published_checkpoints():
    """(fault kind 87)"""
    shapes = expected_shapes(drafter_config(4, "f"))
    assert set(shapes) == PUBLISHED_NAMES
    assert shapes["fc.weight"] == (32, 64)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (32, 32)
    assert shapes["layers.0.self_attn.q_norm.weight"] == (16,)


def test_a_drafter_rebuilt_from_its_files_gives_the_same_logits(exported):
    """(fault kinds 85, 90)"""
    drafter, folder = exported
    rebuilt = load_drafter(folder, torch.device("cpu"))
    assert rebuilt.config == drafter.config
    head, sample = make_head(), make_sample(20)
    logits = []
    for model in (drafter, rebuilt):
        session = DrafterSession(model, head)
        session.append_context(sample.taps[:15])
        logits.append(session.draft(3))
    assert torch.equal(*logits)


def _rename(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.fc.weight"] = weights.pop("fc.weight")
    save_file(weights, folder / "model.safetensors")


def _extra(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(2, 2)
    save_file(weights, folder / "model.safetensors")


def _reshape(folder):
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors")


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _config(**changes):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def _break_json(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_rename, "tensors missing, first fc.weight"),
        (_extra, "unexpected tensors, first lm_head.weight"),
        (_reshape, r"norm.weight has shape \[31\]"),
        (_truncate, "cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be read"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "cannot be read"),
        (lambda f: (f / "config.json").unlink(), "does not exist"),
        (_break_json, "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (_config(num_hidden_layers=3), "wrong type|layer_types|missing"),
        (_config(head_dim=8), "config.json implies"),
        (_config(hidden_size=64), "config.json implies"),
    ],
)
def test_damaged_exports_are_refused_by_name(exported, damage, message):
    _, folder = exported
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder, torch.device("cpu"))
