"""Layers that run again in the backward pass: the same bits from fewer saved bytes."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from drafttrain.batches import make_batch
from drafttrain.drafter.masks import layer_masks
from drafttrain.drafter.parallel import block_embeddings

from .factory import drafter_config, make_drafter, make_head, make_sample


def run(recompute: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss, gradients, and bytes kept for the backward pass beside the weights."""
    config = drafter_config(4, "fsfs", window=8)
    drafter = make_drafter(config).train()
    drafter.recompute = recompute
    weights = {p.data_ptr() for p in drafter.parameters()}
    batch = make_batch([(0, make_sample(60))], seed=0, anchors=40, block_size=4, packing=False)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = drafter(
            batch.taps.decode(),
            batch.layout.context_pos,
            block_embeddings(make_head(), batch.anchor_ids, 4, config.mask_token_id),
            batch.layout.block_pos,
            layer_masks(batch.layout, config.layer_types, config.sliding_window),
        )
        loss = hidden.square().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters()}
    return loss.detach(), gradients, sum(kept.values())


def test_same_bits_from_fewer_saved_bytes():
    loss, gradients, kept = run(recompute=False)
    again, others, less = run(recompute=True)
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]) and gradient.any(), name
    assert less < kept / 3


def test_decoding_keeps_nothing_either_way():
    with torch.no_grad():
        drafter = make_drafter(drafter_config())
        drafter.recompute = True
        table = torch.arange(4)[None]
        context = drafter.context_kv(torch.zeros(1, 4, 2, 32), table)
        masks = {"full_attention": torch.ones(1, 1, 4, 8, dtype=torch.bool)}
        states = drafter.blocks(torch.ones(1, 4, 32), table, context, masks)
        drafter.recompute = False
        assert torch.equal(states, drafter.blocks(torch.ones(1, 4, 32), table, context, masks))
