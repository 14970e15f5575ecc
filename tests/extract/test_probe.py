"""The timed extraction: real samples in the table's own mix, through the real engine."""

import numpy as np
import pytest

from drafttrain.data.samples import read_table
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract import probe
from drafttrain.extract.probe import probe_extraction, spread_samples

from .factory import CONFIG, LENGTHS


def test_a_sample_of_the_table_has_its_length_mix():
    lengths = np.random.default_rng(0).lognormal(6, 1, 5000).astype(np.int64) + 1
    picked = spread_samples(lengths, 40 * int(lengths.mean()))
    assert len(set(picked)) == 40 and list(picked) == sorted(picked)
    for share in (0.1, 0.5, 0.9):
        mix = np.quantile(lengths[picked], share)
        assert mix == pytest.approx(np.quantile(lengths, share), rel=0.1)
    assert list(spread_samples(lengths, 1)) == [np.argsort(lengths, kind="stable")[2500]]
    assert len(spread_samples(lengths, int(lengths.sum()) * 3)) == len(lengths)


def test_the_rate_is_tokens_over_the_time_of_the_second_pass(tmp_path, target, table, monkeypatch):
    """Every call of the clock takes as long as the work before it: 2 s a shard, 5 s a call."""
    now = 0.0
    real = probe.extract

    def slow(*args):
        nonlocal now
        before = len(list(args[3].glob("shard-*.json")))
        store = real(*args)
        now += 5 + 2 * (len(list(args[3].glob("shard-*.json"))) - before)
        return store

    monkeypatch.setattr(probe, "extract", slow)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now)
    folders = (tmp_path / "samples", tmp_path / "store")
    rate = probe_extraction(target, CONFIG, read_table(table), folders, seconds=1000)
    store = FeatureStore(tmp_path / "store")
    assert store.num_tokens == sum(LENGTHS)
    assert rate == pytest.approx(sum(LENGTHS) / (2 * store.meta.num_shards))


def test_the_time_asked_for_decides_how_much_is_extracted(tmp_path, target, table, monkeypatch):
    real = probe._timed
    monkeypatch.setattr(probe, "_timed", lambda *args: real(*args) and 100.0)
    folders = (tmp_path / "samples", tmp_path / "store")
    assert probe_extraction(target, CONFIG, read_table(table), folders, seconds=0.6) > 0
    assert 30 <= FeatureStore(tmp_path / "store").num_tokens <= 90
