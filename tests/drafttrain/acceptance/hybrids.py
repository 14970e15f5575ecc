"""Tiny random targets whose layers mix Gated DeltaNet and attention."""

from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.extract.target import Target, build_target

from .factory import VOCAB

CONV_KERNEL = 4
CHUNK = 64
"""Tokens per chunk of the reference chunk rule."""
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
"""For heads of 16; the base is not the default one, and the sections are M-RoPE's."""


def make_hybrid(
    kind: str = "qwen3_5_text", seed: int = 0, dtype: torch.dtype = torch.float32, **changes
) -> Target:
    """A random hybrid: layers 0, 1, 3 are recurrent, 2 and 4 attend; logits wander."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "layer_types": [
            "linear_attention", "linear_attention", "full_attention", "linear_attention",
            "full_attention",
        ],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "max_position_embeddings": 1024,
        "rope_parameters": ROPE,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(values | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return build_target(model.to(dtype).eval(), SimpleNamespace(eos_token_id=None))


@torch.inference_mode()
def plain_rows(target: Target, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logits [n_i, V] of one forward per text, without a cache: the reference.

    Texts of one length share a forward.
    """
    found: dict[int, torch.Tensor] = {}
    for length in {len(text) for text in texts}:
        places = [i for i, text in enumerate(texts) if len(text) == length]
        ids = torch.tensor([texts[i] for i in places], device=target.device)
        logits = target.model(input_ids=ids, use_cache=False).logits.float()
        found |= dict(zip(places, logits, strict=True))
    return [found[i] for i in range(len(texts))]
