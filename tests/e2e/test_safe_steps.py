"""Training on samples that overflow, and on few enough to learn by heart."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafttrain.data.order import sample_at
from drafttrain.data.store_reader import FeatureStore
from drafttrain.metrics_log import read_metrics
from tests.data.store_factory import change_record

from .conftest import drafttrain
from .runs import copy_run

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
