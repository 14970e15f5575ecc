"""The target in this process as a generation engine: left-padded batches through ``generate``.

Prompts [p] in, response ids [r] out, r <= max_new_tokens. Guarantee: the distribution is the
target's own (plain argmax, or softmax at one temperature): penalties and filters of the model's
generation config are switched off. Batches hold prompts of similar length, the longest first, so
that memory runs out at the start or not at all. Cost: padding to the longest prompt of a batch.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .config import RegenerateConfig
from .generation import Generation, Prompt, discard


def generate_locally(
    model: Any, prompts: Iterable[Prompt], config: RegenerateConfig, stop_ids: list[int]
) -> Iterator[Generation]:
    """Answer prompts with a loaded Transformers causal LM, in batches, longest prompts first.

    Args:
        model: on its device, in its dtype.
        prompts: all are held in memory.
        config: batch size, length limit, temperature (0 is greedy).
        stop_ids: ids that end a response; the first one is also used for padding.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    fitting: list[Prompt] = []
    for prompt in prompts:
        if limit is not None and len(prompt.prompt_ids) + config.max_new_tokens > limit:
            yield discard(prompt, f"prompt_too_long: {len(prompt.prompt_ids)} tokens")
        else:
            fitting.append(prompt)
    fitting.sort(key=lambda prompt: len(prompt.prompt_ids), reverse=True)
    model.eval()
    for start in range(0, len(fitting), config.batch_size):
        batch = fitting[start : start + config.batch_size]
        for prompt, row in zip(batch, _generate(model, batch, config, stop_ids), strict=True):
            yield Generation(prompt, prompt.prompt_ids, row.tolist())


@torch.inference_mode()
def _generate(
    model: Any, batch: list[Prompt], config: RegenerateConfig, stop_ids: list[int]
) -> Tensor:
    """New ids [b, new], padded after each row's stop id."""
    width = max(len(prompt.prompt_ids) for prompt in batch)
    pad = stop_ids[0]
    ids = torch.full((len(batch), width), pad, dtype=torch.long)
    mask = torch.zeros((len(batch), width), dtype=torch.long)
    for row, prompt in enumerate(batch):
        ids[row, width - len(prompt.prompt_ids) :] = torch.tensor(prompt.prompt_ids)
        mask[row, width - len(prompt.prompt_ids) :] = 1
    # Of a spread model whose embedding waits elsewhere; its hooks move what goes in.
    device = "cpu" if model.device.type == "meta" else model.device
    sampling: dict[str, Any] = {"do_sample": False}
    if config.temperature > 0:
        sampling = {"do_sample": True, "temperature": config.temperature, "top_k": 0}
    # What a call leaves open is filled from the model's own generation config.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        out = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=config.max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=pad,
            **sampling,
        )
    finally:
        model.generation_config = own
    return out[:, width:]
