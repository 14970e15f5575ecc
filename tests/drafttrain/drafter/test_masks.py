"""The visibility rule against hand-drawn tables and a slow reference."""

import itertools

import pytest
import torch

from drafttrain.drafter.masks import BlockLayout, dense_mask


def test_two_blocks_drawn_by_hand():
    """Five context tokens, anchors at 2 and 4, blocks of 3 (fault kind 45)."""
    layout = BlockLayout(
        context_doc=torch.zeros(1, 5, dtype=torch.long),
        context_pos=torch.arange(5)[None],
        anchor_doc=torch.zeros(1, 2, dtype=torch.long),
        anchor_pos=torch.tensor([[2, 4]]),
        block_size=3,
    )
    full = """
        11000 111000
        11000 111000
        11000 111000
        11110 000111
        11110 000111
        11110 000111
    """
    sliding_3 = """
        11000 100000
        01000 110000
        00000 111000
        00110 000100
        00010 000110
        00000 000111
    """
    for window, drawing in ((None, full), (3, sliding_3)):
        lines = [line.replace(" ", "") for line in drawing.split("\n") if line.strip()]
        rows = [[c == "1" for c in line] for line in lines]
        assert dense_mask(layout, window)[0, 0].tolist() == rows


@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_mask_equals_a_slow_reference_with_documents_and_padding(window):
    docs = torch.tensor([[0] * 6 + [1] * 5 + [-1] * 2, [0] * 13])
    pos = torch.tensor([[*range(6), *range(5), 0, 0], list(range(13))])
    anchor_doc = torch.tensor([[0, 1, 1, -2], [0, 0, 0, 0]])
    anchor_pos = torch.tensor([[3, 1, 4, 0], [1, 5, 11, 12]])
    size = 3
    mask = dense_mask(BlockLayout(docs, pos, anchor_doc, anchor_pos, size), window)
    num_anchors, num_context = 4, 13
    for row, a, slot in itertools.product(range(2), range(num_anchors), range(size)):
        where = anchor_pos[row, a] + slot
        for j in range(num_context):
            visible = docs[row, j] == anchor_doc[row, a] and pos[row, j] < anchor_pos[row, a]
            if window is not None:
                visible = visible and where - pos[row, j] < window
            assert mask[row, 0, a * size + slot, j] == visible
        for other, k in itertools.product(range(num_anchors), range(size)):
            visible = other == a
            if window is not None:
                visible = visible and 0 <= slot - k < window
            assert mask[row, 0, a * size + slot, num_context + other * size + k] == visible
