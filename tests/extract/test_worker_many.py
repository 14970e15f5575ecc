"""Several workers on one store: shares, waiting, taking over, and few files."""

import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_format import plan_shards
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract import opening
from drafttrain.extract.claims import Claims
from drafttrain.extract.engine import Engine
from drafttrain.extract.worker import Share, extract, extract_share

from .factory import CONFIG, LENGTHS, NUM_SHARDS, contents, count_forwards, make_table, make_target

SHARDS = plan_shards(LENGTHS, CONFIG.shard_tokens)
PLAIN = {"shard_tokens": 1000, "batch_tokens": 4096}


@pytest.fixture
def whole(tmp_path, target, table):
    """The undisturbed store."""
    extract(target, CONFIG, table, tmp_path / "whole")
    return tmp_path / "whole"


def finish(whole: Path, out: Path, shard: int) -> None:
    """Seal a shard as another worker does."""
    for path in sorted(whole.glob(f"shard-{shard:05d}.*"), key=lambda path: path.suffix == ".json"):
        shutil.copy(path, out / path.name)


def lengths_of(*shards: int) -> list[int]:
    return sorted(n for i in shards for n in LENGTHS[SHARDS[i].first : SHARDS[i].stop])


@pytest.mark.parametrize("workers", [2, 3, NUM_SHARDS + 1])
def test_shares_are_disjoint_and_wait_for_nobody(
    tmp_path, target, table, whole, monkeypatch, caplog, workers
):
    out = tmp_path / "store"
    seen = count_forwards(monkeypatch)
    with caplog.at_level(logging.INFO, logger="drafttrain.extract"):
        for worker in reversed(range(workers)):
            seen.clear()
            left = extract_share(target, CONFIG, table, out, Share(worker, workers))
            assert sorted(seen) == lengths_of(*range(worker, NUM_SHARDS, workers))
            assert left == NUM_SHARDS - len(list(out.glob("shard-*.json")))
            if left:
                assert f"{left} shards are left to other workers" in caplog.messages[-1]
                with pytest.raises(StoreError, match="extraction has not finished"):
                    FeatureStore(out)
    assert left == 0
    assert contents(out) == contents(whole)


def test_a_worker_waits_for_another_one_and_says_so(
    tmp_path, target, table, whole, monkeypatch, caplog
):
    """What the other has sealed meanwhile is not computed again (fault kind 31)."""
    out = tmp_path / "store"
    out.mkdir()
    seen = count_forwards(monkeypatch)
    other = Claims(out, 60)
    assert other.take("shard-00002") and other.take("shard-00005")
    store = []
    worker = threading.Thread(
        target=lambda: store.append(extract(target, CONFIG, table, out)), daemon=True
    )
    with caplog.at_level(logging.INFO, logger="drafttrain.extract"):
        worker.start()
        _until(lambda: "waiting for process" in caplog.text)
        assert f"waiting for process {os.getpid()} on " in caplog.text
        assert caplog.text.count("(shard-00002, shard-00005)") == 1
        for shard in (2, 5):
            finish(whole, out, shard)
            other.release(f"shard-{shard:05d}")
        worker.join(60)
    assert len(store[0]) == len(LENGTHS)
    assert sorted(seen) == lengths_of(0, 1, 3, 4, 6)
    assert contents(out) == contents(whole)


def test_a_shard_sealed_just_before_it_is_claimed_is_left_alone(
    tmp_path, target, table, whole, monkeypatch
):
    """(fault kind 31)"""
    out = tmp_path / "store"
    seen = count_forwards(monkeypatch)
    real = Claims.take

    def take(claims, unit):
        if unit == "shard-00002" and not (out / "shard-00002.json").exists():
            finish(whole, out, 2)
        return real(claims, unit)

    monkeypatch.setattr(Claims, "take", take)
    extract(target, CONFIG, table, out)
    assert sorted(seen) == lengths_of(0, 1, 3, 4, 5, 6)
    assert contents(out) == contents(whole)


def test_a_shard_given_back_by_a_failed_worker_is_done_by_the_next(tmp_path, target, table, whole):
    out = tmp_path / "store"
    out.mkdir()
    other = Claims(out, 60)
    assert other.take("shard-00003")
    worker = threading.Thread(target=lambda: extract(target, CONFIG, table, out), daemon=True)
    worker.start()
    _until(lambda: len(list(out.glob("shard-*.json"))) == NUM_SHARDS - 1)
    time.sleep(0.2)
    assert worker.is_alive() and not (out / "shard-00003.json").exists()
    other.release("shard-00003")
    worker.join(60)
    assert contents(out) == contents(whole)


