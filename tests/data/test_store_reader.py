"""Reading a store: any sample in any order, bounded memory, nothing believed unchecked."""

import os
import pickle
import random

import numpy as np
import pytest
import torch

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_reader import FeatureStore

from .store_factory import LENGTHS, make_store, states_of


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.float32)],
)
@pytest.mark.parametrize("final_hidden", [True, False])
def test_every_sample_comes_back_in_any_order(tmp_path, codec, dtype, final_hidden):
    made = make_store(tmp_path, codec=codec, final_hidden=final_hidden)
    store = FeatureStore(tmp_path, made.meta.table_hash)
    assert len(store) == len(LENGTHS)
    assert store.num_tokens == sum(LENGTHS)
    assert store.lengths.tolist() == LENGTHS
    order = list(range(len(store))) * 2
    random.Random(0).shuffle(order)
    for i in order:
        stored, wanted = store.sample(i), made.samples[i]
        taps, final = states_of(i, LENGTHS[i])
        assert stored.taps.dtype == dtype
        # fp8 has 4 significant bits; the others hold these numbers exactly.
        assert torch.allclose(stored.taps.float(), taps, atol=0, rtol=(codec == "fp8") / 16)
        if final_hidden:
            assert torch.equal(stored.final.float(), final)
        else:
            assert stored.final is None
        assert stored.sample_id == wanted.sample_id
        assert (stored.source, stored.mode, stored.greedy) == (
            wanted.source,
            wanted.mode,
            wanted.greedy,
        )
        assert stored.input_ids.dtype == torch.int64
        assert stored.input_ids.tolist() == wanted.input_ids.tolist()
        assert stored.loss_mask.dtype == torch.bool
        assert stored.loss_mask.tolist() == wanted.loss_mask.tolist()


def test_index_agrees_with_sample_and_reads_no_states(tmp_path, monkeypatch):
    make_store(tmp_path)
    full = [FeatureStore(tmp_path).sample(i) for i in range(len(LENGTHS))]
    monkeypatch.setattr(
        "drafttrain.data.shard_states.map_tensors", lambda *_: pytest.fail("states were read")
    )
    store = FeatureStore(tmp_path)
    for i, sample in enumerate(full):
        index = store.index(i)
        assert (index.sample_id, index.greedy, len(index)) == (
            sample.sample_id,
            sample.greedy,
            LENGTHS[i],
        )
        assert torch.equal(index.input_ids, sample.input_ids)
        assert torch.equal(index.loss_mask, sample.loss_mask)


@pytest.mark.parametrize("i", [-1, len(LENGTHS)])
def test_a_sample_out_of_range_is_an_index_error(tmp_path, i):
    make_store(tmp_path)
    with pytest.raises(IndexError):
        FeatureStore(tmp_path).sample(i)


def test_writing_into_a_sample_does_not_reach_the_file(tmp_path):
    make_store(tmp_path)
    FeatureStore(tmp_path).sample(0).taps.zero_()
    verify_store(tmp_path)


def _maps(folder) -> int:
    with open("/proc/self/maps") as file:
        return sum(str(folder) in line for line in file)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_flat_over_many_shards(tmp_path):
    """(fault kind 44)"""
    lengths = [2000] * 40  # 40 shards of 0.4 MB
    make_store(tmp_path, lengths, shard_tokens=2000, num_shards=40)
    store = FeatureStore(tmp_path)

    def sweep() -> None:
        for i in np.random.default_rng(0).permutation(len(store)):
            store.sample(int(i)).taps.sum()

    sweep()
    before = _resident_bytes()
    for _ in range(5):
        sweep()
    assert _maps(tmp_path) <= 8
    assert _resident_bytes() - before < 5_000_000


def test_dropping_a_store_closes_its_maps(tmp_path):
    """(fault kind 44)"""
    make_store(tmp_path)
    store = FeatureStore(tmp_path)
    sample = store.sample(0)
    wanted = sample.taps.clone()
    del store
    assert torch.equal(sample.taps, wanted)  # a sample in use keeps its own map
    assert _maps(tmp_path) == 1
    del sample
    assert _maps(tmp_path) == 0


def test_a_store_travels_to_another_process_as_its_path(tmp_path):
    make_store(tmp_path)
    store = FeatureStore(tmp_path)
    store.sample(0)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data).sample(2).taps, store.sample(2).taps)


@pytest.mark.parametrize("damage", ["cut", "appended", "flipped"])
@pytest.mark.parametrize("suffix", ["safetensors", "parquet"])
def test_a_damaged_shard_is_named_before_its_states_are_used(tmp_path, damage, suffix):
    """(fault kind 37)"""
    make_store(tmp_path, [3000, 3000], shard_tokens=3000, num_shards=2)
    path = tmp_path / f"shard-00001.{suffix}"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-4096]
    elif damage == "appended":
        data += b"\0" * 8
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=f"{path.name}.*store repair"):
        FeatureStore(tmp_path).sample(1)


@pytest.mark.parametrize("codec", ["fp32", "fp8"])
def test_verify_names_every_damaged_file(tmp_path, codec):
    """(fault kind 37)"""
    made = make_store(tmp_path, codec=codec)
    verify_store(tmp_path)
    damaged = ["head.safetensors", made.shards[0].states, made.shards[2].parquet]
    for name in damaged:
        data = bytearray((tmp_path / name).read_bytes())
        data[-1] ^= 1
        (tmp_path / name).write_bytes(data)
    with pytest.raises(StoreError) as caught:
        verify_store(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(name in line for name, line in zip(damaged, lines, strict=True))
