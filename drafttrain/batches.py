"""From stored samples to the tensors of one micro-batch.

    (epoch, sample) pairs -> Batch: taps [R, S, n_taps, d], layout, anchors and labels

Two layouts with the same meaning: padded (one sample per row) and packed (all samples of the
micro-batch in one row, told apart by document number, positions restarting in each). Anchors are
drawn per sample by ``drafter.blocks.draw_anchors``; unused places of a row are never supervised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.codec import Encoded
from drafttrain.data.host_memory import host_zeros
from drafttrain.data.store_reader import StoredSample

from .drafter.blocks import block_labels, draw_anchors
from .drafter.masks import NO_DOCUMENT, BlockLayout


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on the host.

    Attributes:
        sample_ids: which samples, in order.
        taps: [R, S, n_taps, d] as the store has them; they decode to zeros on padding.
        layout: positions and documents.
        anchor_ids: [R, A] int64 token ids of the anchors.
        labels: [R, A, B-1] int64.
        supervised: [R, A, B-1] bool.
        num_tokens: context tokens without padding.
    """

    sample_ids: list[str]
    taps: Encoded
    layout: BlockLayout
    anchor_ids: Tensor
    labels: Tensor
    supervised: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Document:
    sample: StoredSample
    anchors: np.ndarray
    labels: np.ndarray
    supervised: np.ndarray


def make_batch(
    samples: Sequence[tuple[int, StoredSample]],
    *,
    seed: int,
    anchors: int,
    block_size: int,
    packing: bool,
    multiple: int = 1,
) -> Batch:
    """Draw anchors and lay out the samples of one micro-batch.

    Args:
        samples: the samples, each with its epoch.
        seed: of the anchor draw.
        anchors: at most so many per sample.
        block_size: B.
        packing: all samples in one row instead of a row each.
        multiple: round tokens and slots of a row up to this, so that a compiler sees few shapes.
    """
    documents = []
    for epoch, sample in samples:
        mask = sample.loss_mask.numpy()
        drawn = draw_anchors(mask, anchors, seed=seed, epoch=epoch, sample_id=sample.sample_id)
        labels, supervised = block_labels(sample.input_ids.numpy(), mask, drawn, block_size)
        documents.append(_Document(sample, drawn, labels, supervised))
    rows = [documents] if packing else [[document] for document in documents]
    return _collate(rows, block_size, multiple)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As ``like.new_zeros(shape)``."""
    return host_zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_zeros(shape)


def _collate(rows: list[list[_Document]], block_size: int, multiple: int) -> Batch:
    """Fill the padded tensors of all rows."""
    stored = rows[0][0].sample.encoded_taps
    num_rows = len(rows)
    width = max(sum(len(doc.sample.input_ids) for doc in row) for row in rows)
    width = _round_up(width, multiple)
    # At least one place, so that a micro-batch without anchors still runs the same graph.
    places = max(1, *(sum(len(doc.anchors) for doc in row) for row in rows))
    places = _round_up(places, -(-multiple // block_size))
    taps = {
        suffix: _zeros(part, (num_rows, width, *part.shape[1:]))
        for suffix, part in stored.parts.items()
    }
    context_doc = torch.full((num_rows, width), NO_DOCUMENT)
    context_pos = torch.zeros(num_rows, width, dtype=torch.long)
    anchor_doc = torch.full((num_rows, places), NO_DOCUMENT - 1)
    anchor_pos = torch.zeros(num_rows, places, dtype=torch.long)
    anchor_ids = torch.zeros(num_rows, places, dtype=torch.long)
    labels = torch.zeros(num_rows, places, block_size - 1, dtype=torch.long)
    supervised = torch.zeros(num_rows, places, block_size - 1, dtype=torch.bool)
    for row, documents in enumerate(rows):
        token = place = 0
        for number, doc in enumerate(documents):
            tokens = slice(token, token + len(doc.sample.input_ids))
            anchors = slice(place, place + len(doc.anchors))
            positions = torch.from_numpy(doc.anchors)
            for suffix, part in doc.sample.encoded_taps.parts.items():
                taps[suffix][row, tokens] = part
            context_doc[row, tokens] = number
            context_pos[row, tokens] = torch.arange(tokens.stop - tokens.start)
            anchor_doc[row, anchors] = number
            anchor_pos[row, anchors] = positions
            anchor_ids[row, anchors] = doc.sample.input_ids[positions]
            labels[row, anchors] = torch.from_numpy(doc.labels)
            supervised[row, anchors] = torch.from_numpy(doc.supervised)
            token, place = tokens.stop, anchors.stop
    documents = [doc for row in rows for doc in row]
    return Batch(
        sample_ids=[doc.sample.sample_id for doc in documents],
        taps=Encoded(stored.codec, taps),
        layout=BlockLayout(context_doc, context_pos, anchor_doc, anchor_pos, block_size),
        anchor_ids=anchor_ids,
        labels=labels,
        supervised=supervised,
        num_tokens=sum(len(doc.sample.input_ids) for doc in documents),
    )
