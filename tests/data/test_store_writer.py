"""Writing shards: the plan, the gate, and bytes that depend on nothing but the content."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.data import store_writer
from drafttrain.data.errors import StoreError
from drafttrain.data.store_format import Shard, plan_shards
from drafttrain.data.store_writer import ShardBuffer, is_sealed

from .store_factory import (
    LENGTHS,
    SHARD_TOKENS,
    TAPS,
    bytes_of,
    fill,
    make_meta,
    make_samples,
    make_store,
    states_of,
)


def test_plan_keeps_table_order_and_whole_samples():
    assert plan_shards([5, 3, 9, 2, 20, 4], 16) == [
        Shard(0, 0, 2, 8),
        Shard(1, 2, 4, 11),
        Shard(2, 4, 5, 20),  # longer than a shard: alone in one
        Shard(3, 5, 6, 4),
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60))
def test_plan_covers_every_sample_once_within_the_limit(lengths, shard_tokens):
    shards = plan_shards(lengths, shard_tokens)
    assert [s.index for s in shards] == list(range(len(shards)))
    assert [i for s in shards for i in range(s.first, s.stop)] == list(range(len(lengths)))
    for shard, following in zip(shards, [*shards[1:], None], strict=True):
        assert shard.tokens == sum(lengths[shard.first : shard.stop])
        assert shard.tokens <= shard_tokens or shard.stop - shard.first == 1
        if following is not None:  # no shard ends early
            assert shard.tokens + lengths[following.first] > shard_tokens


@pytest.mark.parametrize("codec", ["fp32", "fp8"])
def test_two_writers_give_the_same_bytes_in_any_filling_order(tmp_path, codec):
    made = make_store(tmp_path / "a", codec=codec)
    other = tmp_path / "b"
    meta = make_meta(other, codec=codec)
    for shard in reversed(made.shards):
        fill(meta, shard, made.samples, backwards=True).seal(other)
    ours = bytes_of(made.folder)
    assert ours.pop("store.json")
    assert bytes_of(other) == ours


def test_record_holds_counts_and_statistics_of_every_tap(tmp_path):
    made = make_store(tmp_path / "s")
    shard = made.shards[0]
    record = json.loads((made.folder / shard.record).read_text())
    states = [states_of(i, LENGTHS[i]) for i in range(shard.first, shard.stop)]
    for i, layer in enumerate(TAPS):
        tap = torch.cat([taps[:, i] for taps, _ in states]).double()
        norms = tap.square().mean(dim=1).sqrt().sort().values
        wanted = {
            "rms": tap.square().mean().sqrt().item(),
            "min": norms[0].item(),
            "median": norms[3].item(),
            "p99": norms[6].item(),  # of 8 rows
            "max": norms[-1].item(),
        }
        assert record["taps"][str(layer)] == pytest.approx(wanted, rel=1e-5)
    assert record["final"]["max"] > record["final"]["p99"] > record["final"]["median"]
    assert (record["num_samples"], record["num_tokens"]) == (2, 8)
    assert record["finite"] is True


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
@pytest.mark.parametrize("tap", [0, 1, "final"])
def test_gate_refuses_one_bad_value_and_names_sample_and_tap(tmp_path, codec, value, word, tap):
    """(fault kind 22)"""
    samples = make_samples()
    meta = make_meta(tmp_path, codec=codec)
    shard = plan_shards(LENGTHS, SHARD_TOKENS)[0]
    buffer = ShardBuffer(meta, shard, samples[shard.first : shard.stop])
    taps, final = states_of(1, LENGTHS[1])
    (final if tap == "final" else taps[:, tap])[2, 5] = value
    where = "final hidden state" if tap == "final" else f"tap {TAPS[tap]}"
    if codec == "fp8" and tap != "final":
        word = "NaN"  # an infinite scale decodes to it
    with pytest.raises(
        StoreError, match=f"{samples[1].sample_id}: {word} value .*{where}.*token 2"
    ):
        buffer.add(1, taps, final)


def test_gate_sees_what_overflows_in_the_codec(tmp_path):
    """(fault kind 22)"""
    samples = make_samples()
    meta = make_meta(tmp_path, codec="bf16")
    shard = plan_shards(LENGTHS, SHARD_TOKENS)[0]
    buffer = ShardBuffer(meta, shard, samples[shard.first : shard.stop])
    taps, final = states_of(0, LENGTHS[0])
    taps[0, 0, 0] = 3.4e38  # finite in float32, above the largest bfloat16
    with pytest.raises(StoreError, match="infinite value in tap 1 at token 0"):
        buffer.add(0, taps, final)


@pytest.mark.parametrize("codec", ["fp32", "fp8"])
@pytest.mark.parametrize("tap", [0, 1, "final"])
def test_gate_refuses_an_all_zero_row(tmp_path, tap, codec):
    """(fault kind 21)"""
    samples = make_samples()
    meta = make_meta(tmp_path, codec=codec)
    shard = plan_shards(LENGTHS, SHARD_TOKENS)[0]
    buffer = ShardBuffer(meta, shard, samples[shard.first : shard.stop])
    taps, final = states_of(0, LENGTHS[0])
    (final if tap == "final" else taps[:, tap])[3] = 0
    where = "final hidden state" if tap == "final" else f"tap {TAPS[tap]}"
    with pytest.raises(
        StoreError, match=f"{samples[0].sample_id}: all-zero row .*{where}.*token 3"
    ):
        buffer.add(0, taps, final)


@pytest.mark.parametrize("missing", [1, -1])
def test_rows_must_equal_tokens(tmp_path, missing):
    """(fault kind 30)"""
    samples = make_samples()
    meta = make_meta(tmp_path)
    shard = plan_shards(LENGTHS, SHARD_TOKENS)[0]
    buffer = ShardBuffer(meta, shard, samples[shard.first : shard.stop])
    taps, final = states_of(0, LENGTHS[0] - missing)
    with pytest.raises(StoreError, match=f"{samples[0].sample_id}: .* rows of taps for 5 tokens"):
        buffer.add(0, taps, final)


def test_a_shard_with_an_unfilled_sample_is_not_sealed(tmp_path):
    samples = make_samples()
    meta = make_meta(tmp_path)
    shard = plan_shards(LENGTHS, SHARD_TOKENS)[0]
    buffer = ShardBuffer(meta, shard, samples[shard.first : shard.stop])
    buffer.add(0, *states_of(0, LENGTHS[0]))
    with pytest.raises(AssertionError, match=samples[1].sample_id):
        buffer.seal(tmp_path)
    assert not list(tmp_path.glob("shard-*"))


def test_parquet_holds_ids_masks_and_pointers_only(tmp_path):
    """(fault kind 43)"""
    made = make_store(tmp_path)
    for shard in made.shards:
        schema = pq.read_schema(tmp_path / shard.parquet)
        assert not any(pa.types.is_floating(field.type) for field in schema)
        assert schema.field("input_ids").type == pa.list_(pa.int32())
        table = pq.read_table(tmp_path / shard.parquet)
        stored = sum(len(ids) for ids in table["input_ids"])
        assert stored == shard.tokens < 2**31  # 32-bit list offsets cannot overflow


def test_a_shard_whose_file_was_cut_is_not_sealed(tmp_path):
    """(fault kind 33)"""
    made = make_store(tmp_path)
    shard = made.shards[1]
    assert is_sealed(tmp_path, shard, made.meta)
    with (tmp_path / shard.states).open("r+b") as file:
        file.truncate(100)
    assert not is_sealed(tmp_path, shard, made.meta)
    (tmp_path / made.shards[2].record).unlink()
    assert not is_sealed(tmp_path, made.shards[2], made.meta)


def test_a_record_that_another_worker_takes_away_is_no_damage(tmp_path, monkeypatch):
    """It does the shard again; a damaged record stays an error."""
    made = make_store(tmp_path)
    shard, real = made.shards[0], store_writer.read_record

    def late(folder, name, meta):
        (folder / name).unlink()
        return real(folder, name, meta)

    with monkeypatch.context() as patch:
        patch.setattr(store_writer, "read_record", late)
        assert not is_sealed(tmp_path, shard, made.meta)
    (tmp_path / shard.record).write_text("{")
    with pytest.raises(StoreError, match="not valid JSON"):
        is_sealed(tmp_path, shard, made.meta)
