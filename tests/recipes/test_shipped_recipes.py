"""Every recipe in the repository is valid, and its comments' numbers are its values."""

from pathlib import Path

import pytest

from drafttrain.losses.weights import resolve_gamma
from drafttrain.recipe import load_recipe

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(path):
    recipe = load_recipe(path)
    assert resolve_gamma(recipe.train.gamma, recipe.drafter.block_size) > 0


def test_the_large_recipe_is_the_published_geometry():
    recipe = load_recipe(next(path for path in RECIPES if path.stem == "qwen3.6-27b"))
    assert recipe.extract.taps == [1, 16, 31, 46, 61]
    assert recipe.drafter.mask_token_id == 248070 and recipe.drafter.block_size == 16
    assert recipe.drafter.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
