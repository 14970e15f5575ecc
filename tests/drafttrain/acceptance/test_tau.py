"""The bonus-token rule and everything counted with it."""

import numpy as np
import pytest

from drafttrain.acceptance.tau import (
    Round,
    RoundLog,
    Tally,
    accepted,
    cut_round,
    emitted_by,
    most_emitted,
    tau,
)


def test_a_block_of_eight_emits_at_most_eight():
    """7 draft tokens and the bonus: the anchor's slot drafts nothing (fault kind 78)."""
    assert most_emitted(8) == 8
    assert emitted_by(7, room=100) == (7, 8)


def test_a_round_without_a_match_still_emits_the_bonus():
    assert emitted_by(0, room=100) == (0, 1)


@pytest.mark.parametrize(
    ("matched", "room", "expected"),
    [
        (3, 5, (3, 4)),
        (3, 4, (3, 4)),
        (3, 3, (3, 3)),
        (3, 2, (2, 2)),
        (3, 1, (1, 1)),
        (0, 1, (0, 1)),
    ],
)
def test_tokens_behind_the_limit_do_not_count(matched, room, expected):
    assert emitted_by(matched, room) == expected


@pytest.mark.parametrize(
    ("stop_at", "expected"), [(0, (1, 1)), (1, (2, 2)), (2, (2, 3)), (None, (2, 3))]
)
def test_tokens_behind_a_stop_token_do_not_count(stop_at, expected):
    tokens = [10, 11, 12]  # two accepted draft tokens and the bonus
    stops = {} if stop_at is None else {tokens[stop_at]}
    done, stopped = cut_round(5, 7, tokens, room=100, stop_ids=stops)
    assert (done.accepted, done.emitted) == expected
    assert stopped == (stop_at is not None)
    assert (done.anchor, done.drafted) == (5, 7)


def test_a_stop_token_behind_the_limit_did_not_stop_the_response():
    done, stopped = cut_round(0, 2, [10, 11, 12], room=2, stop_ids={12})
    assert done.emitted == 2 and not stopped


def test_tau_is_tokens_per_round_and_accepted_leaves_out_the_bonus():
    log = RoundLog([Round(4, 3, 2, 3), Round(7, 3, 0, 1), Round(8, 3, 2, 2)])
    assert log.tokens == 6 and log.tau == 2.0
    assert accepted(log.tau) == 1.0


def test_tau_of_nothing_is_not_a_number():
    assert np.isnan(tau(0, 0)) and np.isnan(RoundLog().tau)


def test_tally_counts_and_adds_up():
    first = Tally.of([Round(0, 3, 0, 1), Round(1, 3, 3, 4)], block_size=4)
    second = Tally.of([Round(0, 3, 1, 2), Round(2, 3, 1, 1)], block_size=4)
    both = first + second
    assert both.accepted.tolist() == [1, 2, 0, 1]
    assert both.emitted.tolist() == [0, 2, 1, 0, 1]
    assert (both.rounds, both.tokens, both.tau) == (4, 8, 2.0)


def test_slot_acceptance_by_hand():
    accepted_counts = [0, 0, 1, 3]  # of four rounds with three slots
    tally = Tally.of([Round(0, 3, a, a + 1) for a in accepted_counts], block_size=5)
    unconditional, conditional = tally.slot_acceptance()
    np.testing.assert_allclose(unconditional, [0.5, 0.25, 0.25, 0.0])
    np.testing.assert_allclose(conditional, [0.5, 0.5, 1.0, 0.0])


def test_slot_acceptance_behind_a_slot_that_was_never_reached_is_unknown():
    _, conditional = Tally.of([Round(0, 3, 0, 1)], block_size=4).slot_acceptance()
    assert conditional[0] == 0.0 and np.isnan(conditional[1:]).all()
