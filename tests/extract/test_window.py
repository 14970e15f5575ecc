"""The window of a rolling store: it fits its budget, is as long as it can be, and only moves on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data.errors import StoreError
from drafttrain.data.store_format import plan_shards
from drafttrain.data.store_writer import ShardBuffer
from drafttrain.extract.window import Window, largest_bytes
from tests.data.store_factory import HIDDEN, make_meta, make_samples

HEAD = 5000


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    return make_meta(tmp_path_factory.mktemp("window"))


@settings(max_examples=50, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(1, 60), min_size=4, max_size=60))
def test_a_window_is_the_longest_run_that_fits_from_the_position_on(meta, data, lengths):
    shards = plan_shards(lengths, 64)
    sizes = [largest_bytes(meta, shard) for shard in shards]
    step = data.draw(st.integers(1, 8))
    with pytest.raises(StoreError) as refused:
        Window(meta, shards, 1, HEAD, step).check()
    assert "one training step" in str(refused.value)
    budget = (32 << 10) + HEAD + max(sizes) * (step + 1) + data.draw(st.integers(0, 99_999))
    window = Window(meta, shards, budget, HEAD, step)
    window.check()
    last = -1
    for position in range(len(lengths)):
        found = window.at(position)
        assert shards[found.start].first <= position < shards[found.start].stop
        assert sum(sizes[i] for i in found) <= window.room
        assert found.stop == len(shards) or sum(sizes[i] for i in found) + sizes[found.stop] > (
            window.room
        )
        # A step at any place finds all its samples in one window.
        end = min(position + step, len(lengths)) - 1
        assert shards[found.stop - 1].stop > end
        assert found.stop >= last
        last = found.stop
        assert window.bytes_of(set(found)) == sum(sizes[i] for i in found)
        assert window.tokens_left(found, list(found)) == sum(
            shard.tokens for shard in shards[found.start :]
        )
    assert len(window.at(len(lengths))) == 0


def test_the_refusal_names_a_budget_that_is_enough(meta):
    shards = plan_shards([40] * 30, 64)
    needed = HEAD + (32 << 10) + 3 * largest_bytes(meta, shards[0])
    Window(meta, shards, needed, HEAD, 3).check()
    with pytest.raises(StoreError, match=r"take up to \d+\.\d KB; raise it, or lower"):
        Window(meta, shards, needed - 1, HEAD, 3).check()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("lengths", [[1] * 600, [3000], [7, 900, 1]])
def test_no_shard_is_larger_than_its_bound(tmp_path: Path, codec, lengths):
    """Random ids over a large vocabulary do not compress."""
    meta = make_meta(tmp_path, lengths, codec=codec, shard_tokens=10_000, vocab_size=250_000)
    (shard,) = plan_shards(lengths, 10_000)
    samples = make_samples(lengths)
    rng = np.random.default_rng(0)
    for sample in samples:
        sample.input_ids[:] = rng.integers(0, 250_000, len(sample.input_ids))
    buffer = ShardBuffer(meta, shard, samples)
    for position, length in enumerate(lengths):
        buffer.add(position, torch.randn(length, 2, HIDDEN), torch.randn(length, HIDDEN))
    buffer.seal(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert written <= largest_bytes(meta, shard)
