"""Small drafters, heads and samples for tests: float32, seeded, with weights far from zero."""

import torch

from drafttrain.data.codec import CODECS, Encoded
from drafttrain.data.store_reader import StoredSample
from drafttrain.drafter.config import DrafterConfig
from drafttrain.drafter.model import Drafter
from drafttrain.extract.head import Head

HIDDEN, VOCAB = 32, 50


def drafter_config(block_size: int = 4, kinds: str = "ff", window: int | None = None, **changes):
    """A two-tap config; ``kinds`` spells the layers, f = full, s = sliding."""
    values = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "block_size": block_size,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [1, 3],
        "num_target_layers": 6,
        "layer_types": [{"f": "full_attention", "s": "sliding_attention"}[k] for k in kinds],
        "sliding_window": window,
        "tie_word_embeddings": False,
    }
    return DrafterConfig(**(values | changes))


def make_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """Weights large enough that every input matters to the logits."""
    drafter = Drafter(config).init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return drafter.eval()


def make_head(seed: int = 2) -> Head:
    """A random target head."""
    generator = torch.Generator().manual_seed(seed)
    return Head(
        embedding=torch.randn(VOCAB, HIDDEN, generator=generator),
        lm_head=torch.randn(VOCAB, HIDDEN, generator=generator),
        norm=torch.ones(HIDDEN),
    )


def make_sample(
    length: int, seed: int = 3, supervised_from: int = 2, codec: str = "fp32"
) -> StoredSample:
    """A random sample, supervised from one position to its end."""
    taps_codec = CODECS[codec]["taps"]
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[supervised_from:] = True
    return StoredSample(
        sample_id=f"sample-{seed}",
        source="random",
        mode="no_think",
        greedy=True,
        input_ids=torch.randint(0, VOCAB - 1, (length,), generator=generator),
        loss_mask=mask,
        encoded_taps=Encoded(
            taps_codec, taps_codec.encode(torch.randn(length, 2, HIDDEN, generator=generator))
        ),
        final=None,
    )
