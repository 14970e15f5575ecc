"""Targets that cannot be verified along a tree are refused by name, before any work."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from drafttrain.acceptance import gated_delta
from drafttrain.acceptance.session import TargetSession
from drafttrain.data.errors import TargetError
from tests.extract.factory import load_target_at, make_tokenizer

from .factory import TAPS, make_target
from .hybrids import make_hybrid


def wrap(model):
    """The parts of a target that are looked at before it is refused."""
    return SimpleNamespace(model=model.eval(), layers=model.get_decoder().layers)


def refused(target, match):
    with pytest.raises(TargetError, match=match):
        TargetSession(target, TAPS)


def test_sliding_window_layers_are_refused_by_name():
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, use_sliding_window=True, sliding_window=8,
        max_window_layers=2,
    )  # fmt: skip
    refused(wrap(Qwen2ForCausalLM(config)), r"layer 2 .*Qwen2Attention.* DynamicSlidingWindowLayer")


@pytest.mark.parametrize(
    ("kind", "mixer", "values"),
    [
        ("lfm2", "Lfm2ShortConv", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 16}),
        ("mamba2", "Mamba2Mixer", {"head_dim": 8, "num_heads": 4, "n_groups": 1}),
    ],
)
def test_recurrent_layers_of_other_kinds_are_refused_by_name(kind, mixer, values):
    """Dropping draft tokens does not rewind a recurrent state (fault kind 69)."""
    config = AutoConfig.for_model(
        kind, vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, **values,
    )  # fmt: skip
    refused(wrap(AutoModelForCausalLM.from_config(config)), f"layer 0 .*{mixer}.*use replay")


def test_an_unknown_recurrent_class_is_refused_though_it_looks_alike(monkeypatch):
    """A class of another name may compute something else (fault kind 69)."""
    target = make_hybrid()
    TargetSession(target, TAPS)
    monkeypatch.delitem(gated_delta.PROJECTIONS, "Qwen3_5GatedDeltaNet")
    refused(target, r"layer 0 .*Qwen3_5GatedDeltaNet.* cannot roll back")


def test_variants_of_a_known_class_are_refused():
    target = make_hybrid()
    target.layers[3].linear_attn.activation = "gelu"
    refused(target, "layer 3 .*activation 'gelu'")


@pytest.mark.parametrize("make", [make_target, make_hybrid])
def test_kernels_without_a_tree_mask_are_refused(make, monkeypatch):
    target = make()
    monkeypatch.setattr(target.model.config, "_attn_implementation_internal", "flash_attention_2")
    refused(target, "flash_attention_2")


def test_models_without_positions_are_refused(monkeypatch):
    target = make_target()
    monkeypatch.setattr(target.model, "forward", lambda input_ids, cache=None: None)
    refused(target, "takes no position_ids")


class TestTheTrial:
    """What only running shows: each case would decode wrongly without a word."""

    def test_states_that_are_not_rewound(self, monkeypatch):
        """The recurrent state keeps what was rejected (fault kinds 69, 70)."""
        monkeypatch.setattr(gated_delta, "commit_state", lambda *_: None)
        refused(make_hybrid(), "cannot be decoded along a draft tree exactly")

    def test_convolution_inputs_that_are_not_rewound(self, monkeypatch):
        real = gated_delta.GatedDeltaLayers.commit

        def forgetful(layers, path):
            before = layers._convs.clone()
            real(layers, path)
            layers._convs.copy_(before)

        monkeypatch.setattr(gated_delta.GatedDeltaLayers, "commit", forgetful)
        refused(make_hybrid(), "cannot be decoded along a draft tree exactly")

    def test_nodes_that_follow_their_neighbour_instead_of_their_parent(self, monkeypatch):
        """Slot order taken for path order (fault kind 72)."""
        real = gated_delta.conv_rows
        monkeypatch.setattr(
            gated_delta, "conv_rows", lambda parents, kernel: real(range_like(parents), kernel)
        )
        refused(make_hybrid(), "cannot be decoded along a draft tree exactly")

    def test_a_kernel_that_ignores_the_mask(self, monkeypatch):
        """(fault kind 72)"""
        target = make_target()
        real = torch.nn.functional.scaled_dot_product_attention

        def unmasked(query, key, value, attn_mask=None, **rest):
            seen = None if attn_mask is None else torch.ones_like(attn_mask, dtype=torch.bool)
            return real(query, key, value, attn_mask=seen, **rest)

        TargetSession(target, TAPS)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", unmasked)
        refused(target, "cannot be decoded along a draft tree exactly")

    def test_positions_that_are_counted_instead_of_given(self, monkeypatch):
        target = make_target()
        real = target.model.forward

        def counted(input_ids, attention_mask=None, position_ids=None, cache=None, **rest):
            if position_ids is not None:
                position_ids = position_ids[:, :1] + torch.arange(position_ids.shape[1])
            return real(
                input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
                **rest,
            )  # fmt: skip

        monkeypatch.setattr(target.model, "forward", counted)
        refused(target, "cannot be decoded along a draft tree exactly")


def range_like(parents):
    """Parents of a chain of as many nodes."""
    return np.arange(len(parents)) - 1


def test_a_hybrid_spread_over_devices_is_refused(tmp_path):
    make_hybrid().model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    TargetSession(load_target_at(tmp_path), TAPS)
    refused(load_target_at(tmp_path, 0.7), r"spread over devices.*eval\.live_prompts to 0")
