"""A Gated DeltaNet hybrid through the whole pipeline, as a user types it."""

import json
from pathlib import Path

import pytest
import yaml

from . import tiny
from .conftest import drafttrain


@pytest.mark.slow
def test_a_hybrid_goes_from_text_to_a_lossless_report(tmp_path):
    """Prepare, extract, train, decode live: text is the target's own, replay and live agree."""
    target = tiny.make_target(tmp_path / "target", "qwen3_5_text", **tiny.HYBRID)
    recipe = tiny.make_recipe(
        tmp_path,
        target,
        train={"epochs": 1.0, "checkpoint_every": 100},
        eval={"tree_budgets": [4, 12], "live_prompts": 6, "max_new_tokens": 16},
    )
    for verb in (["data", "prepare"], ["extract"], ["train"], ["eval"]):
        done = drafttrain(*verb, "--recipe", str(recipe))
        assert done.returncode == 0, done.stderr
    output = Path(yaml.safe_load(recipe.read_text())["output"])
    report = json.loads(sorted((output / "reports").glob("step-*.json"))[-1].read_text())
    (live,) = report["live"]
    assert [row["method"] for row in live["lossless"]] == ["chain", "tree@4", "tree@12"]
    assert all(row["identical"] == row["responses"] == 6 for row in live["lossless"])
    assert live["stored"]["identical"] == 6
    assert len(live["gaps"]) == 3 and all(row["gap"] < 0.02 for row in live["gaps"])
