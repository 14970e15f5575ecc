"""The gate with a real target behind it: overflow in float16, and samples that share a prompt."""

import numpy as np
import pytest
import torch

from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.errors import StoreError
from drafttrain.data.samples import make_sample, write_table
from drafttrain.extract.recheck import check_states
from drafttrain.extract.target import build_target
from drafttrain.extract.worker import extract

from .factory import CONFIG, HIDDEN, VOCAB, make_model, make_tokenizer

RARE = 7  # odd, so that it is not in the probe of the head


def make_ids_table(path, texts: list[list[int]]):
    samples = [
        make_sample(
            np.array(ids), np.ones(len(ids), bool), source="s", mode="no_think", greedy=False
        )
        for ids in texts
    ]
    write_table(path, samples, {"tokenizer_hash": tokenizer_hash(make_tokenizer())})
    return path


@pytest.mark.parametrize(("dtype", "overflows"), [("float16", True), ("bfloat16", False)])
def test_overflow_in_float16_is_refused_and_bfloat16_shows_the_outlier(tmp_path, dtype, overflows):
    """One rare token is near the largest float16, one deep layer adds to it (fault kind 40)"""
    model = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(100)
        model.model.embed_tokens.weight[RARE] = 0
        model.model.embed_tokens.weight[RARE, 3] = 65000.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight[3] = 0
        # After the norm this token's state has one large value, whatever the weights: make the
        # gate and the projection of layer 3 add a positive amount to it.
        mlp = model.model.layers[3].mlp
        mlp.gate_proj.weight[0], mlp.up_proj.weight[0] = 0, 0
        mlp.gate_proj.weight[0, 3], mlp.up_proj.weight[0, 3] = 1, 1
        mlp.down_proj.weight[3, 0] = 200.0
    target = build_target(model.to(getattr(torch, dtype)), make_tokenizer(), name="overflowing")
    texts = [[2, 4, 6, 8] * 5, [10, 12, RARE, 14]]
    table = make_ids_table(tmp_path / "t.parquet", texts)
    config = CONFIG.model_copy(update={"codec": "bf16", "taps": [0, 3]})
    if overflows:
        with pytest.raises(StoreError, match=r"infinite value in tap 3 at token 2; .*float16"):
            extract(target, config, table, tmp_path / "store")
        return
    store = extract(target, config, table, tmp_path / "store")
    assert store.meta.target_dtype == "bfloat16"
    assert store.sample(1).taps[2].float().abs().amax(dim=-1).min() > 60000


def test_samples_that_share_a_prompt_have_a_row_for_every_token(tmp_path, target):
    """(fault kinds 23, 30)"""
    system = [(5 * i) % VOCAB for i in range(64)]
    texts = [[*system, 3, 9, 4], [*system, 8, 2], system]
    table = make_ids_table(tmp_path / "t.parquet", texts)
    store = extract(target, CONFIG, table, tmp_path / "store")
    for i, ids in enumerate(texts):
        sample = store.sample(i)
        assert sample.input_ids.tolist() == ids
        assert sample.taps.shape == (len(ids), 3, HIDDEN)
        assert torch.allclose(sample.taps[:64], store.sample(2).taps, atol=1e-5)
    check = check_states(target, store, 1000)
    assert check.tokens == sum(map(len, texts)) and not check.bad
