"""Training on samples that overflow, and on few enough to learn by heart."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafttrain import stages
from drafttrain.acceptance.report import read_report
from drafttrain.data.order import sample_at
from drafttrain.data.store_reader import FeatureStore
from drafttrain.metrics_log import read_metrics
from drafttrain.recipe import load_recipe
from tests.data.store_factory import change_record

from . import tiny
from .conftest import drafttrain
from .runs import copy_run, start_rank

pytestmark = pytest.mark.xdist_group("training")


def poison(folder: Path, wanted: set[int]) -> list[str]:
    """Put an infinite tap into samples, under valid checksums; returns their ids."""
    names, first = [], 0
    for record in sorted(folder.glob("shard-*.json")):
        lengths = json.loads(record.read_text())["lengths"]
        path = record.with_suffix(".safetensors")
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        for place, length in enumerate(lengths):
            if first + place in wanted:
                tensors["taps"][sum(lengths[: place + 1]) - length + 1] = math.inf
        save_file(tensors, path, metadata)
        change_record(folder, record.stem)
        first += len(lengths)
    store = FeatureStore(folder)
    for index in sorted(wanted):
        assert store.sample(index).taps.isinf().any()
        names.append(store.index(index).sample_id)
    return names


def test_poisoned_samples_end_the_run_by_name_and_leave_its_checkpoint(extracted, tmp_path):
    """(fault kind 52)"""
    average = {"ema": 0.9, "activation_checkpointing": True, "stop_after_skipped": 2}
    recipe = copy_run(extracted, tmp_path, zero_stage=2, checkpoint_every=4, **average)
    run, values = tmp_path / "run", yaml.safe_load(recipe.read_text())
    store, batch = run / "store" / "train", values["train"]["global_batch"]
    count = FeatureStore(store).meta.num_samples
    # One sample of steps 3, 6 and 7; the first of rank 1, the others of rank 0.
    places = [(3 - 1) * batch + batch - 1, (6 - 1) * batch, (7 - 1) * batch + 1]
    names = [poison(store, {sample_at(count, 0, place)[1]})[0] for place in places]
    done = drafttrain("train", "--ranks", "2", "--recipe", str(recipe))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "2 steps in a row had gradients that are not finite" in done.stderr
    error = next(line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert names[1] in error and names[2] in error and names[0] not in error
    shown = done.stdout + done.stderr
    assert "step 3 skipped, weights unchanged" in shown and names[0] in shown
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1, 2]
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False, True]
    folders = [path.name for path in (run / "checkpoints").iterdir()]
    assert folders == ["step-000004"]
    folder = run / "checkpoints" / "step-000004"
    drafter = load_file(folder / "drafter" / "model.safetensors")
    kept = load_file(folder / "deepspeed" / "ema.safetensors")
    assert all(torch.equal(drafter[name], kept[name]) for name in kept)
    assert all(weight.isfinite().all() for weight in drafter.values())


def random_word_records(path: Path, count: int) -> Path:
    """Token records of random words; ``greedy``, so that replay takes them for the target's own.

    Only the stored states tell which token comes next, so nothing short of learning them by heart
    is right: the random target's real text repeats one token.
    """
    rng = random.Random(0)
    ids = range(len(tiny.SPECIAL), len(tiny.SPECIAL) + len(tiny.WORDS))
    with path.open("w") as file:
        for number in range(count):
            record = {
                "id": f"words-{number}",
                "prompt_ids": rng.choices(ids, k=6),
                "response_ids": rng.choices(ids, k=41),
                "sampling": "greedy",
            }
            file.write(json.dumps(record) + "\n")
    return path


def test_eight_samples_are_learnt_by_heart(target, tmp_path):
    """(fault kind 68)"""
    words = {"path": str(random_word_records(tmp_path / "words.jsonl", 8)), "name": "words"}
    path = tiny.make_recipe(
        tmp_path,
        target,
        data={"eval": [words]},
        drafter={"head_dim": 16, "intermediate_size": 128},
        train={
            "epochs": 160.0,
            "global_batch": 8,
            "micro_batch": 8,
            "anchors": 64,
            "gamma": 4.0,
            "lr": 1e-2,
            "checkpoint_every": 160,
        },
    )
    recipe = load_recipe(path)
    stages.prepare(recipe)
    stages.extract(recipe)
    # Preparation keeps evaluation samples out of training; here they are to be the same.
    shutil.rmtree(recipe.store("train"))
    shutil.copytree(recipe.store("eval"), recipe.store("train"))
    shutil.copy(recipe.table("eval"), recipe.table("train"))
    process = start_rank(path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    lines = read_metrics(recipe.output / "metrics.jsonl")
    assert lines[0]["expected_accepted_length"] < 1.5
    assert min(lines[-1]["slot_accuracy"]) > 0.95
    assert lines[-1]["expected_accepted_length"] > 0.9 * recipe.drafter.block_size
    replay = read_report(recipe.reports / "step-000160.json").replay
    assert replay.overall("chain").tau >= 0.9 * recipe.drafter.block_size
