"""Numbers of a step: which slots were right, how far blocks got, how busy the device was.

    hits, supervised [R, A, B-1] bool -> sums that add up over micro-batches and ranks

The *expected accepted length* is 1 + the mean over anchors of the leading run of right slots, which
is the sum over k of the share of blocks whose first k slots are all right, plus the bonus token.
It is exact for each block, and no product of slot accuracies. All anchors weigh the same and the
tokens before the anchor are the target's own, so it is not tau: decoding visits few anchors.

FLOPs are those the mathematics needs (a multiply and an add are two), forward and backward, of real
tokens, used anchors and visible keys; padding and what is computed twice do not count.
"""

import resource
import sys
from typing import Any

import torch
from torch import Tensor

from .batches import Batch
from .drafter.config import DrafterConfig

# Dense bfloat16 FLOP/s from the vendors' data sheets, by what the device's name holds. "GH200" and
# "H100 PCIe" come before the names that they hold too.
_PEAK_FLOPS = {
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def slot_sums(hits: Tensor, supervised: Tensor) -> Tensor:
    """Sums [2(B-1) + 2] float32: right slots, labels (each per slot), leading runs, anchors.

    Args:
        hits: [R, A, B-1] bool, the prediction is the label; False where there is no label.
        supervised: [R, A, B-1] bool, there is a label.
    """
    run = hits.cumprod(-1).sum().float()
    anchors = supervised.any(-1).sum().float()
    right, count = (table.sum((0, 1)).float() for table in (hits, supervised))
    return torch.cat((right, count, torch.stack((run, anchors))))


def slot_numbers(sums: Tensor, slots: int) -> dict[str, Any]:
    """``slot_sums`` over everything -> what the log says of them."""
    accuracy = sums[:slots] / sums[slots : 2 * slots].clamp(min=1)
    run, anchors = sums[2 * slots :].tolist()
    return {
        "slot_accuracy": [round(a, 4) for a in accuracy.tolist()],
        "first_slot_accuracy": accuracy[0].item(),
        "expected_accepted_length": 1.0 + run / max(1.0, anchors),
    }


def batch_flops(config: DrafterConfig, batch: Batch) -> float:
    """FLOPs of training on one micro-batch; the LM head has no gradient of its own."""
    c, width = config, config.hidden_size
    used = batch.layout.anchor_doc >= 0
    context, slots = batch.num_tokens, int(used.sum()) * c.block_size
    query, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    fc = c.num_taps * width * width * context
    keys = 2 * kv * width * (context + slots)
    others = (2 * query + 3 * c.intermediate_size) * width * slots
    starts = batch.layout.anchor_pos[used]
    pairs = sum(
        visible_pairs(starts, c.block_size, None if kind == "full_attention" else c.sliding_window)
        for kind in c.layer_types
    )
    head = int(batch.supervised.sum()) * width * c.vocab_size
    layers = c.num_hidden_layers * (keys + others) + 2 * query * pairs
    # Three passes: forward, gradient of the input, gradient of the weight; taps need no gradient.
    return 2.0 * (2 * fc + 3 * layers + 2 * head)


def visible_pairs(starts: Tensor, block_size: int, window: int | None) -> int:
    """(slot, key) pairs of one layer that attend, over blocks with anchors at ``starts`` [N]."""
    if window is None:
        return int(block_size * (starts.sum() + block_size * len(starts)))
    slot = torch.arange(block_size)
    context = torch.minimum(starts[:, None], (window - 1 - slot).clamp(min=0))
    own = (slot + 1).clamp(max=window).sum() * len(starts)
    return int(context.sum() + own)


def utilisation(flops: float, seconds: float, devices: int, bf16: bool) -> float | None:
    """Model FLOP/s over the devices' peak; None on a CPU, an unknown device and in float32."""
    if not (bf16 and torch.cuda.is_available()):
        return None
    name = torch.cuda.get_device_name()
    peak = next((value for part, value in _PEAK_FLOPS.items() if part in name), None)
    return None if peak is None else flops / seconds / (devices * peak)


def peak_memory() -> float:
    """Bytes of device memory at most in use since the last call; on a CPU of the process ever."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return float(peak)
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
