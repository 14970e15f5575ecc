"""The target's own draws: exact probabilities, greedy in the limit, seeded by sample."""

import pytest
import torch

from drafttrain.acceptance.sampling import Sampler, greedy, make_chooser, probabilities

LOGITS = torch.tensor([[0.3, -1.0, 2.0, 0.0]])


def measure(temperature, token):
    """Length of the interval of uniform numbers that give this token, found by bisection."""

    def drawn(u):
        return Sampler(temperature, lambda: u)(LOGITS)(0)

    def edge(reached):
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if reached(drawn(middle)) else (middle, high)
        return high

    return edge(lambda t: t > token) - edge(lambda t: t >= token) * (token > 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_share_of_draws_that_give_a_token_is_its_probability(temperature):
    expected = (LOGITS[0].double() / temperature).softmax(-1)
    for token in range(4):
        assert abs(measure(temperature, token) - float(expected[token])) < 1e-9


def test_a_vanishing_temperature_is_greedy():
    """(fault kind 73)"""
    for temperature in (1e-3, 1e-30, 1e-300):
        for u in (0.0, 0.5, 1 - 1e-12):
            assert Sampler(temperature, lambda u=u: u)(LOGITS)(0) == greedy(LOGITS)(0) == 2


def test_greedy_takes_the_smallest_of_equal_tokens():
    assert greedy(torch.zeros(2, 5))(1) == 0


def test_probabilities_are_exact_in_the_tails():
    weights = probabilities(torch.tensor([0.0, 40.0]), 1.0)
    assert weights.dtype == torch.float64
    assert float(weights[0]) == pytest.approx(4.248354255291589e-18, rel=1e-9)


def test_draws_depend_on_seed_and_sample_and_on_nothing_else():
    logits = torch.zeros(1, 1000)

    def draws(seed, sample):
        at = make_chooser(1.0, seed, sample)(logits)
        return [at(0) for _ in range(8)]

    assert draws(0, "a") == draws(0, "a")
    assert len({tuple(draws(*key)) for key in [(0, "a"), (1, "a"), (0, "b")]}) == 3
