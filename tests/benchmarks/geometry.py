"""A target of the Qwen3.6-27B geometry with random weights, and samples as long as real ones."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from drafttrain.extract.target import Target, build_target
from tests.extract.factory import make_tokenizer

VOCAB, HIDDEN, TAPS = 248320, 5120, [1, 16, 31, 46, 61]
_MEDIAN, _SPREAD, _LONGEST = 900, 0.9, 8192


def make_target(layers: int, device: str) -> Target:
    """The 27B geometry with normal(0, 0.02) weights; recurrent decays as at initialisation."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=17408, num_hidden_layers=layers,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        max_position_embeddings=262144, attn_implementation="sdpa", eos_token_id=None,
        pad_token_id=None, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    )  # fmt: skip
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
            elif "A_log" in name:
                parameter.uniform_(0.01, 16, generator=generator).log_()
    return build_target(model, make_tokenizer(), name="27b geometry")


def sample_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Lengths of a realistic mix: median 900, log-normal, tail cut at 8,192, about ``tokens``."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = int(np.exp(rng.normal(np.log(_MEDIAN), _SPREAD)))
        lengths.append(min(max(drawn, 16), _LONGEST))
    return lengths


def sample_ids(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Random token ids int32 of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
