"""Intervals over prompts (fault kind 80)."""

import numpy as np
import pytest

from drafttrain.acceptance.stats import paired_interval, tau_interval


def prompts(count, seed=0, gain=0.0):
    """Prompts that differ by half, 20 rounds each."""
    taus = np.random.default_rng(seed).uniform(1.5, 4.5, count)
    rounds = np.full(count, 20)
    return np.round(rounds * (taus + gain)).astype(np.int64), rounds


def test_the_value_is_the_micro_average():
    interval = tau_interval(np.array([10, 90]), np.array([10, 30]), resamples=200)
    assert interval.value == 2.5  # not the mean of 1 and 3


def test_five_prompts_give_a_wide_interval_and_many_a_narrow_one():
    few, many = (tau_interval(*prompts(n), resamples=2000) for n in (5, 2000))
    assert few.low < few.value < few.high and many.low < many.value < many.high
    assert few.high - few.low > 0.8 > 0.1 > many.high - many.low


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        interval = tau_interval(*prompts(60, seed), resamples=300, seed=seed)
        covered += interval.low <= 3.0 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_one_prompt_has_no_interval():
    interval = tau_interval(np.array([30]), np.array([10]), resamples=200)
    assert (interval.value, interval.low, interval.high) == (3.0, None, None)
    change = paired_interval(*[(np.array([n]), np.array([10])) for n in (40, 30)], resamples=200)
    assert change.value == 1.0 and change.verdict == "no clear difference"


def test_the_same_seed_gives_the_same_interval():
    data = prompts(30)
    assert tau_interval(*data, 300, seed=1) == tau_interval(*data, 300, seed=1)
    assert tau_interval(*data, 300, seed=1) != tau_interval(*data, 300, seed=2)


def test_blocks_of_resamples_do_not_change_the_interval(monkeypatch):
    data = prompts(30)
    whole = tau_interval(*data, 300)
    monkeypatch.setattr("drafttrain.acceptance.stats._BLOCK", 90)
    assert tau_interval(*data, 300) == whole


def test_a_small_gain_on_the_same_prompts_is_seen_through_their_spread():
    old, new = prompts(40), prompts(40, gain=0.1)
    change = paired_interval(new, old, resamples=1000)
    assert change.verdict == "improved" and change.value == pytest.approx(0.1, abs=0.02)
    assert paired_interval(old, new, resamples=1000).verdict == "worse"
    # Side by side the intervals overlap: unpaired, nothing could be said.
    assert tau_interval(*new, 1000).low < tau_interval(*old, 1000).high


def test_a_gain_on_some_prompts_and_a_loss_on_others_is_no_improvement():
    """The mean rises, but another draw of prompts could have lowered it (fault kind 80)."""
    old = prompts(5)
    new = (old[0] + np.array([40, -15, -10, 20, -12]), old[1])
    change = paired_interval(new, old, resamples=2000)
    assert change.value > 0 and change.low < 0 < change.high
    assert change.verdict == "no clear difference"


def test_equal_drafters_do_not_differ():
    data = prompts(40)
    change = paired_interval(data, data, resamples=200)
    assert (change.value, change.low, change.high) == (0.0, 0.0, 0.0)
    assert change.verdict == "no clear difference"
