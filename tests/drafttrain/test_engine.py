"""Learning rate, splitting of the global batch, and the run lock."""

import pytest

from drafttrain.data.errors import DraftTrainError, RecipeError
from drafttrain.engine import accumulation_steps, lr_factor
from drafttrain.run_lock import hold_run
from drafttrain.train_config import TrainConfig


def test_learning_rate_warms_up_and_follows_a_cosine():
    factors = [lr_factor(step, 100, 0.04) for step in range(101)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0 and factors[52] == pytest.approx(0.5) and factors[100] == 0.0
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert lr_factor(0, 1, 0.0) == 1.0


def test_global_batch_must_split_over_the_ranks():
    train = TrainConfig(global_batch=12, micro_batch=2, precision="fp32", checkpoint_every=1)
    assert [accumulation_steps(train, ranks) for ranks in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(RecipeError, match="over 4 ranks"):
        accumulation_steps(train, 4)


def test_a_run_folder_has_one_writer(tmp_path):
    with hold_run(tmp_path, "training"):
        with (
            pytest.raises(DraftTrainError, match="already training"),
            hold_run(tmp_path, "training"),
        ):
            pass
        with hold_run(tmp_path, "preparing"):
            pass
        with hold_run(tmp_path, "training", rank=1):
            pass
    with hold_run(tmp_path, "training"):
        pass
