"""Extraction refuses what it must not do, and keeps what is finished."""

import shutil
from collections import namedtuple

import pytest
import torch

from drafttrain.data.errors import StoreError, TargetError
from drafttrain.data.samples import read_table
from drafttrain.data.store_check import verify_store
from drafttrain.extract.engine import Engine
from drafttrain.extract.worker import extract

from .factory import CONFIG, VOCAB, contents, count_forwards, make_table, make_target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"taps": [0, 2, 3]}, r"taps \[0, 2, 4\] there, \[0, 2, 3\] now"),
        ({"codec": "bf16"}, "codec fp32 there, bf16 now"),
        ({"final_hidden": False}, "final_hidden True there, False now"),
        ({"shard_tokens": 41}, "shard_tokens 40 there, 41 now"),
    ],
)
def test_a_store_of_other_settings_is_refused_and_kept(tmp_path, target, table, change, words):
    """(fault kind 42)"""
    out = tmp_path / "store"
    extract(target, CONFIG, table, out)
    before = contents(out)
    with pytest.raises(StoreError, match=words):
        extract(target, CONFIG.model_copy(update=change), table, out)
    assert contents(out) == before


def test_a_store_of_another_target_or_table_is_refused_and_kept(tmp_path, target, table):
    out = tmp_path / "store"
    extract(target, CONFIG, table, out)
    before = contents(out)
    with pytest.raises(StoreError, match=r"target_fingerprint"):
        extract(make_target("qwen3", seed=5), CONFIG, table, out)
    other = make_table(tmp_path / "other.parquet", [4, 5])
    with pytest.raises(StoreError, match=r"table_hash .*num_samples 12 there, 2 now"):
        extract(target, CONFIG, other, out)
    assert contents(out) == before


def test_a_full_disk_is_refused_before_the_first_forward(tmp_path, target, table, monkeypatch):
    """(fault kind 34)"""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10_000))
    seen = count_forwards(monkeypatch)
    with pytest.raises(StoreError, match=r"94\.1 KB needed for 182 tokens, 10\.0 KB free"):
        extract(target, CONFIG, table, tmp_path / "store")
    assert seen == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_unusable_states_stop_the_shard_and_keep_the_others(
    tmp_path, target, table, monkeypatch, value
):
    """(fault kinds 21, 22)"""
    real = Engine.features
    bad = read_table(table)[6]

    def spoiled(*args):
        for item in real(*args):
            taps = item.taps.map(torch.clone)
            if len(taps) == len(bad.input_ids):
                taps.parts[""][3, 1] = value
            yield item._replace(taps=taps)

    out = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "features", spoiled)
        with pytest.raises(StoreError, match=rf"sample {bad.sample_id}: .* in tap 2 at token 3"):
            extract(target, CONFIG, table, out)
    assert [path.name for path in sorted(out.glob("shard-*.json"))] == [
        f"shard-0000{i}.json" for i in range(3)
    ]
    extract(target, CONFIG, table, out)
    verify_store(out)


def test_a_target_that_overflows_is_refused(tmp_path, table):
    """(fault kind 40)"""
    broken = make_target()
    with torch.no_grad():
        broken.layers[2].mlp.down_proj.weight[3, 5] = torch.inf
    with pytest.raises(TargetError, match=r"NaN or infinite"):
        extract(broken, CONFIG, table, tmp_path / "store")
    assert not list((tmp_path / "store").glob("shard-*"))


def test_a_failed_capture_keeps_rows_equal_to_tokens(tmp_path, target, table, monkeypatch):
    """(fault kind 30)"""
    real = Engine.features

    def short(*args):
        for item in real(*args):
            shorter = (kept.map(lambda part: part[:-1]) for kept in (item.taps, item.final))
            yield item._replace(taps=next(shorter), final=next(shorter))

    monkeypatch.setattr(Engine, "features", short)
    with pytest.raises(StoreError, match=r"4 rows of taps for 5 tokens|29 rows of taps for 30"):
        extract(target, CONFIG, table, tmp_path / "store")


@pytest.mark.parametrize("bad_id", [-1, VOCAB, VOCAB + 100])
def test_an_id_without_an_embedding_row_is_refused(tmp_path, target, bad_id):
    """(fault kind 18)"""
    from drafttrain.data.samples import make_sample, write_table

    good = read_table(make_table(tmp_path / "good.parquet", [4]))
    bad = make_sample([1, 2, bad_id], [0, 1, 1], source="x", mode="tool", greedy=False)
    write_table(tmp_path / "t.parquet", [good[0], bad], dict(good.manifest))
    with pytest.raises(StoreError, match=rf"{bad.sample_id} has token id {bad_id} at position 2"):
        extract(target, CONFIG, tmp_path / "t.parquet", tmp_path / "store")


def test_the_last_embedding_row_is_a_valid_id(tmp_path, target):
    """(fault kind 18)"""
    from drafttrain.data.samples import make_sample, write_table

    good = read_table(make_table(tmp_path / "good.parquet", [4]))
    last = make_sample([1, VOCAB - 1], [0, 1], source="x", mode="tool", greedy=False)
    write_table(tmp_path / "t.parquet", [last], dict(good.manifest))
    assert len(extract(target, CONFIG, tmp_path / "t.parquet", tmp_path / "store")) == 1


@pytest.mark.parametrize(
    ("lengths", "manifest", "words"),
    [
        ([3], {"tokenizer_hash": "other"}, "made with tokenizer other"),
        ([3], {"tokenizer_hash": None}, "made with tokenizer None"),
        ([], {}, "has no samples"),
        ([3, 129], {}, "129 tokens.*takes 1 to 128"),
    ],
)
def test_a_table_that_does_not_fit_the_target_is_refused(
    tmp_path, target, lengths, manifest, words
):
    table = make_table(tmp_path / "t.parquet", lengths, **manifest)
    with pytest.raises(StoreError, match=words):
        extract(target, CONFIG, table, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_damaged_record_is_not_overwritten_on_a_guess(tmp_path, target, table):
    out = tmp_path / "store"
    extract(target, CONFIG, table, out)
    (out / "shard-00002.json").write_text("{")
    before = contents(out)
    with pytest.raises(StoreError, match=r"shard-00002\.json is not valid JSON.*store repair"):
        extract(target, CONFIG, table, out)
    assert contents(out) == before
