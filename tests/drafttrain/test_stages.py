"""Verbs: what the exit code says."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from drafttrain import stages
from drafttrain.acceptance import checkpoints, render
from drafttrain.cli import cli
from drafttrain.extract import target as target_module
from drafttrain.extract import worker
from drafttrain.recipe import load_recipe


@pytest.mark.parametrize(("lossless", "code"), [(True, 0), (False, 1)])
def test_eval_fails_when_decoding_changed_what_the_target_says(
    monkeypatch, tmp_path, lossless, code
):
    """(fault kind 77)"""
    report = SimpleNamespace(lossless=lossless)
    monkeypatch.setattr(checkpoints, "evaluate_checkpoint", lambda *given: report)
    monkeypatch.setattr(render, "to_terminal", lambda given: "the report")
    (tmp_path / "config.json").write_text("{}")
    arguments = ["eval", "-r", "recipes/quickstart.yaml", f"output={tmp_path}"]
    done = CliRunner().invoke(cli, [*arguments, "--checkpoint", str(tmp_path)])
    assert done.exit_code == code, done.output


@pytest.mark.parametrize(
    ("options", "share"), [([], None), (["--worker", "0/1"], (0, 1)), (["--worker", "3/4"], (3, 4))]
)
def test_a_worker_of_a_static_split_does_its_share(monkeypatch, options, share):
    asked = []
    monkeypatch.setattr(stages, "extract", lambda recipe, given: asked.append(given))
    done = CliRunner().invoke(cli, ["extract", "-r", "recipes/quickstart.yaml", *options])
    assert done.exit_code == 0, done.output
    assert asked == [share]


@pytest.mark.parametrize("worker", ["4/4", "1", "-1/4", "0/0", "1/4/8", "a/b"])
def test_a_share_that_does_not_exist_is_refused(monkeypatch, worker):
    monkeypatch.setattr(stages, "extract", lambda *given: pytest.fail("it began"))
    done = CliRunner().invoke(
        cli, ["extract", "-r", "recipes/quickstart.yaml", f"--worker={worker}"]
    )
    assert done.exit_code == 2
    assert f"'{worker}' is not I/N with I from 0 to N-1" in done.output


def test_shares_fill_both_stores_and_keep_one_recipe(monkeypatch, tmp_path):
    recipe = load_recipe(Path("recipes/quickstart.yaml"), (f"output={tmp_path}",))
    asked = []

    def do_share(target, config, table, out, share):
        asked.append((target, table.name, share))
        out.mkdir(parents=True, exist_ok=True)
        return 1

    monkeypatch.setattr(target_module, "load_target", lambda config: "target")
    monkeypatch.setattr(worker, "extract_share", do_share)
    for split in ("train", "eval"):
        recipe.table(split).parent.mkdir(exist_ok=True)
        recipe.table(split).touch()
    for share in ((0, 2), (1, 2)):
        asked.clear()
        stages.extract(recipe, share)
        assert asked == [("target", "train.parquet", share), ("target", "eval.parquet", share)]
    for split in ("train", "eval"):
        assert [path.name for path in recipe.store(split).iterdir()] == ["recipe.yaml"]