def test_what_a_worker_has_lost_it_does_not_write(
    tmp_path, target, table, whole, monkeypatch, caplog
):
    """It stood still for long while another one took over; its own states are other ones here."""
    out = tmp_path / "store"
    other = Claims(out, 60)
    real = Engine.features

    def stalled(engine, groups, batch_tokens):
        for item in real(engine, groups, batch_tokens):
            if item.group == 1:
                if not other.holds_any:
                    os.utime(out / "shard-00001.claim", (0, 0))
                    other.holds_any = other.take("shard-00001")
                item = item._replace(taps=item.taps.map(lambda part: part + 1))
            yield item

    other.holds_any = False
    monkeypatch.setattr(Engine, "features", stalled)
    worker = threading.Thread(target=lambda: extract(target, CONFIG, table, out), daemon=True)
    with caplog.at_level(logging.INFO, logger="drafttrain.extract"):
        worker.start()
        _until(lambda: "shard-00001 was taken over by another worker" in caplog.text)
        _until(lambda: not list(out.glob("shard-00001.*.tmp")))
        finish(whole, out, 1)
        other.release("shard-00001")
        worker.join(60)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("expiry_s", [0.3, 60])
def test_the_recipe_says_how_long_a_silent_worker_keeps_its_shards(
    tmp_path, target, table, whole, expiry_s
):
    out = tmp_path / "store"
    out.mkdir()
    assert Claims(out, 60).take("shard-00004")  # never renewed
    config = CONFIG.model_copy(update={"claim_expiry_s": expiry_s})
    worker = threading.Thread(target=lambda: extract(target, config, table, out), daemon=True)
    worker.start()
    worker.join(4)
    assert worker.is_alive() == (expiry_s == 60)
    if worker.is_alive():
        (out / "shard-00004.claim").unlink()
        worker.join(60)
    assert contents(out) == contents(whole)


def test_workers_that_begin_together_make_one_store_or_refuse(tmp_path, table):
    """One makes head and settings; another one with other settings is told so."""
    out, errors = tmp_path / "store", []
    taps = [[0, 2, 4], [0, 2, 4], [0, 2, 3]]
    targets = [make_target("qwen3") for _ in taps]
    barrier = threading.Barrier(len(taps))

    def work(target, taps):
        config = CONFIG.model_copy(update={"taps": taps})
        barrier.wait()
        try:
            extract(target, config, table, out)
        except StoreError as exc:
            errors.append(str(exc))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(targets, taps, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stored = FeatureStore(out)
    verify_store(out)
    assert len(errors) == taps.count([0, 2, 3] if stored.meta.taps == [0, 2, 4] else [0, 2, 4])
    assert all("holds a store of other settings" in error for error in errors)


def test_who_stood_still_while_making_a_store_compares_with_the_one_made(
    tmp_path, target, table, monkeypatch
):
    """Its settings are other ones: they must not get over those of finished shards."""
    out, other = tmp_path / "store", CONFIG.model_copy(update={"taps": [1]})
    real = opening.capture_head

    def stalled(target):
        monkeypatch.undo()
        os.utime(out / "store.claim", (0, 0))
        extract(target, other, table, out)
        return real(target)

    monkeypatch.setattr(opening, "capture_head", stalled)
    with pytest.raises(StoreError, match=r"other settings \(taps \[1\] there, \[0, 2, 4\] now\)"):
        extract(target, CONFIG, table, out)
    assert FeatureStore(out).meta.taps == [1]
    verify_store(out)
    assert not list(out.glob("*.tmp")) and not list(out.glob("*.claim"))


def test_many_samples_make_few_files_and_few_of_them_are_opened(tmp_path, target):
    """(fault kind 36)"""
    opened: list[str] = []
    out = tmp_path / "store"

    def watch(event, given):
        if event == "open" and listening and str(given[0]).startswith(str(out)):
            opened.append(str(given[0]))

    listening = True
    sys.addaudithook(watch)
    table = make_table(tmp_path / "t.parquet", [3] * 1000)
    config = CONFIG.model_copy(update=PLAIN)
    extract(target, config, table, out)
    listening = False
    shards = 4  # 333 samples of 3 tokens each, and one
    assert len(list(out.iterdir())) == 3 * shards + 2
    assert shards * 3 < len(opened) < shards * 40


def test_a_reader_may_look_at_a_store_that_is_being_written(tmp_path, target, table, monkeypatch):
    """At any moment it is incomplete or whole, never wrong (fault kind 33)."""
    out, seen, stop = tmp_path / "store", set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                verify_store(out)
                seen.add("whole")
            except StoreError as exc:
                seen.add("incomplete" if _unfinished(str(exc)) else str(exc))

    reader = threading.Thread(target=read)
    reader.start()
    extract(target, CONFIG, table, out)
    _until(lambda: "whole" in seen)
    stop.set()
    reader.join()
    assert seen == {"incomplete", "whole"}


def _unfinished(message: str) -> bool:
    return any(
        words in message
        for words in (
            "not a feature store",
            "store.json does not exist",
            "has not finished",
            "head.safetensors: is missing",
        )
    )


def _until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.005)


def test_the_target_is_used_by_one_thread(tmp_path, target, table, monkeypatch):
    """The stages behind the engine leave the device to it."""
    threads = set()
    real = torch.nn.Module.__call__
    monkeypatch.setattr(
        type(target.decoder), "__call__",
        lambda *given, **named: (threads.add(threading.get_ident()), real(*given, **named))[1],
    )  # fmt: skip
    extract(target, CONFIG, table, tmp_path / "store")
    assert threads == {threading.get_ident()}
