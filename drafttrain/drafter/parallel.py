"""Draft every anchor of a stored sample at once, as in training: for replay, without the target."""

from collections.abc import Iterator

import torch
from torch import Tensor

from drafttrain.data.store_reader import StoredSample
from drafttrain.extract.head import Head

from .masks import BlockLayout, layer_masks
from .model import Drafter


def block_embeddings(head: Head, anchor_ids: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Embeddings of blocks: anchors [R, A] -> [R, A*B, d] (slot 0 the anchor, the rest masks)."""
    rows, anchors = anchor_ids.shape
    ids = anchor_ids.new_full((rows, anchors, block_size), mask_token_id)
    ids[..., 0] = anchor_ids
    return head.embed(ids.flatten(1))


@torch.inference_mode()
def draft_anchors(
    drafter: Drafter, head: Head, sample: StoredSample, anchors: Tensor, chunk: int = 64
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draft from stored context, ``chunk`` anchors at a time.

    Args:
        drafter: in evaluation mode.
        head: on the drafter's device.
        sample: a stored sample with taps [n, n_taps, d].
        anchors: [A] int64 positions in the sample, each at least 1.
        chunk: anchors per forward; bounds memory at chunk * (B-1) * V logits.

    Yields:
        (anchors of the chunk [c], logits float32 [c, B-1, V] on the drafter's device).
    """
    config, device, dtype = drafter.config, drafter.fc.weight.device, drafter.fc.weight.dtype
    length = len(sample.input_ids)
    positions = torch.arange(length, device=device)[None]
    context = drafter.context_kv(sample.encoded_taps.decode(device, dtype)[None], positions)
    ids = sample.input_ids.to(device)
    for part in anchors.to(device).split(chunk):
        layout = BlockLayout(
            context_doc=torch.zeros_like(positions),
            context_pos=positions,
            anchor_doc=torch.zeros_like(part)[None],
            anchor_pos=part[None],
            block_size=config.block_size,
        )
        masks = layer_masks(layout, config.layer_types, config.sliding_window)
        embeds = block_embeddings(head, ids[part][None], config.block_size, config.mask_token_id)
        hidden = drafter.blocks(embeds, layout.block_pos, context, masks)
        slots = hidden.unflatten(1, (len(part), config.block_size))[0, :, 1:]
        yield part.cpu(), head.logits(slots)
