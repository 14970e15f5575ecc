"""The head is the target's own, and reproduces its logits, or the target is refused."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drafttrain.data.errors import StoreError, TargetError
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract.config import ExtractConfig
from drafttrain.extract.head import capture_head, load_head
from drafttrain.extract.worker import extract

from .factory import HIDDEN, VOCAB, make_table, make_target


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_lm_head_is_the_targets_tied_or_not(kind, tied):
    """(fault kind 45a)"""
    target = make_target(kind, tie_word_embeddings=tied)
    head = capture_head(target)
    assert torch.equal(head.lm_head, target.model.lm_head.weight)
    assert torch.equal(head.embedding, target.model.model.embed_tokens.weight)
    assert torch.equal(head.lm_head, head.embedding) is tied
    assert torch.equal(head.norm, target.model.model.norm.weight)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        output = target.model(ids, output_hidden_states=True)
    assert torch.allclose(head.logits(output.hidden_states[-1]), output.logits, atol=1e-5)
    assert torch.equal(head.embed(ids), output.hidden_states[0])


@pytest.mark.parametrize("tied", [True, False])
def test_head_survives_the_store(tmp_path, tied):
    """(fault kind 45a)"""
    target = make_target(tie_word_embeddings=tied)
    table = make_table(tmp_path / "t.parquet", [5, 9])
    head = load_head(extract(target, ExtractConfig(taps=2, codec="fp32"), table, tmp_path / "s"))
    captured = capture_head(target)
    for name in ("embedding", "lm_head", "norm"):
        assert torch.equal(getattr(head, name), getattr(captured, name))
    stored = load_file(tmp_path / "s" / "head.safetensors")
    assert ("lm_head" in stored) is not tied  # a tied head is stored once
    moved = head.to("cpu", torch.bfloat16)
    assert moved.lm_head.dtype == moved.norm.dtype == torch.bfloat16
    assert (moved.lm_head is moved.embedding) is tied
    assert moved.logits(torch.ones(3, HIDDEN)).dtype == torch.float32
    assert moved.embed(torch.tensor([[1, 2]])).shape == (1, 2, HIDDEN)


def test_logits_from_the_store_are_the_targets_under_the_post_norm_convention_only(tmp_path):
    """(fault kind 27)"""
    target = make_target("qwen3")
    table = make_table(tmp_path / "t.parquet", [12, 30, 7])
    store = extract(target, ExtractConfig(taps=2, codec="fp32"), table, tmp_path / "s")
    head = load_head(store)
    for i in range(len(store)):
        sample = store.sample(i)
        with torch.no_grad():
            real = target.model(sample.input_ids[None]).logits[0]
            normed_again = head.logits(target.norm(sample.final))
        assert torch.allclose(head.logits(sample.final), real, atol=1e-4)
        assert torch.equal(head.logits(sample.final).argmax(-1), real.argmax(-1))
        assert not torch.allclose(normed_again, real, atol=1e-2)


class _PreNorm(nn.Module):
    """A decoder that hands out the last layer's output without the final norm."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.inner = decoder

    def forward(self, **inputs):
        states = []
        handle = self.inner.layers[-1].register_forward_hook(lambda m, a, out: states.append(out))
        output = self.inner(**inputs)
        handle.remove()
        output.last_hidden_state = states[0]
        return output


def test_a_final_hidden_state_before_the_norm_is_refused():
    """(fault kind 27)"""
    target = make_target()
    raw = dataclasses.replace(target, decoder=_PreNorm(target.decoder))
    with pytest.raises(TargetError, match="before the final norm"):
        capture_head(raw)


def test_embedding_scaling_is_part_of_the_embedding():
    target = make_target("gemma3_text", final_logit_softcapping=None)
    head = capture_head(target)
    raw = target.model.model.embed_tokens.weight
    assert torch.allclose(head.embedding, raw * HIDDEN**0.5, rtol=1e-2)
    assert torch.equal(head.lm_head, target.model.lm_head.weight)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping.*capped"),
        ("gemma2", {"final_logit_softcapping": 1000.0}, "final_logit_softcapping.*capped"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling.*scaled by 0.125"),
        ("cohere", {"logit_scale": 0.0625}, "logit_scale.*scaled by 0.0625"),
        ("phi", {}, "LM head has a bias"),
    ],
)
def test_transformed_logits_are_refused_and_the_setting_named(kind, changes, words):
    """(fault kind 27)"""
    target = make_target(kind, **changes)
    with pytest.raises(TargetError, match=words):
        capture_head(target)


def test_bfloat16_targets_pass_the_probe():
    target = make_target()
    target.model.bfloat16()
    assert capture_head(target).lm_head.dtype == torch.bfloat16


def test_a_changed_head_is_refused(tmp_path):
    table = make_table(tmp_path / "t.parquet", [5])
    store = extract(make_target(), ExtractConfig(taps=1), table, tmp_path / "s")
    path = tmp_path / "s" / "head.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"head\.safetensors: its bytes have changed"):
        load_head(FeatureStore(store.path))
    assert store.meta.vocab_size == VOCAB
