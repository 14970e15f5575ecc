"""Targets spread over devices give the store of the target on one, to the last bit.

On a machine without GPUs the devices are memory and disk, which Transformers and accelerate treat
as they treat a GPU and memory.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drafttrain.data.errors import TargetError
from drafttrain.extract.config import TargetConfig
from drafttrain.extract.head import capture_head
from drafttrain.extract.packing import _as_written, packed
from drafttrain.extract.rows import Row
from drafttrain.extract.spread import is_spread, replaced_forward
from drafttrain.extract.taps import TapRecorder
from drafttrain.extract.target import Target, build_target, load_target
from drafttrain.extract.worker import extract

from .factory import CONFIG, LENGTHS, contents, load_target_at, make_table, save_target
from .test_hybrid import HYBRID, ROPE
from .test_target import drop_weight

KINDS = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": None},  # cannot be run in rows
    "qwen3_5_text": {"rope_parameters": ROPE, **HYBRID},
}
SHARES = [0.7, 1e-4]
"""Of the weights in memory: half of the layers are on disk, or everything is."""


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    """A target's folder."""
    return save_target(
        tmp_path_factory.mktemp(request.param), request.param, **KINDS[request.param]
    )


def waiting(target: Target) -> set[str]:
    """Weights that have no values between calls."""
    return {name for name, p in target.model.named_parameters() if p.device.type == "meta"}


@pytest.mark.parametrize("final_hidden", [True, False])
@pytest.mark.parametrize("memory", SHARES)
def test_the_store_is_that_of_the_target_on_one_device(folder, tmp_path, memory, final_hidden):
    """Every file, head and fingerprint included, in rows where the whole target runs in rows."""
    whole, parts = load_target_at(folder), load_target_at(folder, memory)
    before = waiting(parts)
    assert not is_spread(whole.model) and is_spread(parts.model) and before
    with packed(whole) as rows, packed(parts) as rows_of_parts:
        assert rows == rows_of_parts == ("gemma2" not in folder.name)
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    config = CONFIG.model_copy(update={"final_hidden": final_hidden})
    for target, name in ((whole, "whole"), (parts, "parts")):
        extract(target, config, table, tmp_path / name)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert waiting(parts) >= before, "weights stayed behind on the device"


def test_other_weights_on_disk_give_another_store(tmp_path):
    """A control: what is on disk takes part."""
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    for seed in (0, 1):
        folder = save_target(tmp_path / str(seed), "qwen3", seed=seed)
        extract(load_target_at(folder, 1e-4), CONFIG, table, tmp_path / f"store{seed}")
    for name in ("shard-00000.safetensors", "head.safetensors"):
        first, second = (tmp_path / f"store{seed}" / name for seed in (0, 1))
        assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize("memory", SHARES)
def test_head_and_fingerprint_are_those_of_the_whole_target(folder, memory):
    """Also after forwards, which part weights that are tied."""
    whole, parts = load_target_at(folder), load_target_at(folder, memory)
    for _ in range(2):
        ours, theirs = capture_head(parts), capture_head(whole)
        for name in ("embedding", "lm_head", "norm"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert (ours.lm_head is ours.embedding) == (theirs.lm_head is theirs.embedding)
        assert parts.fingerprint == whole.fingerprint
        parts = build_target(parts.model, parts.tokenizer)


def test_weights_on_disk_are_read_in_the_dtype_of_the_recipe(tmp_path):
    folder = save_target(tmp_path / "target", "qwen3")
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    config = CONFIG.model_copy(update={"codec": "bf16"})
    for memory in (None, *SHARES):
        target = load_target_at(folder, memory, "bfloat16")
        extract(target, config, table, tmp_path / f"store {memory}")
    wanted = contents(tmp_path / "store None")
    assert all(contents(tmp_path / f"store {memory}") == wanted for memory in SHARES)


def test_a_target_that_fits_is_not_spread(tmp_path):
    target = load_target_at(save_target(tmp_path / "target"), 3.0)
    assert not is_spread(target.model) and not waiting(target)


@pytest.mark.parametrize("memory", SHARES)
def test_where_the_layers_are_is_said(tmp_path, memory, caplog):
    load_target_at(save_target(tmp_path / "target"), memory)
    wanted = "3 on cpu, 3 on disk" if memory > 0.5 else "6 on disk"
    assert f"6 layers, {wanted}; those on disk are read again in every forward" in caplog.text


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    folder = save_target(tmp_path / "target")
    drop_weight(folder)
    with pytest.raises(TargetError, match=r"lacks or misshapes 1 weights.*layers\.3\.mlp\.up_proj"):
        load_target_at(folder, 0.7)


def test_an_lm_head_with_a_bias_is_refused_wherever_it_is(tmp_path):
    folder = save_target(tmp_path / "target", "phi")
    with pytest.raises(TargetError, match="LM head has a bias"):
        capture_head(load_target_at(folder, 1e-4))


def test_weights_that_cannot_be_read_from_the_files_are_refused(tmp_path):
    """Transformers joins the experts when it loads them; there is nothing to read again."""
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    folder = save_target(tmp_path / "target", "qwen3_moe", **experts)
    assert load_target_at(folder, 3.0).num_layers == 6
    with pytest.raises(TargetError, match=r"does not fit.*target\.max_memory"):
        load_target_at(folder, 0.7)


def test_a_missing_accelerate_is_said(tmp_path, monkeypatch):
    folder = save_target(tmp_path / "target")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(TargetError, match=r"needs accelerate.*pip install accelerate"):
        load_target_at(folder, 0.7)
    load_target_at(folder)


def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    config = TargetConfig(
        path=str(save_target(tmp_path / "target")),
        dtype="float32",
        device="spread",
        max_memory={torch.cuda.device_count(): "1GB"},
    )
    with pytest.raises(TargetError, match=r"max_memory names GPU \d+, torch sees"):
        load_target(config)


def test_taps_of_several_devices_come_to_the_first_ones():
    layers = nn.ModuleList([nn.Identity(), nn.Identity()])
    with TapRecorder(layers, [0, 1]) as recorder:
        layers[0](torch.zeros(1, 2, 4, device="meta"))
        layers[1](torch.zeros(1, 2, 4))
        assert recorder.collect().device.type == "meta"


def test_a_row_is_copied_to_another_device_once():
    """Kernels keep what they have computed for a tensor of ends."""
    row, meta = Row.of([3, 2], torch.device("cpu")), torch.device("meta")
    assert row.on(torch.device("cpu")) is row
    there = row.on(meta)
    assert there.positions.device == there.ends.device == meta and there.spans == row.spans
    assert row.on(meta) is there


def test_a_replaced_forward_runs_behind_the_hooks_and_goes_again(folder):
    target = load_target_at(folder, 1e-4)
    (layer,) = [m for n, m in target.model.named_modules() if n.endswith("layers.0.mlp.up_proj")]
    inputs, seen = torch.ones(1, layer.in_features), []
    with torch.no_grad():
        before = layer(inputs)
        with replaced_forward(layer, lambda x: seen.append(layer.weight.device.type) or x):
            assert torch.equal(layer(inputs), inputs)
        assert torch.equal(layer(inputs), before)
    assert seen == ["cpu"] and layer.weight.device.type == "meta"


def test_layers_on_their_device_keep_only_the_outer_hook(folder):
    target = load_target_at(folder, 0.7)
    inner = [sum(is_spread(m) for m in layer.modules()) - 1 for layer in target.layers]
    assert inner[0] == 0 < inner[-1]
    # So they can be compiled as those of a whole target are, and only they.
    assert [_as_written(layer.mlp) for layer in target.layers] == [not n for n in inner]
