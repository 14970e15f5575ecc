"""Tiny random targets, drafters and feature stores for the acceptance tests."""

from types import SimpleNamespace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.acceptance.decode import Limits
from drafttrain.acceptance.session import TargetSession
from drafttrain.data.files import file_checksum
from drafttrain.data.samples import Sample, make_sample
from drafttrain.data.store_format import HEAD_NAME, StoreMeta, plan_shards, write_meta
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.store_writer import ShardBuffer
from drafttrain.drafter.config import DrafterConfig
from drafttrain.drafter.model import Drafter
from drafttrain.extract.head import Head, capture_head
from drafttrain.extract.target import Target, build_target

TAPS = [1, 2]
VOCAB = 96


def make_target(
    vocab: int = VOCAB,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes,
) -> Target:
    """A random Llama whose greedy text wanders instead of repeating one token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    model = LlamaForCausalLM(config).to(dtype)
    return build_target(model, SimpleNamespace(eos_token_id=None))


def make_prompt(length: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """Random ids [length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator)


@torch.inference_mode()
def plain_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """float32 [n, V] of one causal forward without any cache: the reference."""
    return (
        target.model(torch.tensor([ids], device=target.device), use_cache=False).logits[0].float()
    )


def greedy_text(target: Target, prompt: torch.Tensor, tokens: int) -> list[int]:
    """The target's own greedy continuation, stop ids ignored."""
    ids = prompt.tolist()
    for _ in range(tokens):
        ids.append(int(plain_logits(target, ids)[-1].argmax()))
    return ids[len(prompt) :]


def limits(tokens: int, *stop_ids: int) -> Limits:
    return Limits(tokens, frozenset(stop_ids))


def make_drafter(target: Target, block_size: int = 6, seed: int = 0) -> tuple[Drafter, Head]:
    """A random drafter of that target with logits that depend on everything, and the head."""
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
        vocab_size=target.vocab_rows,
        block_size=block_size,
        mask_token_id=target.vocab_rows - 1,
        target_layer_ids=TAPS,
        num_target_layers=target.num_layers,
        layer_types=["full_attention", "full_attention"],
        sliding_window=None,
        tie_word_embeddings=False,
    )
    drafter = Drafter(config).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    lm_head = target.model.get_output_embeddings().weight.detach()
    head = Head(target.embedding_weight.detach(), lm_head, target.norm.weight.detach())
    return drafter.eval(), head


@torch.inference_mode()
def make_store(path, target: Target, samples: list[Sample]) -> FeatureStore:
    """Run the target over the samples and store what it returns, without rounding (fp32)."""
    lengths = [len(sample.input_ids) for sample in samples]
    shards = plan_shards(lengths, shard_tokens=200)
    path.mkdir()
    capture_head(target).save(path / HEAD_NAME)
    checksum = file_checksum(path / HEAD_NAME)
    meta = StoreMeta(
        target=target.name,
        target_revision=None,
        target_dtype="float32",
        target_fingerprint=target.fingerprint,
        tokenizer_hash="tokenizer",
        template_hash="template",
        stop_ids=target.stop_ids,
        rope_theta=target.rope_theta,
        max_positions=target.max_positions,
        taps=TAPS,
        num_target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_rows,
        final_hidden=False,
        codec="fp32",
        table_hash="table",
        shard_tokens=200,
        num_samples=len(samples),
        num_tokens=sum(lengths),
        num_shards=len(shards),
        head_checksum=checksum,
    )
    session = TargetSession(target, TAPS)
    for shard in shards:
        chosen = samples[shard.first : shard.stop]
        buffer = ShardBuffer(meta, shard, chosen)
        for position, sample in enumerate(chosen):
            ids = torch.from_numpy(np.asarray(sample.input_ids, dtype=np.int64))
            buffer.add(position, session.prefill(ids).taps, None)
        buffer.seal(path)
    write_meta(path, meta)
    return FeatureStore(path)


def stored(prompt: list[int], response: list[int], **changes) -> Sample:
    """One sample of a prompt and a supervised response."""
    mask = [False] * len(prompt) + [True] * len(response)
    names = {"source": "toy", "mode": "no_think", "greedy": True} | changes
    return make_sample(prompt + response, mask, **names)
