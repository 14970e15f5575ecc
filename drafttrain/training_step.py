"""One optimizer step: micro-batches -> loss, gradients over all ranks, new weights.

    loss = sum over ranks and micro-batches of w * cross-entropy / sum of all w

The LM head and the embedding are the target's, frozen, outside the engine. Every rank takes every
step together, also a rank whose samples have no supervised slot: it adds zeros. A whole step
without any is what AdamW makes of zero gradients (moments decay, weights follow them). A step with
a loss or gradient that is not finite is skipped on all ranks together (``skipped_steps``): nothing
changes but the schedule, which follows the step's number.
"""

import math
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
from .ema import WeightAverage
from .engine import loss_scale_for, take_step
from .losses.head_loss import head_cross_entropy
from .losses.weights import decay_weights
from .skipped_steps import SkippedSteps
from .step_metrics import batch_flops, peak_memory, slot_numbers, slot_sums
from .train_config import TrainConfig


class TrainingStep:
    """Takes steps with one engine.

    Args:
        engine: the drafter in DeepSpeed.
        head: the target's embedding and LM head, on this rank's device in the computing dtype.
        config: of the drafter.
        gamma: decay of the slots' weights.
        train: of the recipe; gradient clipping, and how many skipped steps end the run.
        average: of the weights, if the run keeps one.
    """

    def __init__(
        self,
        engine: Any,
        head: Head,
        config: DrafterConfig,
        gamma: float,
        train: TrainConfig,
        average: WeightAverage | None,
    ) -> None:
        self._engine, self._head, self._config, self._gamma = engine, head, config, gamma
        self._clip, self._average = train.clip, average
        self._skipped = SkippedSteps(train.stop_after_skipped)
        self._device = head.lm_head.device

    def take(self, step: int, batches: Sequence[Batch]) -> dict[str, Any]:
        """Train on this rank's micro-batches of one step.

        Args:
            step: its number, from 1.
            batches: as many on every rank.

        Returns:
            Of the whole step, over all ranks: ``loss``, ``grad_norm`` before clipping (both not
            finite if it was skipped), ``tokens`` of context, ``flops``, ``skipped_steps`` of the
            run so far, ``peak_memory_bytes`` of the fullest rank, and ``slot_numbers``.

        Raises:
            TrainingError: too many steps in a row were skipped.
        """
        weights = [decay_weights(batch.supervised, self._gamma) for batch in batches]
        total = torch.stack([w.sum() for w in weights]).sum().to(self._device)
        dist.all_reduce(total)
        # All losses are 0 where there is no weight at all.
        total = total.clamp(min=torch.finfo(total.dtype).tiny)
        slots = self._config.num_draft_tokens
        sums = torch.zeros(3 + 2 * slots + 2, dtype=torch.float64, device=self._device)
        scale = loss_scale_for(self._engine, dist.get_world_size())
        grad_norm, losses_finite = 0.0, []
        for batch, weight in zip(batches, weights, strict=True):
            loss, hits = self._forward(batch, weight.to(self._device))
            normalised = loss / total
            finite = normalised.detach().isfinite()
            # The gradients' norm decides for all ranks: it must see a loss that is not finite.
            self._engine.backward(normalised * torch.where(finite, scale, math.nan))
            grad_norm = take_step(self._engine, self._clip)
            losses_finite.append(finite)
            host = torch.tensor(
                [batch.num_tokens, batch_flops(self._config, batch)], dtype=torch.float64
            )
            found = slot_sums(hits, batch.supervised.to(self._device))
            sums += torch.cat((normalised.detach()[None], host.to(self._device), found))
        self._after(step, grad_norm, batches, losses_finite)
        dist.all_reduce(sums)
        memory = torch.tensor([peak_memory()], dtype=torch.float64, device=self._device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        loss, tokens, flops = sums[:3].tolist()
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "flops": flops,
            "skipped_steps": self._engine.skipped_steps,
            "peak_memory_bytes": memory.item(),
            **slot_numbers(sums[3:], slots),
        }

    def _after(self, step: int, grad_norm: float, batches: Sequence[Batch], finite: list) -> None:
        """Tell what became of the step; the weights have changed or were left."""
        if math.isfinite(grad_norm):
            self._skipped.taken()
            if self._average is not None:
                self._average.update(step)
        else:
            names = [batch.sample_ids for batch in batches]
            self._skipped.skipped(step, list(zip(names, map(bool, finite), strict=True)))

    def _forward(self, batch: Batch, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted loss sum, and which slots [R, A, B-1] have a label and were right."""
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
        hits = torch.zeros(batch.supervised.shape, dtype=torch.bool, device=device)
        hits[row, anchor, slot] = predicted == labels
        return loss, hits
