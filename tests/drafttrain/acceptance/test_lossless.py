"""Where two outputs differ, and when rounding may explain it (fault kinds 76, 77)."""

import pytest
import torch

from drafttrain.acceptance.decode import Decoded
from drafttrain.acceptance.lossless import compare_outputs, first_difference, near_tie_bound
from drafttrain.acceptance.tau import RoundLog

NAMES = {"sample_id": "s", "method": "chain"}


def baseline(margins):
    tokens = list(range(10, 10 + len(margins)))
    return Decoded(tokens, RoundLog(), False, margins, peaks=[8.0] * len(margins))


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1),
        ([], [], None),
    ],
)  # fmt: skip
def test_first_difference(left, right, position):
    assert first_difference(left, right) == position


@pytest.mark.parametrize(
    ("dtype", "margin", "excused"),
    [
        (torch.bfloat16, 0.2, True),  # 4 steps of 2^-7 at a logit of 8: 0.25
        (torch.bfloat16, 0.3, False),
        (torch.float16, 0.02, True),
        (torch.float16, 0.2, False),
        (torch.float32, 1e-7, False),
        (torch.float32, 0.0, False),
    ],
)
def test_a_flip_is_excused_below_the_bound_only(dtype, margin, excused):
    record = compare_outputs(NAMES, 0.0, baseline([1.0, margin, 1.0]), [10, 99, 12], dtype)
    assert record.position == 1 and record.margin == margin
    assert not record.identical and record.near_tie == excused
    assert record.bound == near_tie_bound(dtype, 8.0)


def test_equal_outputs_have_no_margin():
    record = compare_outputs(NAMES, 0.0, baseline([0.0, 0.0]), [10, 11], torch.bfloat16)
    assert record.identical and not record.near_tie and record.margin is None


def test_a_shorter_output_is_never_excused():
    record = compare_outputs(NAMES, 0.0, baseline([0.0, 0.0]), [10], torch.bfloat16)
    assert record.position == 1 and not record.near_tie


def test_sampled_outputs_have_no_margin_to_excuse_them():
    record = compare_outputs(NAMES, 1.0, baseline([0.0, 0.0]), [10, 12], torch.bfloat16)
    assert record.position == 1 and not record.near_tie
