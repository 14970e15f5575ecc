"""Incremental drafting for one sequence: append committed context features, draft the next block.

Cost per draft: B rows through the drafter and B-1 rows through the LM head; keys and values of the
context are computed once per committed token and kept in a buffer that doubles when full.
"""

import torch
from torch import Tensor

from drafttrain.extract.head import Head

from .attention import KeyValue
from .masks import BlockLayout, layer_masks
from .model import Drafter

_FIRST_CAPACITY = 256


class DrafterSession:
    """The decoding side of the drafter (a proposer: ``block_size``, ``append_context``, ``draft``).

    Args:
        drafter: a trained drafter, in evaluation mode.
        head: the target's embedding and LM head, on the drafter's device.
    """

    def __init__(self, drafter: Drafter, head: Head) -> None:
        self._drafter, self._head = drafter, head
        self._buffers: list[KeyValue] = []
        self._length = 0

    @property
    def block_size(self) -> int:
        """B, the anchor included."""
        return self._drafter.config.block_size

    def reset(self) -> None:
        """Forget the sequence; buffers are kept for the next one."""
        self._length = 0

    @torch.inference_mode()
    def append_context(self, taps: Tensor) -> None:
        """Append context features [t, n_taps, d] of the next t committed tokens."""
        device = self._drafter.fc.weight.device
        end = self._length + taps.shape[0]
        positions = torch.arange(self._length, end, device=device)[None]
        new = self._drafter.context_kv(taps[None].to(device), positions)
        self._reserve(new, end)
        for buffers, parts in zip(self._buffers, new, strict=True):
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[:, :, self._length : end] = part
        self._length = end

    @torch.inference_mode()
    def draft(self, anchor_id: int) -> Tensor:
        """Logits float32 [B-1, V] of slots 1..B-1; the anchor stands right after the context."""
        config, device = self._drafter.config, self._drafter.fc.weight.device
        ids = torch.full((1, config.block_size), config.mask_token_id, device=device)
        ids[0, 0] = anchor_id
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        layout = BlockLayout(
            context_doc=zero.expand(1, self._length),
            context_pos=torch.arange(self._length, device=device)[None],
            anchor_doc=zero,
            anchor_pos=zero + self._length,
            block_size=config.block_size,
        )
        masks = layer_masks(layout, config.layer_types, config.sliding_window)
        context = [(k[:, :, : self._length], v[:, :, : self._length]) for k, v in self._buffers]
        hidden = self._drafter.blocks(self._head.embed(ids), layout.block_pos, context, masks)
        return self._head.logits(hidden[0, 1:])

    def _reserve(self, like: list[KeyValue], length: int) -> None:
        """Make room for ``length`` tokens in every buffer."""
        capacity = self._buffers[0][0].shape[2] if self._buffers else 0
        if length <= capacity:
            return
        capacity = max(_FIRST_CAPACITY, length, 2 * capacity)
        grown = []
        for layer, pair in enumerate(like):
            parts = []
            for which, part in enumerate(pair):
                rows, heads, _, dim = part.shape
                buffer = part.new_empty(rows, heads, capacity, dim)
                if self._buffers:
                    old = self._buffers[layer][which]
                    buffer[:, :, : self._length] = old[:, :, : self._length]
                parts.append(buffer)
            grown.append((parts[0], parts[1]))
        self._buffers = grown
