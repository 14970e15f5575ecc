"""Training forward and decoding forward are the same function: the most valuable test there is."""

import pytest
import torch

from drafttrain.batches import make_batch
from drafttrain.drafter.masks import layer_masks
from drafttrain.drafter.parallel import block_embeddings, draft_anchors
from drafttrain.drafter.session import DrafterSession

from .factory import drafter_config, make_drafter, make_head, make_sample

KINDS = [("ff", None), ("ss", 5), ("sf", 7), ("fs", 300)]


def training_logits(drafter, head, samples, *, packing, anchors=64):
    """{(sample, anchor): logits [B-1, V]} from the trainer's own batch and masks."""
    config = drafter.config
    batch = make_batch(
        [(0, sample) for sample in samples],
        seed=0,
        anchors=anchors,
        block_size=config.block_size,
        packing=packing,
    )
    embeds = block_embeddings(head, batch.anchor_ids, config.block_size, config.mask_token_id)
    masks = layer_masks(batch.layout, config.layer_types, config.sliding_window)
    layout = batch.layout
    with torch.no_grad():
        hidden = drafter(batch.taps.decode(), layout.context_pos, embeds, layout.block_pos, masks)
    logits = head.logits(hidden.unflatten(1, (-1, config.block_size))[:, :, 1:])
    found = {}
    for row, place in (layout.anchor_doc >= 0).nonzero().tolist():
        document = layout.anchor_doc[row, place].item()
        sample = document if packing else row
        found[sample, layout.anchor_pos[row, place].item()] = logits[row, place]
    return found


def decoding_logits(drafter, head, sample, anchor, pieces):
    """Logits of one block by appending context in pieces, as live decoding does."""
    session = DrafterSession(drafter, head)
    start = 0
    for size in pieces:
        stop = min(start + size, anchor)
        session.append_context(sample.taps[start:stop])
        start = stop
        if start == anchor:
            break
    else:
        session.append_context(sample.taps[start:anchor])
    return session.draft(sample.input_ids[anchor].item())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize(("kinds", "window"), KINDS)
def test_training_and_decoding_draft_the_same_logits(kinds, window, block_size, packing):
    """(fault kind 45)"""
    drafter = make_drafter(drafter_config(block_size, kinds, window))
    head = make_head()
    samples = [make_sample(40, seed=5, supervised_from=3), make_sample(23, seed=6)]
    trained = training_logits(drafter, head, samples, packing=packing)
    anchors = [(0, a) for a in (3, 9, 20, 37, 38)] + [(1, a) for a in (2, 11, 21)]
    for number, anchor in anchors:
        for pieces in ([anchor], [3, 1, 2, 5] + [1] * 40):
            decoded = decoding_logits(drafter, head, samples[number], anchor, pieces)
            difference = (trained[number, anchor] - decoded).abs().max().item()
            assert difference <= 1e-4, (number, anchor, difference)
    assert decoded.std() > 0.1  # the comparison is between real numbers, not zeros


@pytest.mark.parametrize(("kinds", "window"), KINDS)
@pytest.mark.parametrize("codec", ["fp32", "fp8"])
def test_replay_drafting_equals_decoding(kinds, window, codec):
    drafter, head = make_drafter(drafter_config(4, kinds, window)), make_head()
    sample = make_sample(40, codec=codec)
    anchors = torch.tensor([2, 3, 17, 38, 39])
    parts = list(draft_anchors(drafter, head, sample, anchors, chunk=2))
    assert torch.equal(torch.cat([a for a, _ in parts]), anchors)
    for anchor, logits in zip(anchors.tolist(), torch.cat([x for _, x in parts]), strict=True):
        decoded = decoding_logits(drafter, head, sample, anchor, [anchor])
        assert (logits - decoded).abs().max() <= 1e-4


def test_a_reset_session_forgets_the_sequence():
    drafter, head = make_drafter(drafter_config()), make_head()
    first, second = make_sample(30, seed=7), make_sample(12, seed=8)
    session = DrafterSession(drafter, head)
    session.append_context(first.taps)
    session.reset()
    session.append_context(second.taps[:9])
    again = session.draft(second.input_ids[9].item())
    assert torch.equal(again, decoding_logits(drafter, head, second, 9, [9]))


@pytest.mark.parametrize(("kinds", "window"), KINDS)
@pytest.mark.parametrize("packing", [False, True])
def test_nothing_at_or_after_an_anchor_and_no_other_document_matters(kinds, window, packing):
    """(fault kinds 45, 49)"""
    drafter, head = make_drafter(drafter_config(4, kinds, window)), make_head()
    samples = [make_sample(30, seed=1), make_sample(25, seed=2)]
    anchor = 12
    before = training_logits(drafter, head, samples, packing=packing)[0, anchor]
    changed = [make_sample(30, seed=1), make_sample(25, seed=99)]
    changed[0].taps[anchor:] = 7.0  # the anchor's own state and everything later
    changed[0].input_ids[anchor + 1 :] = 1  # other blocks' anchors and all labels
    after = training_logits(drafter, head, changed, packing=packing)[0, anchor]
    assert torch.equal(before, after)
    # Control: the last visible state does matter.
    changed[0].taps[anchor - 1] += 1.0
    moved = training_logits(drafter, head, changed, packing=packing)[0, anchor]
    assert (moved - before).abs().max() > 1e-3


def test_other_blocks_of_the_same_document_do_not_matter():
    drafter, head = make_drafter(drafter_config(4, "sf", 6)), make_head()
    sample = make_sample(30, seed=1)
    many = training_logits(drafter, head, [sample], packing=False, anchors=64)
    few = training_logits(drafter, head, [sample], packing=False, anchors=5)
    assert len(few) == 5 < len(many)
    for place, logits in few.items():
        assert (many[place] - logits).abs().max() <= 1e-5


def test_a_sliding_window_hides_what_lies_behind_it():
    """(fault kind 83)"""
    sample, anchor, window = make_sample(32), 31, 8
    head = make_head()
    far = sample.taps.clone()
    far[: anchor - window + 1] += 3.0  # out of reach even of slot 0
    for kinds, reacts in (("ss", False), ("ff", True), ("sf", True)):
        drafter = make_drafter(drafter_config(4, kinds, window if "s" in kinds else None))
        session, other = DrafterSession(drafter, head), DrafterSession(drafter, head)
        session.append_context(sample.taps[:anchor])
        other.append_context(far[:anchor])
        moved = (session.draft(5) - other.draft(5)).abs().max().item()
        assert (moved > 1e-3) == reacts, (kinds, moved)
