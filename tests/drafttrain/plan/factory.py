"""A tiny run whose sample tables are finished: a recipe, a saved target, nothing extracted."""

from pathlib import Path
from typing import Any

from drafttrain.recipe import Recipe
from tests.extract.factory import make_table, save_target

TRAIN = [40, 10, 30, 25, 60, 18, 50, 22] * 3
EVAL = [30, 20]


def make_run(folder: Path, **sections: dict[str, Any]) -> Recipe:
    """The recipe; ``sections`` update its sections."""
    target = save_target(folder / "target", tie_word_embeddings=False)
    values: dict[str, Any] = {
        "output": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32"},
        "data": {
            "train": [{"path": "unread.jsonl", "name": "x"}],
            "eval": [{"path": "unread.jsonl", "name": "x"}],
            "max_length": 64,
        },
        "extract": {"taps": 3, "codec": "fp32", "shard_tokens": 100},
        "drafter": {
            "block_size": 4,
            "mask_token_id": 3,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
        },
        "train": {
            "epochs": 2.0,
            "global_batch": 4,
            "micro_batch": 2,
            "precision": "fp32",
            "checkpoint_every": 5,
        },
        "eval": {"tree_budgets": [4, 8], "live_prompts": 1, "max_new_tokens": 10},
    }
    for name, changes in sections.items():
        values[name].update(changes)
    recipe = Recipe.model_validate(values)
    for split, lengths in (("train", TRAIN), ("eval", EVAL)):
        if not recipe.table(split).exists():
            make_table(recipe.table(split), lengths)
    return recipe
