"""config.json of published checkpoints: what is read, what is written, what is refused."""

from pathlib import Path

import pytest

from drafttrain.data.errors import CheckpointError
from drafttrain.drafter.hf_config import from_hf_config, to_hf_config
from drafttrain.serving import serving_notes

from .factory import drafter_config

SOURCE = Path("config.json")
# The fields of the published Qwen3.6-27B drafter (sizes as in its config.json).
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "num_hidden_layers": 5,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "hidden_act": "silu",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": 5,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "num_target_layers": 64,
    "vocab_size": 248320,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-06,
    "eos_token_id": 248044,
    "pad_token_id": 248044,
    "dtype": "bfloat16",
}


def test_published_config_loads_and_round_trips():
    config = from_hf_config(PUBLISHED, SOURCE)
    assert config.rope_theta == 1e7 and config.sliding_window == 2048
    assert config.num_taps == 5 and config.num_draft_tokens == 15
    assert from_hf_config(to_hf_config(config), SOURCE) == config


def test_the_trained_length_is_kept_and_is_not_part_of_what_a_drafter_computes():
    """(fault kind 82)"""
    published = from_hf_config(PUBLISHED, SOURCE)
    ours = published.model_copy(update={"trained_length": 4096})
    assert published.trained_length is None
    assert from_hf_config(to_hf_config(ours), SOURCE) == ours
    assert ours.differences(published) == []
    assert ours.differences(ours.model_copy(update={"block_size": 8})) == ["block_size"]
    assert "4096 tokens" in serving_notes(ours, "t")
    assert "longest training sample" not in serving_notes(published, "t")


def test_every_value_that_engines_read_is_written():
    """(fault kind 90)"""
    written = to_hf_config(drafter_config(8, "sf", 64, mask_token_id=17))
    assert written["dflash_config"] == {"mask_token_id": 17, "target_layer_ids": [1, 3]}
    expected = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "num_target_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "use_sliding_window": True,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "vocab_size": 50,
        "head_dim": 16,
    }
    assert {k: written[k] for k in expected} == expected
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # (fault kind 56) the mask id is never guessed
        ({"dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61]}}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 5}}, "target_layer_ids is missing"),
        ({"dflash_config": None}, "dflash_config is missing"),
        # (fault kind 57) the rotary base is never guessed
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta is 10000.0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type = 'yarn'"),
        # (fault kind 85) fields copied from the target that training did not implement
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor is not 1",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size = 32000"),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"causal": True}}, "dflash_config.causal"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures is"),
        ({"architectures": None}, "architectures is None"),
        ({"block_size": None}, "block_size is missing"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"head_dim": "wide"}, "wrong type"),
        ({"layer_types": ["chunked_attention"] * 5}, "wrong type"),
    ],
)
def test_fields_that_would_be_served_differently_are_refused(change, message):
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        from_hf_config(PUBLISHED | change, SOURCE)
    assert message in str(caught.value)


def test_configs_older_than_layer_types_follow_the_window_fields():
    old = {k: v for k, v in PUBLISHED.items() if k != "layer_types"}
    full = from_hf_config(old | {"use_sliding_window": False}, SOURCE)
    assert full.layer_types == ["full_attention"] * 5 and full.sliding_window is None
    some = from_hf_config(old | {"max_window_layers": 3}, SOURCE)
    assert some.layer_types == ["full_attention"] * 3 + ["sliding_attention"] * 2


def test_nested_only_rotary_base_is_read():
    nested = {k: v for k, v in PUBLISHED.items() if k != "rope_theta"}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    assert from_hf_config(nested, SOURCE).rope_theta == 5e6
