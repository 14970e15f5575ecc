"""Extraction as a whole: resumable, and the same bytes however it got there."""

import errno
import json
import logging
import os
import shutil

import pytest
import torch

from drafttrain.data import files, store_writer
from drafttrain.data.errors import StoreError
from drafttrain.data.samples import read_table
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract import worker
from drafttrain.extract.config import ExtractConfig
from drafttrain.extract.worker import extract

from .factory import (
    CONFIG,
    LENGTHS,
    NUM_SHARDS,
    contents,
    count_forwards,
    make_table,
)


def test_stored_states_are_the_targets_hidden_states(tmp_path, target, table):
    """(fault kinds 25, 27, 29, 30)"""
    store = extract(target, CONFIG, table, tmp_path / "store")
    samples = read_table(table)
    assert len(store) == len(samples)
    assert store.num_tokens == sum(LENGTHS)
    assert store.meta.taps == [0, 2, 4]
    assert store.meta.num_shards == NUM_SHARDS
    assert store.meta.table_hash == samples.table_hash
    for i in range(len(store)):
        stored, sample = store.sample(i), samples[i]
        assert stored.sample_id == sample.sample_id
        assert stored.input_ids.tolist() == sample.input_ids.tolist()
        assert stored.loss_mask.tolist() == sample.loss_mask.tolist()
        with torch.no_grad():
            hidden = target.model(stored.input_ids[None], output_hidden_states=True).hidden_states
        for tap, layer in enumerate(store.meta.taps):
            assert torch.allclose(stored.taps[:, tap], hidden[layer + 1][0], atol=1e-5)
        assert torch.allclose(stored.final, hidden[-1][0], atol=1e-5)


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("final_hidden", [True, False])
def test_every_setting_is_stored_as_asked(tmp_path, target, table, codec, final_hidden):
    config = ExtractConfig(taps=2, codec=codec, final_hidden=final_hidden, shard_tokens=10_000)
    store = extract(target, config, table, tmp_path / "store")
    assert store.meta.taps == [1, 3]
    assert store.meta.num_shards == 1
    sample = store.sample(3)
    stored = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}[codec]
    assert sample.encoded_taps.parts[""].dtype == stored
    assert (sample.final is not None) == final_hidden
    if sample.final is not None:
        assert sample.final.dtype == (torch.float32 if codec == "fp32" else torch.bfloat16)
    # Decoded, they are the target's states in that precision.
    with torch.no_grad():
        hidden = target.model(sample.input_ids[None], output_hidden_states=True).hidden_states
    relative = {"bf16": 2**-8, "fp32": 1e-5, "fp8": 2**-4}[codec]
    for tap, layer in enumerate(store.meta.taps):
        error = (sample.taps[:, tap].float() - hidden[layer + 1][0]).norm(dim=-1)
        assert (error <= relative * hidden[layer + 1][0].norm(dim=-1)).all()


def test_resuming_computes_exactly_the_missing_shards(tmp_path, target, table, monkeypatch):
    """(fault kind 31)"""
    whole = tmp_path / "whole"
    extract(target, CONFIG, table, whole)
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for stem in ("shard-00001", "shard-00004"):
        (again / f"{stem}.json").unlink()
    lost = [
        n
        for i in (1, 4)
        for n in json.loads((whole / f"shard-0000{i}.json").read_text())["lengths"]
    ]
    seen = count_forwards(monkeypatch)
    extract(target, CONFIG, table, again)
    assert sorted(seen) == sorted(lost)
    assert contents(again) == contents(whole)
    seen.clear()
    extract(target, CONFIG, table, again)
    assert seen == []


def test_what_is_done_is_read_from_disk_every_time(tmp_path, target, table, monkeypatch):
    """(fault kind 31)"""
    out = tmp_path / "store"
    extract(target, CONFIG, table, out)
    before = contents(out)
    with (out / "shard-00002.safetensors").open("r+b") as file:
        file.truncate(50)  # the record still says it is whole
    seen = count_forwards(monkeypatch)
    extract(target, CONFIG, table, out)
    assert len(seen) == len(json.loads(before["shard-00002.json"])["lengths"])
    assert contents(out) == before


