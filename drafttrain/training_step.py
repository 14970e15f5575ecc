"""One optimizer step: micro-batches -> loss, gradients over all ranks, new weights.

    loss = sum over ranks and micro-batches of w * cross-entropy / sum of all w

The LM head and the embedding are the target's, frozen, outside the engine. Every rank takes every
step together.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drafttrain.extract.head import Head

from .batches import Batch
from .drafter.config import DrafterConfig
from .drafter.masks import layer_masks
from .drafter.parallel import block_embeddings
from .engine import loss_scale_for, take_step
from .losses.head_loss import head_cross_entropy
from .losses.weights import decay_weights


class TrainingStep:
    """Takes steps with one engine.

    Args:
        engine: the drafter in DeepSpeed.
        head: the target's embedding and LM head, on this rank's device in the computing dtype.
        config: of the drafter.
        gamma: decay of the slots' weights.
    """

    def __init__(self, engine: Any, head: Head, config: DrafterConfig, gamma: float) -> None:
        self._engine, self._head, self._config, self._gamma = engine, head, config, gamma
        self._device = head.lm_head.device

    def take(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Train on this rank's micro-batches of one step.

        Returns:
            Of the whole step, over all ranks: ``loss``, ``grad_norm`` before clipping, ``tokens``
            of context, ``slot_accuracy`` of slots 1..B-1 and ``first_slot_accuracy``.
        """
        weights = [decay_weights(batch.supervised, self._gamma) for batch in batches]
        total = torch.stack([w.sum() for w in weights]).sum().to(self._device)
        dist.all_reduce(total)
        slots = self._config.num_draft_tokens
        sums = torch.zeros(2 + 2 * slots, device=self._device)
        scale = loss_scale_for(self._engine, dist.get_world_size())
        grad_norm = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            loss, right, count = self._forward(batch, weight.to(self._device))
            normalised = loss / total
            self._engine.backward(normalised * scale)
            grad_norm = take_step(self._engine)
            tokens = torch.tensor([float(batch.num_tokens)], device=self._device)
            sums += torch.cat((normalised.detach()[None], tokens, right, count))
        dist.all_reduce(sums)
        accuracy = sums[2 : 2 + slots] / sums[2 + slots :].clamp(min=1)
        return {
            "loss": sums[0].item(),
            "grad_norm": grad_norm,
            "tokens": sums[1].item(),
            "slot_accuracy": [round(a, 4) for a in accuracy.tolist()],
            "first_slot_accuracy": accuracy[0].item(),
        }

    def _forward(self, batch: Batch, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss sum, and right predictions and labels per slot [B-1]."""
        config, device = self._config, self._device
        layout = batch.layout.to(device)
        anchor_ids = batch.anchor_ids.to(device)
        embeds = block_embeddings(self._head, anchor_ids, config.block_size, config.mask_token_id)
        hidden = self._engine(
            batch.taps.decode(device, self._head.lm_head.dtype),
            layout.context_pos,
            embeds,
            layout.block_pos,
            layer_masks(
                layout,
                config.layer_types,
                config.sliding_window,
                flex=device.type == "cuda",
            ),
        )
        slots = hidden.unflatten(1, (-1, config.block_size))[:, :, 1:]
        row, anchor, slot = batch.supervised.to(device).nonzero(as_tuple=True)
        labels = batch.labels.to(device)[row, anchor, slot]
        loss, predicted = head_cross_entropy(
            slots[row, anchor, slot], self._head.lm_head, labels, weight[row, anchor, slot]
        )
        empty = torch.zeros(config.num_draft_tokens, device=device)
        right = empty.index_add(0, slot, (predicted == labels).float())
        return loss, right, empty.index_add(0, slot, torch.ones_like(slot, dtype=torch.float32))
