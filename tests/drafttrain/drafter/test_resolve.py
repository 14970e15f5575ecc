"""The drafter's full configuration from a recipe and a store, and drafters that do not fit."""

from pathlib import Path

import pytest

from drafttrain.data.errors import CheckpointError, RecipeError
from drafttrain.data.store_format import StoreMeta
from drafttrain.drafter.config import DrafterRecipe
from drafttrain.drafter.resolve import check_fits, resolve_config

META = StoreMeta(
    target="t",
    target_revision=None,
    target_dtype="float32",
    target_fingerprint="f",
    tokenizer_hash="a",
    template_hash="b",
    stop_ids=[2, 7],
    rope_theta=5e6,
    max_positions=4096,
    taps=[1, 4, 7],
    num_target_layers=10,
    hidden_size=64,
    vocab_size=100,
    final_hidden=False,
    codec="fp32",
    table_hash="h",
    shard_tokens=10,
    num_samples=1,
    num_tokens=5,
    num_shards=1,
    head_checksum="c",
)


def recipe(**changes) -> DrafterRecipe:
    values = {
        "block_size": 8,
        "mask_token_id": 17,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
    }
    return DrafterRecipe(**(values | changes))


def test_what_the_recipe_leaves_open_is_the_targets():
    """(fault kinds 42, 57)"""
    config = resolve_config(recipe(), META)
    assert config.rope_theta == 5e6 and config.target_layer_ids == [1, 4, 7]
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (64, 100, 10)
    assert config.layer_types == ["full_attention"] * 2 and config.eos_token_id == [2, 7]
    assert config.rms_norm_eps == 1e-6 and config.intermediate_size == 96


@pytest.mark.parametrize(
    ("mask", "message"), [(100, "outside the target's embedding of 100 rows"), (7, "stop token")]
)
def test_a_mask_token_that_cannot_be_one_is_refused(mask, message):
    """(fault kind 56)"""
    with pytest.raises(RecipeError, match=message):
        resolve_config(recipe(mask_token_id=mask), META)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("taps", [1, 4, 8]),
        ("hidden_size", 32),
        ("vocab_size", 99),
        ("num_target_layers", 12),
        ("rope_theta", 1e4),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_field(field, value):
    """(fault kind 42)"""
    config = resolve_config(recipe(), META)
    check_fits(config, META, Path("x"))
    other = META.model_copy(update={field: value})
    name = "target_layer_ids" if field == "taps" else field
    with pytest.raises(CheckpointError, match=name):
        check_fits(config, other, Path("x"))
