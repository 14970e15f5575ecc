"""Which keys each drafted slot may see: one predicate for every attention backend.

A row holds S context tokens (of one or several documents) and A anchors with a block of B slots
each. Queries are the A*B slots; keys are the S context tokens followed by the A*B slots.

    context key j    visible iff same document and position(j) < position(anchor)
    block key        visible iff it belongs to the same anchor
    sliding layers   additionally causal inside the block, and position(q) - position(k) < window
                     counted over context and block alike

These are the semantics of the published drafters in vLLM and SGLang: full layers bidirectional,
sliding layers causal within the block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NO_DOCUMENT = -1


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where context tokens and anchors of a batch of rows stand.

    Attributes:
        context_doc: [R, S] int64, document number of each context token, ``NO_DOCUMENT`` = padding.
        context_pos: [R, S] int64, position inside its document.
        anchor_doc: [R, A] int64, document of each anchor, ``NO_DOCUMENT`` = unused anchor.
        anchor_pos: [R, A] int64, the anchor's position inside its document.
        block_size: B.
    """

    context_doc: Tensor
    context_pos: Tensor
    anchor_doc: Tensor
    anchor_pos: Tensor
    block_size: int

    def to(self, device: torch.device) -> "BlockLayout":
        """The same layout on ``device``."""
        return BlockLayout(
            context_doc=self.context_doc.to(device),
            context_pos=self.context_pos.to(device),
            anchor_doc=self.anchor_doc.to(device),
            anchor_pos=self.anchor_pos.to(device),
            block_size=self.block_size,
        )

    @property
    def block_pos(self) -> Tensor:
        """[R, A*B] int64: position of every slot (slot k stands at anchor + k)."""
        slots = torch.arange(self.block_size, device=self.anchor_pos.device)
        return (self.anchor_pos[..., None] + slots).flatten(1)


def visibility(layout: BlockLayout, window: int | None) -> MaskMod:
    """The predicate ``(row, head, query, key) -> bool`` of one layer kind.

    Args:
        layout: the rows' layout.
        window: None for a full-attention layer, else the sliding window in tokens.
    """
    num_context, block = layout.context_doc.shape[1], layout.block_size
    # Plain tensors, so that flex_attention's compiler sees what the predicate captures.
    context_doc, context_pos = layout.context_doc, layout.context_pos
    anchor_doc, anchor_pos = layout.anchor_doc, layout.anchor_pos

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor, slot = query // block, query % block
        in_context = key < num_context
        j = key.clamp(max=num_context - 1)
        k = (key - num_context).clamp(min=0)
        start = anchor_pos[row, anchor]
        key_pos = context_pos[row, j]
        same_document = context_doc[row, j] == anchor_doc[row, anchor]
        from_context = same_document & (key_pos < start)
        from_block = k // block == anchor
        if window is not None:
            from_context = from_context & (start + slot - key_pos < window)
            behind = slot - k % block
            from_block = from_block & (behind >= 0) & (behind < window)
        return (in_context & from_context) | (~in_context & from_block)

    return visible


def dense_mask(layout: BlockLayout, window: int | None) -> Tensor:
    """[R, 1, A*B, S + A*B] bool, True = visible (for SDPA)."""
    rows, num_context = layout.context_doc.shape
    queries = layout.anchor_doc.shape[1] * layout.block_size
    device = layout.context_doc.device
    row = torch.arange(rows, device=device)[:, None, None, None]
    query = torch.arange(queries, device=device)[None, None, :, None]
    key = torch.arange(num_context + queries, device=device)[None, None, None, :]
    return visibility(layout, window)(row, row, query, key)


def flex_mask(layout: BlockLayout, window: int | None) -> Any:
    """The same mask as a flex_attention ``BlockMask`` (CUDA; construction is compiled)."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, num_context = layout.context_doc.shape
    queries = layout.anchor_doc.shape[1] * layout.block_size
    return create_block_mask(
        visibility(layout, window),
        rows,
        None,
        queries,
        num_context + queries,
        device=str(layout.context_doc.device),
        _compile=True,
    )


def layer_masks(
    layout: BlockLayout, layer_types: list, sliding_window: int | None, *, flex: bool = False
) -> dict:
    """One mask per layer kind present: dense, or a flex ``BlockMask`` (training on CUDA)."""
    make = flex_mask if flex else dense_mask
    windows = {"full_attention": None, "sliding_attention": sliding_window}
    return {kind: make(layout, windows[kind]) for kind in dict.fromkeys(layer_types)}
