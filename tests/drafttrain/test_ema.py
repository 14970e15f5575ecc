"""The moving average's file: refused when damaged, forecast with the rest.

``test_training_step.py`` compares the average with a slow reference under every ZeRO stage.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.checkpoint import state_bytes
from drafttrain.data.errors import CheckpointError
from drafttrain.ema import EMA_FILE, WeightAverage
from drafttrain.train_config import TrainConfig

from .drafter.factory import drafter_config, make_drafter


@pytest.fixture
def average(tmp_path):
    """An average of an engine without ZeRO, and its file."""
    drafter = make_drafter(drafter_config())
    average = WeightAverage(SimpleNamespace(module=drafter, zero_optimization_stage=lambda: 0), 0.5)
    save_file(average.full(), tmp_path / EMA_FILE)
    return average, drafter, tmp_path


def test_only_the_average_is_replaced_by_loading(average):
    average, drafter, folder = average
    before = {name: w.clone() for name, w in drafter.state_dict().items()}
    doubled = {name: 2 * w for name, w in before.items()}
    save_file(doubled, folder / EMA_FILE)
    average.load(folder)
    assert all(torch.equal(w, doubled[name]) for name, w in average.full().items())
    assert all(torch.equal(w, before[name]) for name, w in drafter.state_dict().items())


def test_early_steps_forget_faster_than_late_ones(average):
    average, drafter, _ = average
    first = drafter.norm.weight.detach().clone()
    with torch.no_grad():
        drafter.norm.weight += 1.0
    for step, decay in [(1, 2 / 11), (2, 3 / 12), (1000, 0.5)]:
        before = average.full()["norm.weight"]
        average.update(step)
        expected = decay * before + (1 - decay) * (first + 1.0)
        assert torch.allclose(average.full()["norm.weight"], expected, rtol=1e-6)


def test_damaged_and_foreign_files_are_refused(average):
    average, _, folder = average
    path = folder / EMA_FILE
    weights = load_file(path)
    save_file({name: weights[name] for name in list(weights)[1:]}, path)
    with pytest.raises(CheckpointError, match="of another drafter"):
        average.load(folder)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=f"{EMA_FILE} cannot be read"):
        average.load(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="choose another checkpoint"):
        average.load(folder)


def test_its_bytes_are_forecast():
    values = {"global_batch": 1, "micro_batch": 1, "precision": "bf16", "checkpoint_every": 1}
    with_it, without = TrainConfig(**values, ema=0.9), TrainConfig(**values)
    assert state_bytes(1000, with_it) == state_bytes(1000, without) + 4000
