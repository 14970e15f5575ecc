"""One shard's states, sample by sample: what is read is what was written, or an error says so."""

import errno
import os
import random

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from drafttrain.data.errors import StoreError
from drafttrain.data.shard_states import ShardStates
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.store_shard import read_checked_record

from .store_factory import make_store, states_of

LENGTHS = [4, 3, 6, 3]


@pytest.fixture(params=["fp32", "bf16", "fp8"])
def made(tmp_path, request):
    """A store of one shard."""
    return make_store(tmp_path, LENGTHS, codec=request.param, shard_tokens=16, num_shards=1)


def open_states(made) -> ShardStates:
    record = read_checked_record(made.folder, made.shards[0], made.meta)
    return ShardStates(made.folder, made.meta, record)


def read(states: ShardStates, row: int, fields=("taps", "final")):
    return {name: part.decode().float() for name, part in states.read(row, "s", fields).items()}


def flip(made, place: int) -> None:
    path = made.folder / made.shards[0].states
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_checksum_is_that_of_a_samples_rows_in_the_order_of_names(made):
    record = read_checked_record(made.folder, made.shards[0], made.meta)
    tensors = load_file(made.folder / made.shards[0].states)
    fields = {"taps": ["taps", "taps_scale"], "final": ["final"]}
    for field, names in fields.items():
        for row in range(len(LENGTHS)):
            rows = slice(sum(LENGTHS[:row]), sum(LENGTHS[: row + 1]))
            parts = [tensors[name][rows] for name in names if name in tensors]
            data = b"".join(bytes(part.flatten().view(torch.uint8).numpy()) for part in parts)
            assert record.sample_checksums[field][row] == xxhash.xxh3_64_hexdigest(data)


def test_any_flipped_byte_is_refused_with_its_sample_and_hurts_no_other(made):
    """(fault kind 37)"""
    path = made.folder / made.shards[0].states
    states = open_states(made)
    spans = {}  # (row, field) -> bytes in the file
    for field, names in made.meta.fields().items():
        for row in range(len(LENGTHS)):
            rows = slice(sum(LENGTHS[:row]), sum(LENGTHS[: row + 1]))
            for name in names:
                part = states.tensors[name][rows]
                start = part.storage_offset() * part.itemsize
                spans.update(dict.fromkeys(range(start, start + part.nbytes), (row, field)))
    size, header = path.stat().st_size, min(spans)
    # Between them, header and samples are the whole file.
    assert len(spans) == size - header
    assert header == 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for place in [*range(header), *random.Random(0).sample(sorted(spans), 100), header, size - 1]:
        flip(made, place)
        if place < header:
            with pytest.raises(StoreError, match=rf"{path.name}.*store repair"):
                open_states(made)
        else:
            damaged = open_states(made)
            bad, field = spans[place]
            for row in range(len(LENGTHS)):
                if row != bad:
                    read(damaged, row)
                    continue
                words = rf"{path.name}: {field} of sample s have changed.*store repair"
                with pytest.raises(StoreError, match=words):
                    read(damaged, row)
        flip(made, place)
    for row in range(len(LENGTHS)):
        read(states, row)


def test_a_field_that_is_not_asked_for_is_not_read(made):
    final = load_file(made.folder / made.shards[0].states)["final"]
    states = open_states(made)
    flip(made, states.tensors["final"].storage_offset() * final.itemsize)
    assert list(read(states, 0, ["taps"])) == ["taps"]
    with pytest.raises(StoreError, match="final of sample"):
        read(states, 0)
    store = FeatureStore(made.folder, final=False)
    assert store.sample(0).final is None
    with pytest.raises(StoreError, match=f"final of sample {made.samples[0].sample_id}"):
        FeatureStore(made.folder).sample(0)


def test_a_shard_that_was_taken_away_stays_readable_while_it_is_open(made):
    states = open_states(made)
    for path in made.folder.glob("shard-*"):
        path.unlink()
    for row, length in enumerate(LENGTHS):
        taps, final = states_of(row, length)
        found = read(states, row)
        assert torch.allclose(found["taps"], taps, atol=0, rtol=1 / 16)
        assert torch.equal(found["final"], final)


def test_a_file_that_is_cut_while_it_is_open_is_an_error(made):
    """Touching a map past the end of its file kills the process (fault kind 37)"""
    states = open_states(made)
    with (made.folder / made.shards[0].states).open("r+b") as file:
        file.truncate(200)
    with pytest.raises(StoreError, match=r"was cut while it was open.*store repair"):
        read(states, len(LENGTHS) - 1)


def test_a_bad_disk_is_named(made, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    states = open_states(made)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreError, match=r"safetensors: cannot be read .*Input/output error"):
        read(states, 0)


def test_pieces_of_a_large_sample_are_put_together(tmp_path, monkeypatch):
    """Also where the system gives less than was asked for."""
    made, real = make_store(tmp_path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, place: real(fd, [parts[0][:7]], place))
    monkeypatch.setattr("drafttrain.data.shard_states._PIECE_BYTES", 100)
    monkeypatch.setattr("drafttrain.data.shard_states._local", type("Local", (), {})())
    store = FeatureStore(tmp_path)
    for i, sample in enumerate(made.samples):
        taps, _ = states_of(i, len(sample.input_ids))
        assert torch.equal(store.sample(i).taps, taps)
