"""``drafttrain plan`` as a user types it, against what the run then really does."""

import json
from pathlib import Path

import pytest
import yaml

from . import tiny
from .conftest import drafttrain


def planned(recipe: Path, folder: Path, *arguments: str) -> dict:
    done = drafttrain("plan", "-r", str(recipe), "--json", str(folder / "plan.json"), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "plan.json").read_text())


def test_too_small_a_disk_is_exit_code_2_with_the_options(extracted, tmp_path):
    """(fault kind 34)"""
    done = drafttrain(
        "plan", "-r", str(extracted), "--space", "10KB", "--json", str(tmp_path / "p")
    )
    assert done.returncode == 2 and "extract train" in done.stdout
    assert "left of --space" in done.stderr and "extract.codec=bf16" in done.stderr
    assert not json.loads((tmp_path / "p").read_text())["fits"]
    done = drafttrain("plan", "-r", str(extracted), "--space", "10")
    assert done.returncode == 2 and "'10' is not a size" in done.stderr


def test_a_probe_measures_and_leaves_nothing_behind(extracted, tmp_path):
    """Rates of extraction and training come from real work; a given rate wins."""
    run = Path(yaml.safe_load(extracted.read_text())["output"])
    before = {path for path in run.rglob("*") if not path.name.startswith(".")}
    plan = planned(extracted, tmp_path, "--probe", "0.2", "--replay-rate", "7")
    rates = {stage["name"]: stage["rate"] for stage in plan["stages"]}
    for name in ("extract train", "extract eval", "train"):
        assert rates[name]["source"] == "probe" and rates[name]["tokens_per_s"] > 0
    assert rates["replay"] == {"tokens_per_s": 7.0, "source": "given"}
    assert {path for path in run.rglob("*") if not path.name.startswith(".")} == before
    by_name = {stage["name"]: stage for stage in plan["stages"]}
    train = by_name["train"]
    hours = train["tokens_left"] / train["rate"]["tokens_per_s"] / 3600
    assert train["gpu_hours"] == pytest.approx(hours)
    assert by_name["extract train"]["tokens_left"] == by_name["extract train"]["gpu_hours"] == 0


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "fp32")])
def test_checkpoints_take_what_was_planned(target, tmp_path, stage, precision):
    """Drafters and optimizer states of three checkpoints, of which two states are kept."""
    recipe = tiny.make_recipe(
        tmp_path,
        target,
        drafter={"intermediate_size": 2048, "num_hidden_layers": 2},
        train={
            "epochs": 0.25,
            "checkpoint_every": 1,
            "zero_stage": stage,
            "precision": precision,
        },
    )
    assert drafttrain("data", "prepare", "-r", str(recipe)).returncode == 0
    before = {s["name"]: s for s in planned(recipe, tmp_path)["stages"]}["train"]
    for verb in ("extract", "train"):
        done = drafttrain(verb, "-r", str(recipe))
        assert done.returncode == 0, done.stderr
    after = {s["name"]: s for s in planned(recipe, tmp_path)["stages"]}["train"]
    assert (after["tokens_left"], after["bytes_left"], before["bytes_done"]) == (0, 0, 0)
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(folders) == 3 and not (folders[0] / "deepspeed").exists()
    state = sum(p.stat().st_size for p in (folders[-1] / "deepspeed").rglob("*") if p.is_file())
    # Before the oldest of three is dropped all three states lie there.
    assert before["bytes_left"] == pytest.approx(after["bytes_done"] + state, rel=0.02)
