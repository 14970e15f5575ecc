"""Writing behind the engine: at the same time, within bounds, and whole or not at all."""

import threading
import time
import weakref

import pytest
import torch

from drafttrain.data import store_writer
from drafttrain.data.errors import StoreError
from drafttrain.data.samples import read_table
from drafttrain.data.store_writer import ShardBuffer
from drafttrain.extract import pipeline
from drafttrain.extract.engine import Engine
from drafttrain.extract.pipeline import SHARDS
from drafttrain.extract.worker import extract

from .factory import CONFIG, NUM_SHARDS, contents


def test_a_shard_is_written_while_the_next_one_is_computed(tmp_path, target, table, monkeypatch):
    """Sealing waits for states of the next shard, and computing goes on."""
    computed, real_seal, real_features = threading.Event(), ShardBuffer.seal, Engine.features
    waited = []

    def seal(buffer, *given):
        if not waited:
            waited.append(computed.wait(60))
        return real_seal(buffer, *given)

    def features(engine, groups, batch_tokens):
        for item in real_features(engine, groups, batch_tokens):
            if item.group == 1:
                computed.set()
            yield item

    monkeypatch.setattr(ShardBuffer, "seal", seal)
    monkeypatch.setattr(Engine, "features", features)
    extract(target, CONFIG, table, tmp_path / "store")
    assert waited == [True]


def test_memory_and_disk_hold_few_unfinished_shards(tmp_path, target, table, monkeypatch):
    """A slow disk makes the engine wait (fault kind 32)."""
    buffers: weakref.WeakSet[ShardBuffer] = weakref.WeakSet()
    out = tmp_path / "store"
    most, unfinished = [], []
    real_init, real_write = ShardBuffer.__init__, store_writer.write_tensors

    def init(buffer, *given):
        real_init(buffer, *given)
        buffers.add(buffer)
        most.append(len(buffers))

    def write(path, tensors):
        time.sleep(0.05)
        record = real_write(path, tensors)
        unfinished.append(sum(p.stat().st_size for p in out.glob("*.safetensors.*.tmp")))
        assert unfinished[-1] == record.bytes
        return record

    monkeypatch.setattr(ShardBuffer, "__init__", init)
    monkeypatch.setattr(store_writer, "write_tensors", write)
    extract(target, CONFIG, table, out)
    assert len(most) == len(unfinished) == NUM_SHARDS > SHARDS
    assert max(most) == SHARDS


@pytest.mark.parametrize("waiting", [1, 1 << 20])
def test_few_states_wait(tmp_path, target, table, monkeypatch, waiting):
    """As many bytes as allowed, or one sample; the bytes of the store do not depend on it."""
    extract(target, CONFIG, table, tmp_path / "whole")
    monkeypatch.setattr(pipeline, "_WAITING_BYTES", waiting)
    out = tmp_path / "store"
    most = []
    real = ShardBuffer.add

    def add(buffer, position, taps, final):
        time.sleep(0.005)
        most.append(writers[0]._waiting)
        real(buffer, position, taps, final)

    writers = []
    real_enter = pipeline.ShardWriter.__enter__
    monkeypatch.setattr(
        pipeline.ShardWriter, "__enter__", lambda w: (writers.append(w), real_enter(w))[1]
    )
    monkeypatch.setattr(ShardBuffer, "add", add)
    extract(target, CONFIG, table, out)
    largest = 40 * 4 * 32 * 4  # tokens, taps and final state, hidden size, bytes
    assert (max(most) <= largest) == (waiting == 1)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("stage", ["engine", "fill", "seal", "report", "read"])
def test_a_failure_in_any_stage_ends_all_and_is_told(tmp_path, target, table, monkeypatch, stage):
    """Nothing unsealed, no claim and no thread stays behind, and rerunning finishes."""
    whole, out = tmp_path / "whole", tmp_path / "store"
    extract(target, CONFIG, table, whole)
    places = {
        "engine": (Engine, "_launch"),
        "fill": (ShardBuffer, "add"),
        "seal": (ShardBuffer, "seal"),
        "report": (ShardBuffer, "_write_index"),
        "read": (pipeline.ShardWriter, "begin"),
    }
    where, name = places[stage]
    real, calls = getattr(where, name), []

    def failing(*given):
        calls.append(1)
        if len(calls) == 4:
            raise StoreError(f"{stage} went wrong")
        return real(*given)

    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing)
        with pytest.raises(StoreError, match=f"{stage} went wrong"):
            extract(target, CONFIG, table, out)
    assert set(threading.enumerate()) == threads
    sealed = {path.stem for path in out.glob("shard-*.json")}
    assert len(sealed) < NUM_SHARDS
    assert not list(out.glob("*.tmp")) and not list(out.glob("*.claim"))
    for name, data in contents(out).items():
        assert data == contents(whole)[name]
    extract(target, CONFIG, table, out)
    assert contents(out) == contents(whole)


def test_an_engine_that_waits_for_room_is_woken_by_a_failure(tmp_path, target, table, monkeypatch):
    """The writer fails while all places for shards are taken."""

    def slow(buffer, *given):
        time.sleep(0.3)
        raise RuntimeError("the disk has burnt")

    monkeypatch.setattr(ShardBuffer, "seal", slow)
    with pytest.raises(RuntimeError, match="burnt"):
        extract(target, CONFIG, table, tmp_path / "store")
    assert not list((tmp_path / "store").glob("shard-*"))


def test_samples_of_a_shard_may_arrive_in_any_order(tmp_path, target, table, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "store"
    extract(target, CONFIG, table, whole)
    real = Engine.features

    def shuffled(engine, groups, batch_tokens):
        generator = torch.Generator().manual_seed(0)
        for group, samples in enumerate(groups):
            found = list(real(engine, [samples], batch_tokens))
            for i in torch.randperm(len(found), generator=generator).tolist():
                yield found[i]._replace(group=group)

    monkeypatch.setattr(Engine, "features", shuffled)
    extract(target, CONFIG, table, out)
    assert contents(out) == contents(whole)
    assert len(read_table(table)) > NUM_SHARDS
