"""Tiny random targets (float32, hidden 32, 6 layers) and sample tables for them."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.samples import make_sample, write_table
from drafttrain.extract import worker
from drafttrain.extract.config import ExtractConfig, TargetConfig
from drafttrain.extract.engine import Engine
from drafttrain.extract.target import Target, build_target, load_target

HIDDEN, LAYERS, VOCAB = 32, 6, 64
END = 1
LENGTHS = [5, 30, 12, 7, 22, 3, 18, 40, 9, 9, 11, 16]
CONFIG = ExtractConfig(taps=[0, 2, 4], codec="fp32", shard_tokens=40, batch_tokens=64)
NUM_SHARDS = 7  # of LENGTHS under CONFIG


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word per id: ``w0`` is 0, and ``w1`` ends a text."""
    vocabulary = {f"w{i}": i for i in range(VOCAB - 4)}  # the embedding has padding rows
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{END}")


def make_model(kind: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a Transformers type, with weights large enough to matter."""
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(values | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_target(kind: str = "llama", seed: int = 0, **changes: Any) -> Target:
    """A checked target in memory."""
    return build_target(make_model(kind, seed, **changes), make_tokenizer(), name=f"tiny {kind}")


def save_target(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A target's folder."""
    make_model(kind, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load_target_at(folder: Path, memory: float | None = None, dtype: str = "float32") -> Target:
    """A saved target: on the CPU, or with a share of its weights in memory and the rest on disk."""
    if memory is None:
        return load_target(TargetConfig(path=str(folder), dtype=dtype, device="cpu"))
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    size = {"cpu": f"{max(1, int(memory * stored))}B"}
    return load_target(
        TargetConfig(path=str(folder), dtype=dtype, device="spread", max_memory=size)
    )


def make_table(path: Path, lengths: list[int], **manifest: Any) -> Path:
    """A table of random samples that fits the tiny targets."""
    rng = np.random.default_rng(0)
    samples = [
        make_sample(
            rng.integers(0, VOCAB, n),
            np.arange(n) >= n // 2,
            source="random",
            mode="no_think",
            greedy=False,
        )
        for n in lengths
    ]
    made_with = {"tokenizer_hash": tokenizer_hash(make_tokenizer()), "template_hash": "none"}
    write_table(path, samples, made_with | manifest)
    return path


def without_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Silence all layers, so that every state of a token is its own embedding."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def count_forwards(monkeypatch: pytest.MonkeyPatch, module: ModuleType = worker) -> list[int]:
    """Tokens of every sample that a module's engines run through the target from now on."""
    seen: list[int] = []

    class Counting(Engine):
        def features(self, groups, batch_tokens):
            for features in super().features(groups, batch_tokens):
                seen.append(len(features.taps))
                yield features

    monkeypatch.setattr(module, "Engine", Counting)
    return seen


def extract_features(
    target: Target, taps: list[int], samples: list[np.ndarray], batch_tokens: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Number, taps and final state of all samples, with an engine of their own."""
    with Engine(target, taps, "fp32") as engine:
        for _, number, taps_of, final in engine.features([samples], batch_tokens):
            yield number, taps_of.decode(), None if final is None else final.decode()