def test_dying_at_any_file_operation_loses_nothing_and_changes_no_byte(
    tmp_path, target, monkeypatch
):
    """(fault kind 33)"""
    table = make_table(tmp_path / "t.parquet", [9, 8, 7])
    config = ExtractConfig(taps=[1], codec="fp32", shard_tokens=16)
    whole = tmp_path / "whole"
    steps = 0

    def run(folder, die_at: int | None) -> None:
        nonlocal steps
        steps = 0

        def dying(real):
            def step(*args):
                nonlocal steps
                steps += 1
                if steps == die_at:
                    raise KeyboardInterrupt
                return real(*args)

            return step

        with monkeypatch.context() as patch:
            patch.setattr(files, "fsync_path", dying(files.fsync_path))
            patch.setattr(os, "replace", dying(os.replace))
            patch.setattr(os, "link", dying(os.link))
            patch.setattr(worker, "is_sealed", dying(worker.is_sealed))
            extract(target, config, table, folder)

    run(whole, None)
    total = steps
    assert total > 20
    out = tmp_path / "interrupted"
    for die_at in range(1, total + 1):
        shutil.rmtree(out, ignore_errors=True)
        with pytest.raises(KeyboardInterrupt):
            run(out, die_at)
        sealed = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*.json")}
        if len(sealed) < 2:
            with pytest.raises(StoreError):
                FeatureStore(out)
        run(out, None)
        assert contents(out) == contents(whole)
        for name, written in sealed.items():
            assert (out / name).stat().st_mtime_ns == written, f"{name} was written again"


def test_batch_size_may_change_between_runs(tmp_path, target, table):
    out = tmp_path / "store"
    extract(target, CONFIG, table, out)
    (out / "shard-00000.json").unlink()
    extract(target, CONFIG.model_copy(update={"batch_tokens": 40}), table, out)
    verify_store(out)


def test_a_lost_head_is_written_again(tmp_path, target, table):
    out = tmp_path / "store"
    extract(target, CONFIG, table, out)
    before = contents(out)
    (out / "head.safetensors").unlink()
    extract(target, CONFIG, table, out)
    assert contents(out) == before


def test_leftovers_of_a_killed_run_are_removed(tmp_path, target, table):
    """(fault kind 33)"""
    out = tmp_path / "store"
    out.mkdir()
    (out / "shard-00000.safetensors.tmp").write_bytes(b"half")
    (out / ".tmpsuQvWd").write_bytes(b"half")  # a kill inside safetensors' own writing
    extract(target, CONFIG, table, out)
    assert not list(out.glob("*.tmp")) and not list(out.glob(".tmp*"))


def test_the_forecast_is_the_size_that_is_written(tmp_path, target, table, caplog):
    """(fault kind 34)"""
    with caplog.at_level(logging.INFO, logger="drafttrain.extract"):
        store = extract(target, CONFIG, table, tmp_path / "store")
    assert "182 tokens to extract need 94.1 KB (517 B a token)" in caplog.text
    assert "182 tokens in" in caplog.text
    states = sum(path.stat().st_size for path in store.path.glob("shard-*.safetensors"))
    assert states == pytest.approx(182 * (store.meta.bytes_per_token() - 5), rel=0.05)


def test_running_out_of_space_keeps_whole_shards_and_resumes(tmp_path, target, table, monkeypatch):
    """(fault kind 34)"""
    out, whole = tmp_path / "store", tmp_path / "whole"
    extract(target, CONFIG, table, whole)
    real = store_writer.write_tensors

    def no_space(path, tensors):
        if "shard-00003" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(store_writer, "write_tensors", no_space)
        with pytest.raises(StoreError, match=r"disk is full.*3 shards sealed.*rerun"):
            extract(target, CONFIG, table, out)
    assert len(list(out.glob("shard-*.json"))) == 3
    assert not list(out.glob("*.tmp")) and not list(out.glob("*.claim"))
    extract(target, CONFIG, table, out)
    assert contents(out) == contents(whole)
