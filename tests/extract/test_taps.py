"""Layer ids: which they are, which are refused, and that a tap is the output of its own layer."""

import pytest
import torch
from torch import nn

from drafttrain.data.errors import TargetError
from drafttrain.extract.taps import TapRecorder, resolve_taps

from .factory import LAYERS, VOCAB, make_model


@pytest.mark.parametrize(
    ("count", "layers", "taps"),
    [
        (5, 64, [1, 16, 31, 46, 61]),
        (5, 36, [1, 9, 17, 25, 33]),
        (5, 40, [1, 10, 19, 28, 37]),
        (1, 64, [32]),
        (2, 30, [1, 27]),
        (3, 6, [1, 2, 3]),
        (1, 4, [2]),
    ],
)
def test_even_spacing(count, layers, taps):
    assert resolve_taps(count, layers) == taps


@pytest.mark.parametrize("layers", range(3, 70))
@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_spacing_gives_distinct_ids_or_says_why_not(count, layers):
    """(fault kind 42)"""
    try:
        taps = resolve_taps(count, layers)
    except TargetError as error:
        assert count > layers - 3
        assert f"{layers} layers of this target" in str(error)
    else:
        assert len(taps) == count
        assert taps == sorted(set(taps))
        assert min(taps) >= 0
        assert max(taps) <= layers - 2


def test_listed_ids_are_kept():
    assert resolve_taps([0, 2, 4], 6) == [0, 2, 4]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([5], "layer 5 is the last of 6.*before or after the final norm"),
        ([6], "layer 6 does not exist.*0 to 5"),
        ([-1], "layer -1 does not exist"),
        ([3, 1], r"ascending.*\[1, 3\]"),
        ([1, 1], "without repeats"),
        ([], "no layer ids"),
        (0, "at least 1"),
        (5, "cannot be spaced on the 6 layers"),
    ],
)
def test_unusable_taps_are_refused(spec, words):
    """(fault kinds 42, 94)"""
    with pytest.raises(TargetError, match=words):
        resolve_taps(spec, 6)


class _Adder(nn.Module):
    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, hidden):
        return (hidden + self.amount, None)  # as layers of older models do


def test_a_tap_is_the_output_of_its_own_layer_by_value():
    """(fault kind 25)"""
    layers = nn.ModuleList(_Adder(10.0**i) for i in range(6))
    with TapRecorder(layers, [0, 3, 4]) as recorder:
        hidden = torch.zeros(1, 2, 8)
        for layer in layers:
            hidden, _ = layer(hidden)
        taps = recorder.collect()
    assert taps.shape == (1, 2, 3, 8)
    assert taps[0, 0, :, 0].tolist() == [1, 1111, 11111]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5_text"])
def test_tap_l_is_hidden_states_l_plus_1(kind):
    """(fault kind 25)"""
    model = make_model(kind)
    ids = torch.arange(20)[None] % VOCAB
    taps = list(range(LAYERS - 1))
    with torch.no_grad(), TapRecorder(model.get_decoder().layers, taps) as recorder:
        hidden = model(ids, output_hidden_states=True).hidden_states
        found = recorder.collect()
    for layer in taps:
        assert torch.equal(found[:, :, layer], hidden[layer + 1])
        for shift in (-1, 1):
            if layer + shift < LAYERS - 1:
                assert not torch.allclose(found[:, :, layer], hidden[layer + 1 + shift])


def test_hooks_are_gone_afterwards():
    model = make_model()
    with TapRecorder(model.model.layers, [1]):
        pass
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_a_second_forward_without_collect_is_noticed():
    model = make_model()
    with torch.no_grad(), TapRecorder(model.model.layers, [1]) as recorder:
        model(torch.zeros(1, 3, dtype=torch.int64))
        with pytest.raises(AssertionError, match="twice"):
            model(torch.zeros(1, 3, dtype=torch.int64))
        recorder.collect()
        with pytest.raises(AssertionError, match="did not run"):
            recorder.collect()
