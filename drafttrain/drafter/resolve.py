"""From what a recipe asks for and what the target is to the drafter's full configuration."""

from pathlib import Path

from drafttrain.data.errors import CheckpointError, RecipeError
from drafttrain.data.store_format import StoreMeta

from .config import DrafterConfig, DrafterRecipe


def resolve_config(recipe: DrafterRecipe, meta: StoreMeta) -> DrafterConfig:
    """Combine the recipe's ``drafter:`` section with the target facts of a feature store.

    Raises:
        RecipeError: a value of the recipe contradicts the target.
    """
    if recipe.mask_token_id >= meta.vocab_size:
        raise RecipeError(
            f"drafter.mask_token_id {recipe.mask_token_id} is outside the target's embedding of "
            f"{meta.vocab_size} rows"
        )
    if recipe.mask_token_id in meta.stop_ids:
        raise RecipeError(
            f"drafter.mask_token_id {recipe.mask_token_id} is a stop token of the target: choose "
            "an id that never occurs in text"
        )
    return DrafterConfig(
        hidden_size=meta.hidden_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        rms_norm_eps=recipe.rms_norm_eps,
        rope_theta=meta.rope_theta,
        max_position_embeddings=meta.max_positions,
        vocab_size=meta.vocab_size,
        block_size=recipe.block_size,
        mask_token_id=recipe.mask_token_id,
        target_layer_ids=list(meta.taps),
        num_target_layers=meta.num_target_layers,
        layer_types=recipe.layer_types or ["full_attention"] * recipe.num_hidden_layers,
        sliding_window=recipe.sliding_window,
        tie_word_embeddings=False,
        eos_token_id=list(meta.stop_ids),
    )


def check_fits(config: DrafterConfig, meta: StoreMeta, where: Path) -> None:
    """Refuse a drafter that was made for another target or other taps than a store's.

    Raises:
        CheckpointError: naming the fields that differ.
    """
    store = {
        "target_layer_ids": list(meta.taps),
        "hidden_size": meta.hidden_size,
        "vocab_size": meta.vocab_size,
        "num_target_layers": meta.num_target_layers,
        "rope_theta": meta.rope_theta,
    }
    differing = [
        f"{name} {getattr(config, name)} (the store has {value})"
        for name, value in store.items()
        if getattr(config, name) != value
    ]
    if differing:
        raise CheckpointError(f"{where} does not fit the feature store: " + ", ".join(differing))
