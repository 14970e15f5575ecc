"""Reading a store: any sample in any order, bounded memory, nothing believed unchecked."""

import ctypes
import gc
import os
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_reader import FeatureStore, StoredSample

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


def _files(folder) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(str(folder) in os.readlink(link) for link in links if os.path.islink(link))


def _own_memory() -> int:
    """Resident bytes in use that are not of mapped files: those the system takes back itself."""
    gc.collect()
    # What was freed before goes back to the system: else new memory may hide in it.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def _sweep(store: FeatureStore, keep: Callable[[StoredSample], None]) -> None:
    """Read every sample once in random order, reading ahead as training does."""
    order = np.random.default_rng(0).permutation(len(store)).tolist()
    for place, i in enumerate(order):
        store.prefetch(order[place : place + 8])
        sample = store.sample(i)
        sample.taps.sum()
        keep(sample)


@pytest.mark.parametrize(
    ("what", "keep"),
    [
        (None, lambda kept, sample: None),
        ("memory", lambda kept, sample: kept.append(sample.taps.clone())),
        ("maps", lambda kept, sample: kept.append(sample)),
    ],
)
def test_reading_keeps_nothing(tmp_path, what, keep):
    """A reader that keeps samples or their maps is seen by the same measure (fault kind 44)"""
    shards = 60
    make_store(tmp_path, [1000] * 2 * shards, shard_tokens=2000, num_shards=shards)
    store = FeatureStore(tmp_path)
    kept: list = []
    for _ in range(2):
        _sweep(store, lambda sample: None)
    before = _own_memory()
    for _ in range(3):
        _sweep(store, lambda sample: keep(kept, sample))
    # At most 16 samples wait to be taken, and 8 shards are kept open, with a file beside the map,
    # which has one of its own.
    assert (_maps(tmp_path) > 8 + 16) == (what == "maps")
    assert (_files(tmp_path) > 2 * 8 + 16) == (what == "maps")
    grown = _own_memory() - before
    assert (grown > 8_000_000) == (what == "memory"), grown


def test_dropping_a_store_closes_its_maps(tmp_path):
    """(fault kind 44)"""
    make_store(tmp_path)
    store = FeatureStore(tmp_path)
    sample = store.sample(0)
    wanted = sample.taps.clone()
    del store
    assert torch.equal(sample.taps, wanted)  # a sample in use keeps its own map
    assert (_maps(tmp_path), _files(tmp_path)) == (1, 1)
    del sample
    assert (_maps(tmp_path), _files(tmp_path)) == (0, 0)


def test_a_store_travels_to_another_process_as_its_path(tmp_path):
    make_store(tmp_path)
    store = FeatureStore(tmp_path)
    store.sample(0)
    data = pickle.dumps(store)
    assert len(data) < 1000
    taps_only = pickle.loads(pickle.dumps(FeatureStore(tmp_path, final=False)))
    assert taps_only.sample(2).final is None
    assert torch.equal(pickle.loads(data).sample(2).taps, store.sample(2).taps)


def test_samples_are_the_same_whether_or_not_they_are_read_ahead(tmp_path):
    make_store(tmp_path)
    plain, ahead = FeatureStore(tmp_path), FeatureStore(tmp_path)
    order = [3, 0, 7, 3, 1, 2, 6, 5, 4]
    ahead.prefetch(order)
    for i in order:
        one, two = plain.sample(i), ahead.sample(i)
        assert one.sample_id == two.sample_id
        assert torch.equal(one.taps, two.taps) and torch.equal(one.final, two.final)


def test_damage_is_seen_where_it_is_and_no_whole_shard_is_read_for_a_sample(tmp_path):
    """(fault kind 37)"""
    made = make_store(tmp_path, [3000, 3000, 3000], shard_tokens=9000, num_shards=1)
    path = tmp_path / made.shards[0].states
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    store = FeatureStore(tmp_path)
    store.prefetch([0, 1, 2])
    seen = []
    for i in range(3):
        try:
            store.sample(i)
        except StoreError as exc:
            seen.append((i, str(exc)))
    assert len(seen) == 1
    bad, message = seen[0]
    assert path.name in message and made.samples[bad].sample_id in message
    assert "store repair" in message
    with pytest.raises(StoreError, match="have changed"):  # every time
        store.sample(bad)


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
