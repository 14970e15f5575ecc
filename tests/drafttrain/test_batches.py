"""Micro-batches: padded and packed hold the same blocks; rounding up adds nothing."""

import pytest
import torch

from drafttrain.batches import make_batch
from drafttrain.drafter.masks import NO_DOCUMENT

from .drafter.factory import make_sample

SAMPLES = [(0, make_sample(20, seed=1)), (0, make_sample(33, seed=2)), (2, make_sample(9, seed=3))]


def blocks(batch):
    """{(sample, position): (anchor id, labels, supervision, context taps seen)}"""
    found = {}
    rows = batch.layout.anchor_doc.shape[0]
    for row, place in (batch.layout.anchor_doc >= 0).nonzero().tolist():
        document = batch.layout.anchor_doc[row, place].item()
        number = row if rows > 1 else document
        where = batch.layout.context_doc[row] == document
        found[batch.sample_ids[number], batch.layout.anchor_pos[row, place].item()] = (
            batch.anchor_ids[row, place].item(),
            batch.labels[row, place].tolist(),
            batch.supervised[row, place].tolist(),
            batch.taps.decode()[row, where].sum().item(),
        )
    return found


@pytest.mark.parametrize("multiple", [1, 16])
def test_packed_padded_and_rounded_batches_hold_the_same_blocks(multiple):
    arguments = {"seed": 4, "anchors": 6, "block_size": 4}
    padded = make_batch(SAMPLES, **arguments, packing=False)
    packed = make_batch(SAMPLES, **arguments, packing=True, multiple=multiple)
    assert blocks(padded).keys() == blocks(packed).keys() and len(blocks(padded)) == 18
    for key, (anchor, labels, supervised, taps) in blocks(padded).items():
        other = blocks(packed)[key]
        assert other[:3] == (anchor, labels, supervised)
        assert other[3] == pytest.approx(taps, abs=1e-3)
    assert padded.num_tokens == packed.num_tokens == 62
    assert packed.layout.context_doc.shape[1] % multiple == 0
    assert packed.anchor_ids.shape[1] * 4 % multiple == 0


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp8"])
def test_taps_travel_as_they_are_stored_and_decode_to_the_samples_own(codec, packing):
    samples = [make_sample(20, seed=1, codec=codec), make_sample(33, seed=2, codec=codec)]
    arguments = {"seed": 4, "anchors": 6, "block_size": 4, "packing": packing, "multiple": 16}
    batch = make_batch([(0, sample) for sample in samples], **arguments)
    for suffix, part in samples[0].encoded_taps.parts.items():
        assert batch.taps.parts[suffix].dtype == part.dtype
    for dtype in (None, torch.float32, torch.bfloat16):
        taps = batch.taps.decode(torch.device("cpu"), dtype)
        for number, sample in enumerate(samples):
            row, document = (0, number) if packing else (number, 0)
            where = batch.layout.context_doc[row] == document
            assert torch.equal(taps[row, where], sample.encoded_taps.decode(dtype=dtype))
        padding = taps[batch.layout.context_doc == NO_DOCUMENT]
        assert len(padding) and not padding.any()


def test_labels_are_the_tokens_that_follow_the_anchor():
    batch = make_batch(SAMPLES[1:2], seed=0, anchors=100, block_size=4, packing=False)
    ids = SAMPLES[1][1].input_ids
    for place, position in enumerate(batch.layout.anchor_pos[0].tolist()):
        assert batch.anchor_ids[0, place] == ids[position]
        labels = batch.labels[0, place][batch.supervised[0, place]]
        assert torch.equal(labels, ids[position + 1 : position + 4])
