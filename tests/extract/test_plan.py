"""The forecast of a store against the store that extraction then writes."""

import pytest

from drafttrain.data.codec import CODECS
from drafttrain.data.errors import StoreError, TargetError
from drafttrain.data.samples import read_table
from drafttrain.extract.config import ExtractConfig, TargetConfig
from drafttrain.extract.plan import plan_store, read_shape, store_bytes, store_layout
from drafttrain.extract.target import load_target
from drafttrain.extract.worker import extract

from .factory import make_table, save_target

LENGTHS = [100, 37, 90, 120, 64, 11, 128, 70] * 8
WIDTH = 128  # wide enough that states outweigh ids, as in any real target


def bytes_of(folder) -> int:
    """What lies in a finished store, locks aside."""
    return sum(path.stat().st_size for path in files_of(folder))


def files_of(folder) -> list:
    return [p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> TargetConfig:
    """A saved target, embedding and head apart."""
    folder = save_target(
        tmp_path_factory.mktemp("wide"), hidden_size=WIDTH, tie_word_embeddings=False
    )
    return TargetConfig(path=str(folder), dtype="float32")


@pytest.mark.parametrize("final_hidden", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_forecast_is_within_one_percent_of_what_is_written(tmp_path, wide, codec, final_hidden):
    """(fault kind 34)"""
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    config = ExtractConfig(taps=3, codec=codec, final_hidden=final_hidden, shard_tokens=2500)
    plan = plan_store(read_shape(wide), config, read_table(table), tmp_path / "store")
    assert (plan.tokens, plan.tokens_done, plan.bytes_done) == (sum(LENGTHS), 0, 0)
    store = extract(load_target(wide), config, table, tmp_path / "store")
    assert store.meta.num_shards == 2
    assert plan.bytes_left == pytest.approx(bytes_of(tmp_path / "store"), rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_the_heads_size_is_the_files(tmp_path, tied):
    folder = save_target(tmp_path / "target", hidden_size=WIDTH, tie_word_embeddings=tied)
    config = TargetConfig(path=str(folder), dtype="bfloat16")
    table = make_table(tmp_path / "t.parquet", [20])
    extract(load_target(config), ExtractConfig(taps=1), table, tmp_path / "store")
    header = 512  # names and shapes
    size = (tmp_path / "store" / "head.safetensors").stat().st_size
    assert 0 < size - read_shape(config).head_bytes() < header


def test_what_is_sealed_is_not_to_be_written_again(tmp_path, wide):
    """(fault kind 34)"""
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    config = ExtractConfig(taps=3, shard_tokens=700)
    out, samples, shape = tmp_path / "store", read_table(table), read_shape(wide)
    fresh = plan_store(shape, config, samples, out)
    extract(load_target(wide), config, table, out)
    whole = plan_store(shape, config, samples, out)
    assert (whole.tokens_done, whole.bytes_left) == (sum(LENGTHS), 0)
    for name in ("shard-00001.json", "shard-00003.json"):
        (out / name).unlink()
    half = plan_store(shape, config, samples, out)
    assert 0 < half.tokens_done < half.tokens == fresh.tokens
    missing = half.tokens - half.tokens_done
    assert half.bytes_left == store_bytes(store_layout(shape, config, samples), missing)
    assert half.bytes_done + half.bytes_left == pytest.approx(whole.bytes_done, rel=0.02)
    (out / "head.safetensors").unlink()
    headless = plan_store(shape, config, samples, out)
    assert headless.bytes_left == half.bytes_left + shape.head_bytes()


def test_a_store_of_other_settings_is_named_now_not_after_loading_the_target(tmp_path, wide):
    """(fault kind 42)"""
    table = make_table(tmp_path / "t.parquet", [20, 30])
    config = ExtractConfig(taps=[1, 3], codec="fp32")
    extract(load_target(wide), config, table, tmp_path / "store")
    for change, words in (
        ({"codec": "bf16"}, "codec fp32 there, bf16 now"),
        ({"taps": [1, 2]}, r"taps \[1, 3\] there, \[1, 2\] now"),
        ({"shard_tokens": 9}, "shard_tokens 65536 there, 9 now"),
    ):
        with pytest.raises(StoreError, match=words):
            other = config.model_copy(update=change)
            plan_store(read_shape(wide), other, read_table(table), tmp_path / "store")


def test_files_follow_shards_not_samples(tmp_path, wide):
    """(fault kind 36): a thousand samples, five files."""
    config = ExtractConfig(taps=1)
    many = make_table(tmp_path / "many.parquet", [9] * 1000)
    plan = plan_store(read_shape(wide), config, read_table(many), tmp_path / "store")
    assert plan.files == 5
    table = make_table(tmp_path / "t.parquet", LENGTHS)
    small = config.model_copy(update={"shard_tokens": 700})
    plan = plan_store(read_shape(wide), small, read_table(table), tmp_path / "store")
    extract(load_target(wide), small, table, tmp_path / "store")
    assert plan.files == len(files_of(tmp_path / "store"))


def test_a_target_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="configuration cannot be read"):
        read_shape(TargetConfig(path=str(tmp_path), dtype="float32"))
