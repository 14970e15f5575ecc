"""The training log and the loggers that are chosen for it; wandb and mlflow are stand-ins."""

import json
import math
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drafttrain.data.errors import RecipeError
from drafttrain.metrics_log import MetricsLog, check_loggers, read_metrics
from drafttrain.recipe import Recipe

from .test_recipe import MINIMAL

WANDB = """
import json, os
class Run:
    def __init__(self, **settings):
        self.seen = [["init", sorted(settings), settings["name"]]]
    def log(self, numbers, step):
        self.seen.append(["log", step, numbers])
    def finish(self):
        with open(os.environ["SEEN"], "w") as file:
            json.dump(self.seen, file)
def init(**settings):
    return Run(**settings)
"""
MLFLOW = """
import json, os
seen = []
def set_experiment(name): seen.append(["experiment", name])
def start_run(run_name): seen.append(["start", run_name])
def log_dict(values, name): seen.append(["recipe", values["train"]["global_batch"]])
def log_metrics(numbers, step): seen.append(["log", step, numbers])
def end_run():
    with open(os.environ["SEEN"], "w") as file:
        json.dump(seen, file)
"""
LINES = [
    {"step": 1, "loss": 2.5, "mfu": None, "samples": "abc", "slot_accuracy": [0.5, 0.25]},
    {"step": 2, "loss": math.nan, "mfu": None, "samples": "abd", "slot_accuracy": [0.0, 0.0]},
]
SEEN = [
    ["log", 1, {"train/loss": 2.5, "train/slot_accuracy/1": 0.5, "train/slot_accuracy/2": 0.25}],
    ["log", 2, {"train/slot_accuracy/1": 0.0, "train/slot_accuracy/2": 0.0}],
    ["log", 2, {"replay_tau/chain": 1.5}],
]


def make_recipe(folder, *loggers: str) -> Recipe:
    train = MINIMAL["train"] | {"loggers": list(loggers)}
    return Recipe.model_validate(MINIMAL | {"output": str(folder / "run"), "train": train})


def write_run(recipe: Recipe) -> None:
    recipe.output.mkdir(exist_ok=True)
    log = MetricsLog(recipe, 0)
    for line in LINES:
        log.write(line)
    log.scalars(2, {"replay_tau/chain": 1.5})
    log.close()


@pytest.mark.parametrize(("package", "source"), [("wandb", WANDB), ("mlflow", MLFLOW)])
def test_a_chosen_logger_gets_steps_and_evaluations(package, source, tmp_path, monkeypatch):
    (tmp_path / f"{package}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    check_loggers(["tensorboard", package])
    write_run(make_recipe(tmp_path, package))
    seen = json.loads((tmp_path / "seen.json").read_text())
    del sys.modules[package]
    assert [event for event in seen if event[0] == "log"] == SEEN
    if package == "wandb":
        assert seen[0] == ["init", ["config", "dir", "name", "project"], "run"]
    else:
        assert seen[:3] == [["experiment", "drafttrain"], ["start", "run"], ["recipe", 8]]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_tensorboard_and_json_lines_are_the_default(tmp_path):
    recipe = Recipe.model_validate(MINIMAL | {"output": str(tmp_path / "run")})
    write_run(recipe)
    board = EventAccumulator(str(recipe.output / "tensorboard")).Reload()
    shown = {
        tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]
    }
    assert shown == {
        "train/loss": [(1, 2.5)],
        "train/slot_accuracy/1": [(1, 0.5), (2, 0.0)],
        "train/slot_accuracy/2": [(1, 0.25), (2, 0.0)],
        "replay_tau/chain": [(2, 1.5)],
    }
    lines = read_metrics(recipe.output / "metrics.jsonl")
    assert lines == [LINES[0], LINES[1] | {"loss": None}]
    assert "NaN" not in (recipe.output / "metrics.jsonl").read_text()


def test_without_loggers_there_is_the_file_alone(tmp_path):
    recipe = make_recipe(tmp_path)
    write_run(recipe)
    assert [path.name for path in recipe.output.iterdir()] == ["metrics.jsonl"]


def test_a_logger_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"train\.loggers has wandb, .* `pip install wandb`"):
        check_loggers(["wandb"])
