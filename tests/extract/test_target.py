"""Loading targets: facts taken from the model itself, and one clear sentence for all others."""

import json
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoConfig, BertConfig, BertLMHeadModel, T5Config

from drafttrain.data.errors import TargetError
from drafttrain.extract.config import TargetConfig
from drafttrain.extract.target import load_target

from .factory import END, HIDDEN, LAYERS, VOCAB, make_model, make_tokenizer, save_target


def load(folder: Path, **changes):
    return load_target(TargetConfig(**({"path": str(folder), "dtype": "float32"} | changes)))


def edit_config(folder: Path, name: str = "config.json", **changes) -> None:
    """Change keys of a JSON file; ``...`` removes one."""
    value = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


@pytest.fixture
def folder(tmp_path):
    return save_target(tmp_path / "target")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_facts_are_the_models_own(tmp_path, kind):
    target = load(save_target(tmp_path / "t", kind, rope_parameters=ROPE))
    assert (target.num_layers, target.hidden_size, target.vocab_rows) == (LAYERS, HIDDEN, VOCAB)
    assert target.max_positions == 128
    assert target.stop_ids == [END]
    assert target.rope_theta == 5e5
    assert target.dtype == torch.float32
    assert target.revision is None
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        output = target.model(ids)
        final = target.decoder(input_ids=ids).last_hidden_state
    assert torch.allclose(target.logits(final), output.logits, atol=1e-6)
    assert target.embed(ids).shape == (1, 3, HIDDEN)


ROPE = {"rope_theta": 5e5, "rope_type": "default"}


def test_stop_ids_are_those_of_generation_config_and_tokenizer(folder):
    edit_config(folder, "generation_config.json", eos_token_id=[9, 7])
    assert load(folder).stop_ids == [END, 7, 9]


def test_fingerprint_names_the_weights(tmp_path):
    first = load(save_target(tmp_path / "a")).fingerprint
    assert load(save_target(tmp_path / "b")).fingerprint == first
    assert load(save_target(tmp_path / "c", seed=1)).fingerprint != first


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_theta": 123456.0, "rope_parameters": ...}, 123456.0),  # flat only
        ({"rope_parameters": ROPE}, 5e5),  # nested only
        ({"rope_theta": 5e5, "rope_parameters": ROPE}, 5e5),  # both, equal
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}},
            1e6,
        ),
    ],
)
def test_rope_theta_is_found_where_it_stands(folder, config, theta):
    """(fault kind 57)"""
    edit_config(folder, **config)
    target = load(folder)
    assert target.rope_theta == theta
    if "linear" not in str(config):
        table = target.decoder.rotary_emb.inv_freq.double()
        assert float(table[1] ** (-len(table))) == pytest.approx(theta, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_theta": 1e4, "rope_parameters": ROPE}, "rope_theta': 10000.*uses 500000"),
        ({"rope_theta": ..., "rope_parameters": ...}, "names no rope_theta.*10000 by default"),
    ],
)
def test_conflicting_or_missing_rope_theta_is_refused(folder, config, words):
    """(fault kind 57)"""
    edit_config(folder, **config)
    with pytest.raises(TargetError, match=words):
        load(folder)


def test_a_rotary_table_unlike_its_configuration_is_refused(folder, monkeypatch):
    """(fault kind 57)"""
    from drafttrain.extract.target import build_target

    model = make_model()
    model.model.rotary_emb.inv_freq.copy_(1e6 ** -(torch.arange(0, 8, 2) / 8))
    with pytest.raises(TargetError, match=r"live rotary table \(base about 1e\+06\)"):
        build_target(model, make_tokenizer())


def test_the_full_attention_base_is_used_where_layer_types_have_their_own(tmp_path):
    """(fault kind 57)"""
    bases = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    folder = save_target(tmp_path / "t", "gemma3_text", rope_parameters=bases)
    assert load(folder).rope_theta == 1e6


def test_float16_is_refused_for_a_bfloat16_model(folder):
    """(fault kind 40)"""
    edit_config(folder, dtype="bfloat16")
    with pytest.raises(TargetError, match=r"float16.*bfloat16.*overflow"):
        load(folder, dtype="float16")
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "path", ["./nowhere", "/no/such/folder", "~/nowhere-at-all", "a/b/c", "x/"]
)
def test_a_missing_folder_is_said_to_be_missing(path):
    with pytest.raises(TargetError, match=r"folder .* does not exist"):
        load(path)


def test_a_missing_folder_below_an_existing_one_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(TargetError, match=r"folder 'models/tiny' does not exist"):
        load("models/tiny")


def test_an_unreachable_hub_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = {}

    def no_network(self, repo, revision=None, timeout=None):
        seen.update(repo=repo, timeout=timeout)
        raise httpx.ConnectError("network is unreachable")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    started = time.monotonic()
    with pytest.raises(TargetError, match=r"not in the local hub cache.*network is unreachable"):
        load("nobody-at-all/no-such-model")
    assert time.monotonic() - started < 5
    assert seen["repo"] == "nobody-at-all/no-such-model"
    assert seen["timeout"] <= 10


def test_gguf_is_refused_with_the_way_out(tmp_path):
    """(fault kind 94)"""
    file = tmp_path / "model.gguf"
    for exists in (False, True):
        if exists:
            file.write_bytes(b"GGUF")
        with pytest.raises(TargetError, match=r"GGUF file.*dequantize=True"):
            load(file)
    with pytest.raises(TargetError, match=r"holds only GGUF files"):
        load(tmp_path)


def remove(name):
    return lambda folder: (folder / name).unlink()


def drop_weight(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "changes", "words"),
    [
        (remove("config.json"), {}, "has no config.json"),
        (remove("model.safetensors"), {}, "cannot be loaded"),
        (no_tokenizer, {}, "cannot be loaded"),
        (drop_weight, {}, "lacks or misshapes 1 weights.*layers.3.mlp.up_proj"),
        (lambda f: edit_config(f, vocab_size=80), {}, "cannot be loaded|lacks or misshapes"),
        (lambda f: edit_config(f, model_type="no_such_type"), {}, "cannot be loaded"),
        (lambda f: (f / "config.json").write_text("{"), {}, "cannot be loaded"),
        (lambda f: None, {"revision": "main"}, "needs a hub id"),
    ],
)
def test_unusable_folders_are_refused(folder, damage, changes, words):
    damage(folder)
    with pytest.raises(TargetError, match=words):
        load(folder, **changes)


def test_a_file_is_not_a_target(folder):
    with pytest.raises(TargetError, match=r"is a file; give the folder"):
        load(folder / "config.json")


def test_cuda_without_a_gpu_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TargetError, match=r"no GPU"):
        load(folder, device="cuda")


def test_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    T5Config(d_model=32, num_layers=2).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"encoder-decoder"):
        load(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"cannot be tapped|later token"):
        load(tmp_path)


def test_a_model_that_attends_to_later_tokens_is_refused(monkeypatch):
    from drafttrain.extract.target import build_target

    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    config = AutoConfig.for_model("llama")
    assert config.model_type == "llama"
    with pytest.raises(TargetError, match=r"later token"):
        build_target(model, make_tokenizer())


def test_a_model_without_rotary_positions_is_refused(tmp_path):
    from drafttrain.extract.target import build_target

    model = make_model("gpt2", n_embd=32, n_head=2, n_layer=6, n_positions=64)
    with pytest.raises(TargetError, match=r"no rotary position table|max_position"):
        build_target(model, make_tokenizer())
