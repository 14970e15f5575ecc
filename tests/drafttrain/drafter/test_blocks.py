"""Anchors and labels by hand."""

import numpy as np
import pytest

from drafttrain.drafter.blocks import anchor_candidates, block_labels, draw_anchors


def test_supervision_of_blocks_around_an_answer():
    """Answer at positions 8-39, then a separator; block 4 (fault kind 47)."""
    ids = np.arange(100, 145)
    mask = np.zeros(45, dtype=bool)
    mask[8:40] = True
    labels, supervised = block_labels(ids, mask, np.array([6, 7, 8, 37, 39]), 4)
    assert supervised.tolist() == [
        [False, False, False],  # anchor 6: token 7 is a prompt token
        [True, True, True],  # anchor 7 predicts 8, 9, 10 (but is no candidate itself)
        [True, True, True],
        [True, True, False],  # 38, 39, then the separator
        [False, False, False],
    ]
    assert labels[2].tolist() == [109, 110, 111]  # slot k predicts anchor + k
    assert labels[3].tolist() == [138, 139, 0]
    candidates = anchor_candidates(mask)
    assert candidates[0] == 8 and candidates[-1] == 38
    # Every answer token after the first is predicted by slot 1 of some anchor.
    assert set(candidates + 1) == set(range(9, 40))


def test_labels_stop_at_the_end_of_the_document_and_of_the_turn():
    """(fault kind 49)"""
    ids = np.arange(12)
    mask = np.ones(12, dtype=bool)
    mask[5] = False  # two turns: 0-4 and 6-11
    _, supervised = block_labels(ids, mask, np.array([3, 9]), 16)
    assert supervised[0].sum() == 1  # token 4 only, although 6-11 are supervised too
    assert supervised[1].sum() == 2  # tokens 10 and 11


def test_anchor_draw_depends_on_its_key_alone():
    mask = np.ones(200, dtype=bool)

    def draw(epoch=0, sample="a", seed=0, count=20):
        return draw_anchors(mask, count, seed=seed, epoch=epoch, sample_id=sample).tolist()

    first = draw()
    np.random.seed(5)
    assert draw() == first
    assert len(set(first)) == 20 and first == sorted(first) and max(first) <= 198
    assert draw(epoch=1) != first and draw(sample="b") != first and draw(seed=1) != first
    assert draw(count=1000) == list(range(199))


def test_anchor_draw_is_uniform():
    mask = np.ones(11, dtype=bool)
    counts = np.zeros(11)
    for epoch in range(4000):
        counts[draw_anchors(mask, 3, seed=0, epoch=epoch, sample_id="x")] += 1
    assert counts[10] == 0
    assert counts[:10] == pytest.approx(1200, abs=5 * np.sqrt(1200 * 0.7))
