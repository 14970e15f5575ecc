"""Samples in one row: which targets run so, that they stay apart, and what the trial refuses."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafttrain.extract import packing, recurrent
from drafttrain.extract.engine import Engine
from drafttrain.extract.packing import packed, run_plain, run_row
from drafttrain.extract.recurrent import convolve_row
from drafttrain.extract.rows import Row

from .factory import VOCAB, extract_features, make_target
from .test_hybrid import HYBRID, ROPE

RECURRENT = {"rope_parameters": ROPE, **HYBRID}
KINDS = [
    ("llama", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 8}),
    ("qwen3_5_text", RECURRENT),
    ("qwen3_5_moe_text", RECURRENT),
    ("qwen3_next", HYBRID),
]
LENGTHS = [3, 30, 1, 64, 17]


def make_samples(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
@torch.inference_mode()
def test_a_row_gives_every_sample_what_it_gets_alone(kind, changes):
    """The plain forward of Transformers is the reference (fault kind 39)."""
    target, samples = make_target(kind, **changes), make_samples()
    alone = [run_plain(target, ids[None])[0] for ids in samples]
    row = Row.of(LENGTHS, target.device)
    with packed(target) as rows:
        assert rows
        together = run_row(target, torch.cat(samples), row)
        samples[1] = (samples[1] + 1) % VOCAB
        changed = run_row(target, torch.cat(samples), row)
    for number, (span, wanted) in enumerate(zip(row.spans, alone, strict=True)):
        torch.testing.assert_close(together[span], wanted, atol=1e-4, rtol=1e-4)
        if "moe" not in kind and kind != "qwen3_next":  # experts see batches of other sizes
            assert torch.equal(together[span], changed[span]) == (number != 1)
    # Nothing of it stays behind.
    again = run_plain(target, make_samples()[3][None])[0]
    assert torch.equal(again, alone[3])


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        # Attention over the whole row, a convolution and a rule that know no sample bounds.
        (packing, "attend_row", lambda module, q, k, v, mask, scaling=None, **others: (
            F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=True
            ).transpose(1, 2), None)),
        (recurrent, "convolve_row", lambda inputs, weight, positions, sizes: convolve_row(
            inputs, weight, torch.arange(len(inputs)), sizes)),
        (packing, "attend_row", lambda *given, **others: (_ for _ in ()).throw(
            NotImplementedError("attention with softcap"))),
    ],
)  # fmt: skip
def test_a_target_whose_samples_would_meet_is_padded_instead(monkeypatch, module, name, broken):
    """A control for the trial, and the way back (fault kind 39)."""
    target = make_target("qwen3_5_text", **RECURRENT)
    samples = [ids.numpy().astype(np.int32) for ids in make_samples()]
    wanted = {i: taps for i, taps, _ in extract_features(target, [0, 3], samples, 100)}
    monkeypatch.setattr(module, name, broken)
    with packed(target) as rows:
        assert not rows
    found = {i: taps for i, taps, _ in extract_features(target, [0, 3], samples, 100)}
    for i in wanted:
        torch.testing.assert_close(found[i], wanted[i], atol=1e-4, rtol=1e-4)


def test_layers_of_unknown_kinds_are_padded():
    """Attention sinks, and convolutions that are not known to respect sample bounds."""
    with packed(make_target("gpt_oss")) as rows:
        assert not rows
    target = make_target()
    target.layers[1].conv1d = torch.nn.Conv1d(2, 2, 1)
    with packed(target) as rows:
        assert not rows


def test_the_convolution_of_a_row_is_that_of_its_samples():
    torch.manual_seed(0)
    inputs, weight = torch.randn(12, 6), torch.randn(6, 4)
    row = Row.of([1, 4, 7], inputs.device)
    parts = convolve_row(inputs, weight, row.positions, [1, 2, 3])
    assert [part.shape[1] for part in parts] == [1, 2, 3]
    out = torch.cat(parts, dim=1)
    for span in row.spans:
        alone = F.pad(inputs[span].T[None], (3, 0))
        wanted = F.silu(F.conv1d(alone, weight[:, None], groups=6))[0].T
        torch.testing.assert_close(out[span], wanted)


def test_nothing_behind_the_last_tap_runs_if_the_final_state_is_not_wanted():
    target = make_target()
    samples = [ids.numpy().astype(np.int32) for ids in make_samples()]
    full = {i: taps for i, taps, _ in extract_features(target, [0, 2], samples, 200)}
    ran = []
    for number, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda *given, number=number: ran.append(number))
    with Engine(target, [0, 2], "fp32", final_hidden=False) as engine:
        ran.clear()
        for item in engine.features([samples], 200):
            assert item.final is None and torch.equal(item.taps.decode(), full[item.number])
    assert ran == [0, 1, 2]
