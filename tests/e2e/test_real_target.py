"""A real instruction-tuned model: prepared, extracted, decoded exactly with known drafters."""

from pathlib import Path

import pytest
import yaml

from tests.benchmarks import real_target_exactness

from .conftest import drafttrain

ROOT = Path(__file__).parent.parent.parent
TARGET = ROOT / "models" / "smollm2-135m"


@pytest.mark.slow
@pytest.mark.skipif(not TARGET.exists(), reason="made by `make test` and `make quickstart`")
def test_a_real_targets_text_is_its_own_with_every_kind_of_drafter(tmp_path, monkeypatch, capsys):
    """(fault kinds 69, 78)"""
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe["output"] = str(tmp_path / "run")
    recipe["data"]["train"][0]["limit"] = 2
    recipe["data"]["eval"][0]["limit"] = 2
    recipe["eval"] = {"tree_budgets": [8], "max_new_tokens": 12}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    for verb in (["data", "prepare"], ["extract"]):
        done = drafttrain(*verb, "--recipe", str(path), cwd=ROOT)
        assert done.returncode == 0, done.stderr
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["exactness", "--recipe", str(path), "--prompts", "2"])
    assert real_target_exactness.main() == 0, capsys.readouterr().out
