"""Gated DeltaNet hybrids: extraction is exact in every batch, and checkpoints load whole."""

import json

import numpy as np
import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from drafttrain.data.errors import StoreError
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract.config import ExtractConfig, TargetConfig
from drafttrain.extract.target import load_target
from drafttrain.extract.vocabulary import load_vocabulary
from drafttrain.extract.worker import extract

from .factory import (
    CONFIG,
    END,
    VOCAB,
    extract_features,
    make_table,
    make_target,
    make_tokenizer,
)

TAPS = [0, 2, 4]  # layer 3 attends, the others are recurrent
LENGTHS = [1, 2, 3, 4, 63, 64, 65, 30, 64, 127]
"""Shorter than the convolution, around whole chunks of the chunk rule, some alike."""
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}


@pytest.fixture(scope="module")
def target():
    found = make_target("qwen3_5_text", rope_parameters=ROPE, **HYBRID)
    assert found.rope_theta == 1e7  # (fault kind 57)
    return found


def make_ids(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


def states_of(target, samples, batch_tokens=400):
    found = extract_features(target, TAPS, samples, batch_tokens)
    return {i: torch.cat([taps.flatten(1), final], 1) for i, taps, final in found}


def test_states_do_not_depend_on_the_batch(target):
    """Alone, batched, in reverse order, twice (fault kind 39)."""
    samples = make_ids(LENGTHS)
    batched, again = states_of(target, samples), states_of(target, samples)
    backwards = states_of(target, samples[::-1])
    for i, ids in enumerate(samples):
        assert torch.equal(batched[i], again[i])
        torch.testing.assert_close(
            batched[i], backwards[len(samples) - 1 - i], atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(batched[i], states_of(target, [ids])[0], atol=1e-4, rtol=1e-4)


def test_changing_one_sample_never_moves_another(target):
    """To the last bit, in every batch the engine makes (fault kind 39)."""
    samples = make_ids(LENGTHS)
    before = states_of(target, samples)
    for changed in range(len(samples)):
        others = list(samples)
        others[changed] = (samples[changed] + 1) % VOCAB
        after = states_of(target, others)
        same = [torch.equal(before[i], after[i]) for i in range(len(samples))]
        assert same == [i != changed for i in range(len(samples))]


def test_samples_in_one_row_would_leak(target):
    """A control: two samples one after the other in a row do move each other (fault kind 39)."""
    first, second = make_ids([20, 30])
    other = (first + 1) % VOCAB
    rows = [np.concatenate([head, second]) for head in (first, other)]
    left, right = (states_of(target, [row])[0][20:] for row in rows)
    assert not torch.allclose(left, right, atol=1e-3)


def test_taps_are_the_models_own_hidden_states(target):
    """At recurrent and at attention layers alike (fault kind 42)."""
    (ids,) = make_ids([40])
    taps_wanted = [2, 3]
    ((_, taps, _),) = extract_features(target, taps_wanted, [ids], 400)
    with torch.no_grad():
        hidden = target.model(
            torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True
        ).hidden_states
    for place, layer in enumerate(taps_wanted):
        torch.testing.assert_close(taps[:, place], hidden[layer + 1][0])


def test_a_store_of_a_hybrid_has_no_empty_row(target, tmp_path):
    """Every tap of every token is there, finite and not zero (fault kind 21)."""
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    config = ExtractConfig(**(CONFIG.model_dump() | {"taps": TAPS}))
    store: FeatureStore = extract(target, config, table, tmp_path / "store")
    for i in range(len(store)):
        taps = store.sample(i).taps
        assert torch.isfinite(taps).all() and taps.ne(0).any(-1).all()


def test_a_recurrent_layer_that_returns_zeros_is_refused(target, tmp_path, monkeypatch):
    """From one token on, as when a state is read from the wrong slot (fault kind 21)."""
    layer = target.layers[2]
    real = layer.forward

    def empty_behind(*args, **kwargs):
        out = real(*args, **kwargs).clone()
        out[:, 5:] = 0
        return out

    monkeypatch.setattr(layer, "forward", empty_behind)
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    config = ExtractConfig(**(CONFIG.model_dump() | {"taps": TAPS}))
    with pytest.raises(StoreError, match="zero"):
        extract(target, config, table, tmp_path / "store")


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A checkpoint of the multimodal class, whose two end tokens stand in different places."""
    torch.manual_seed(0)
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB,
        "max_position_embeddings": 128, "rope_parameters": ROPE, "eos_token_id": END + 2,
        "pad_token_id": 0, **HYBRID,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 32, "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = [END + 1, END + 2]
    folder = tmp_path_factory.mktemp("multimodal")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder, model


def test_the_multimodal_class_loads_as_a_text_model(multimodal):
    """Same logits; the rotary base comes from the nested text configuration (fault kind 57)."""
    folder, model = multimodal
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "Qwen3_5ForConditionalGeneration"
    ]
    target = load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, model(ids).logits)
    assert target.rope_theta == 1e7 and target.num_layers == 4


def test_every_end_token_stops(multimodal):
    """Of the generation config, the tokenizer and the text configuration, in both loaders."""
    config = TargetConfig(path=str(multimodal[0]), dtype="float32", device="cpu")
    assert load_vocabulary(config).stop_ids == [END, END + 1, END + 2]
    assert load_target(config).stop_ids == [END, END + 1, END + 2]


def test_ids_beyond_the_tokenizer_are_valid_rows(multimodal):
    """The embedding has more rows than the tokenizer has ids (fault kind 18)."""
    config = TargetConfig(path=str(multimodal[0]), dtype="float32", device="cpu")
    vocabulary = load_vocabulary(config)
    assert len(vocabulary.tokenizer) < vocabulary.rows == VOCAB == load_target(config).vocab_rows
