"""The gate: attention sinks pass, what memory holds by accident does not."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from drafttrain.data.codec import CODECS
from drafttrain.data.errors import StoreError
from drafttrain.data.samples import make_sample
from drafttrain.data.store_format import Shard, ShardRecord, StateStatistics
from drafttrain.data.store_gate import find_odd_shards, row_norms
from drafttrain.data.store_writer import ShardBuffer

from .store_factory import HIDDEN, TAPS, VOCAB, make_meta

LENGTHS = [40, 24]
TOKENS = sum(LENGTHS)


def make_states(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Taps [64, 2, 8] of norms about 3 and 30, final [64, 8] of norm about 2."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(TOKENS, 2, HIDDEN, generator=generator)
    taps *= torch.tensor([3.0, 30.0])[:, None]
    return taps, 2 * torch.randn(TOKENS, HIDDEN, generator=generator)


def write(folder, taps: Tensor, final: Tensor, codec: str = "fp32", ids=None) -> ShardRecord:
    """One shard of two samples with these states."""
    meta = make_meta(folder, LENGTHS, codec=codec, shard_tokens=TOKENS, num_shards=1)
    ids = np.arange(TOKENS) % VOCAB if ids is None else ids
    edges = [0, LENGTHS[0], TOKENS]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    samples = [
        make_sample(ids[part], ids[part] >= 0, source="s", mode="tool", greedy=False)
        for part in parts
    ]
    buffer = ShardBuffer(meta, Shard(0, 0, 2, TOKENS), samples)
    for i, part in enumerate(parts):
        buffer.add(i, taps[part], final[part])
    return buffer.seal(folder)


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_attention_sinks_pass_and_are_recorded(tmp_path, codec):
    """The first token's state is a thousand times the others', as in some published models."""
    taps, final = make_states()
    taps[0] *= 1000
    record = write(tmp_path, taps, final, codec)
    assert record.taps["3"].max > 300 * record.taps["3"].median > 300 * 10
    assert record.taps["3"].p99 < 3 * record.taps["3"].median


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test_an_absurd_row_is_refused_by_sample_tap_and_token(tmp_path, codec, column, factor):
    """(fault kind 21)"""
    taps, final = make_states()
    (final if column == 2 else taps[:, column])[45] *= factor
    where = "the final hidden state" if column == 2 else f"tap {TAPS[column]}"
    with pytest.raises(StoreError, match=rf"sample \w+: absurd norm .* in {where} at token 5,"):
        write(tmp_path, taps, final, codec)
    assert not list(tmp_path.glob("shard-*"))


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("factor", [1e7, 1e-7])
def test_a_tap_of_another_scale_is_refused(tmp_path, column, factor):
    """(fault kind 21)"""
    taps, final = make_states()
    (final if column == 2 else taps[:, column]).mul_(factor)
    where = "the final hidden state" if column == 2 else f"tap {TAPS[column]}"
    with pytest.raises(StoreError, match=f"{where} has norm .* in the median row"):
        write(tmp_path, taps, final)


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_one_state_for_different_tokens_is_refused(tmp_path, codec):
    """(fault kind 21)"""
    taps, final = make_states()
    taps[40:, 1] = taps[7, 1]
    with pytest.raises(StoreError, match=r"same row again in tap 3 at token 1 \(and at 22 others"):
        write(tmp_path, taps, final, codec)


def test_one_state_for_one_token_passes(tmp_path):
    """A target without absolute positions gives a repeated token the same state again."""
    taps, final = make_states()
    ids = np.arange(TOKENS) % VOCAB
    ids[40:] = 5
    taps[40:], final[40:] = taps[40].clone(), final[40].clone()
    write(tmp_path, taps, final, ids=ids)


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
@pytest.mark.parametrize("content", ["random", "zero", 0xCC, 0xFF, 0x01])
@pytest.mark.parametrize("tap", [0, 1])
def test_memory_that_nobody_wrote_to_is_refused(tmp_path, codec, content, tap):
    """One sample of one tap holds raw bytes (fault kind 21)"""
    rng = np.random.default_rng(0)
    dtype = CODECS[codec]["taps"].parts[""].dtype
    size = LENGTHS[1] * HIDDEN * dtype.itemsize
    fill = {"random": rng.integers(0, 256, size), "zero": np.zeros(size)}
    raw = fill.get(content, np.full(size, content if isinstance(content, int) else 0))
    values = torch.from_numpy(raw.astype(np.uint8)).view(dtype).reshape(LENGTHS[1], HIDDEN)
    taps, final = make_states()
    taps, final = taps.to(dtype), final.to(dtype)
    taps[LENGTHS[0] :, tap] = values
    with pytest.raises(StoreError, match=f"in tap {TAPS[tap]}"):
        write(tmp_path, taps, final, codec)


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_norms_do_not_depend_on_how_rows_are_cut(tmp_path, codec):
    """Whole samples or whole shards: the same digits, so a record is the same for any writer."""
    meta = make_meta(tmp_path, codec=codec, hidden_size=640)
    generator = torch.Generator().manual_seed(0)
    states = {
        "taps": torch.randn(900, 2, 640, generator=generator),
        "final": torch.randn(900, 640, generator=generator),
    }
    dtype = CODECS[codec]["taps"].parts[""].dtype
    stored = {name: tensor.to(dtype) for name, tensor in states.items()}
    whole = row_norms(meta, stored)
    for cut in (1, 7, 450):
        pieces = [
            row_norms(meta, {name: tensor[i : i + cut] for name, tensor in stored.items()})
            for i in range(0, 900, cut)
        ]
        assert torch.equal(torch.cat(pieces), whole)
    wanted = stored["final"].double().square().mean(dim=-1).sqrt().float()
    assert torch.allclose(whole[:, 2], wanted, rtol=1e-5)


def record_of(index: int, median: float, tokens: int = 1000) -> ShardRecord:
    statistic = StateStatistics(rms=1.0, min=1.0, median=1.0, p99=1.0, max=1.0)
    return ShardRecord(
        index=index,
        engine="transformers",
        store="s",
        table_hash="t",
        num_samples=1,
        num_tokens=tokens,
        lengths=[tokens],
        finite=True,
        taps={"1": statistic, "3": statistic.model_copy(update={"median": median})},
        final=None,
        files={},
        sample_checksums={},
    )


@pytest.mark.parametrize(
    ("medians", "odd"),
    [
        ([5.0, 4.3, 6.1, 5.5], set()),  # the range that single samples of real text have
        ([5.0, 4.3, 6.1, 25.0], {3}),
        ([1.0, 4.3, 6.1, 5.5], {0}),
        ([5.0, 5.0e6], {0, 1}),  # nobody knows which of two is wrong
    ],
)
def test_a_shard_unlike_the_others_is_found(medians, odd):
    """(fault kind 21)"""
    found = find_odd_shards(record_of(i, median) for i, median in enumerate(medians))
    assert set(found) == odd
    assert all("tap 3 has norm" in what for what in found.values())


def test_shards_of_a_few_tokens_are_not_compared():
    """The median of very few tokens can be an attention sink."""
    records = [record_of(0, 5.0), record_of(1, 5.0), record_of(2, 900.0, tokens=2)]
    assert find_odd_shards(records) == {}
