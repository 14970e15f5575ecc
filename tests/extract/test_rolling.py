"""Rolling extraction with real readers: bounded, complete, restartable on both sides."""

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from drafttrain.data.consumers import Consumer, read_consumers, report_consumer
from drafttrain.data.errors import StoreError
from drafttrain.data.rolling_reader import RollingStore
from drafttrain.data.samples import read_table
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_format import HEAD_NAME, plan_shards
from drafttrain.data.store_info import summarise_store
from drafttrain.data.store_merge import merge_stores
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.stream import Stream
from drafttrain.extract.owners import new_owner
from drafttrain.extract.window import Window
from drafttrain.extract.worker import extract
from drafttrain.store_view import show_summary

from .factory import CONFIG, LENGTHS, make_table, make_target
from .rolling import (
    BUDGET,
    POSITIONS,
    ROLLING,
    SEED,
    STEP,
    Extraction,
    Watch,
    assert_same,
    opened,
    read_all,
    reader,
    roll,
    shards_in,
    wait_until,
)


@pytest.fixture(scope="module")
def table(tmp_path_factory, target) -> Path:
    return make_table(tmp_path_factory.mktemp("table") / "train.parquet", LENGTHS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, target, table) -> list:
    """What training reads from a whole store of the same samples, position by position."""
    store = extract(target, CONFIG, table, tmp_path_factory.mktemp("whole"))
    order = Stream(read_table(table), SEED, POSITIONS)
    by_id = {store.index(i).sample_id: i for i in range(len(store))}
    samples = [store.sample(by_id[order[p].sample_id]) for p in range(POSITIONS)]
    return [(sample.sample_id, sample.taps, sample.final) for sample in samples]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reader_gets_the_whole_store_through_a_small_budget(
    target, table, tmp_path, expected, workers
):
    extractions = [Extraction(target, table, tmp_path)]
    store = opened(tmp_path, table)
    watch = Watch(tmp_path)
    if workers == 2:
        extractions.append(Extraction(make_target("qwen3"), table, tmp_path))
    assert_same(read_all(store), expected)
    for extraction in extractions:
        extraction.finish()
    assert watch.stop() <= BUDGET
    assert not list(tmp_path.glob("shard-*")), "a finished run leaves no shards behind"
    # The control: the shards of the whole stream together are several times the budget.
    assert store.meta.num_tokens * store.meta.bytes_per_token() > 5 * BUDGET


def test_a_reader_that_goes_back_finds_its_shards_again(target, table, tmp_path, expected):
    extraction = Extraction(target, table, tmp_path)
    watch_from = opened(tmp_path, table)
    watch = Watch(tmp_path)
    assert_same(read_all(watch_from, end=24), expected[:24])
    gone = shards_in(tmp_path)
    del watch_from  # killed, and started again from an early checkpoint
    again = reader(tmp_path, table)
    again.release(4)
    assert_same(read_all(again, begin=4), expected[4:])
    extraction.finish()
    assert watch.stop() <= BUDGET and "shard-00000" not in gone


def test_extraction_that_is_killed_and_started_again_goes_on(target, table, tmp_path, expected):
    """The first one ends in the middle: its thread fails at a chosen shard."""
    from drafttrain.extract import pipeline

    class Killed(BaseException):
        pass

    seal, count = pipeline.ShardBuffer.seal, [0]

    def dying(self, *arguments):
        count[0] += 1
        if count[0] == 5:
            raise Killed
        return seal(self, *arguments)

    pipeline.ShardBuffer.seal = dying
    try:
        first = Extraction(target, table, tmp_path)
        store = opened(tmp_path, table)
        found = read_all(store, end=4)
        first.join(60)
        assert isinstance(first.failure, Killed)
    finally:
        pipeline.ShardBuffer.seal = seal
    second = Extraction(target, table, tmp_path)
    found += read_all(store, begin=4)
    second.finish()
    assert_same(found, expected)


def test_shards_stay_until_every_consumer_is_past_them(target, table, tmp_path, expected):
    extraction = Extraction(target, table, tmp_path, consumers=2)
    slow, fast = opened(tmp_path, table, "slow"), opened(tmp_path, table, "fast")
    slow.release(0)
    read_all(fast, end=4)  # further than one step it may have to wait for the slow one
    for _ in range(20):
        assert "shard-00000" in shards_in(tmp_path)
        time.sleep(0.02)
    assert_same(read_all(slow, end=8), expected[:8])
    wait_until(lambda: "shard-00000" not in shards_in(tmp_path))
    behind = threading.Thread(target=lambda: read_all(slow, begin=8), daemon=True)
    behind.start()
    assert_same(read_all(fast, begin=4), expected[4:])
    behind.join(60)
    extraction.finish()
    assert all(consumer.done for consumer in read_consumers(tmp_path).values())


def test_nothing_is_released_before_all_consumers_have_come(target, table, tmp_path):
    extraction = Extraction(target, table, tmp_path, consumers=2)
    read_all(opened(tmp_path, table, "one"), end=4)
    time.sleep(0.3)
    assert "shard-00000" in shards_in(tmp_path)
    report_consumer(tmp_path, "one", Consumer(POSITIONS, POSITIONS), new_owner())
    report_consumer(tmp_path, "two", Consumer(POSITIONS, POSITIONS), new_owner())
    extraction.finish()


def test_what_does_not_fit_together_is_refused(target, table, tmp_path):
    with pytest.raises(StoreError, match="nothing was extracted yet: start `drafttrain extract`"):
        reader(tmp_path, table)
    small = ROLLING.model_copy(update={"budget": "50KB"})
    with pytest.raises(StoreError, match=r"extract\.budget 50\.0 KB is too small"):
        roll(target, small, table, tmp_path)
    assert not list(tmp_path.iterdir()), "refused before anything is written"
    extraction = Extraction(target, table, tmp_path)
    read_all(opened(tmp_path, table))
    extraction.finish()
    with pytest.raises(StoreError, match="is a rolling store"):
        FeatureStore(tmp_path)
    with pytest.raises(StoreError, match=r"108 samples there, 112 are to be trained on"):
        reader(tmp_path, table, positions=POSITIONS + 4)
    stream = Stream(read_table(table), SEED + 1, POSITIONS)
    with pytest.raises(StoreError, match="seed 5 there, 6 here"):
        RollingStore(tmp_path, stream, "drafttrain extract", None, "")
    with pytest.raises(StoreError, match="holds a store of other settings"):
        roll(target, ROLLING, table, tmp_path, POSITIONS + 4)
    (tmp_path / "consumer-x.json").write_text('{"position": "far"}')
    with pytest.raises(StoreError, match=r"consumer-x\.json holds .* not a position: remove it"):
        read_consumers(tmp_path)


def test_a_damaged_shard_is_an_error_and_not_a_wait(target, table, tmp_path):
    extraction = Extraction(target, table, tmp_path)
    store = opened(tmp_path, table)
    wait_until(lambda: "shard-00001" in shards_in(tmp_path))
    path = tmp_path / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"shard-00001\.safetensors.*have changed"):
        read_all(store)
    report_consumer(tmp_path, "run", Consumer(POSITIONS, POSITIONS), new_owner())
    extraction.finish()


def test_the_window_of_the_tests_is_small(target, table, tmp_path):
    """Guards the other tests: the budget holds a few of many shards."""
    extraction = Extraction(target, table, tmp_path)
    store = opened(tmp_path, table)
    stream = Stream(read_table(table), SEED, POSITIONS)
    shards = plan_shards(stream.lengths, store.meta.shard_tokens)
    head = (tmp_path / HEAD_NAME).stat().st_size
    window = Window(store.meta, shards, BUDGET, head, STEP)
    sizes = [len(window.at(position)) for position in range(POSITIONS)]
    assert max(sizes) <= len(shards) // 5 and np.mean(sizes) >= 2
    report_consumer(tmp_path, "run", Consumer(POSITIONS, POSITIONS), new_owner())
    extraction.finish()


def test_verify_and_info_know_that_shards_come_and_go(target, table, tmp_path):
    extraction = Extraction(target, table, tmp_path)
    store = opened(tmp_path, table)
    read_all(store, end=8)

    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    def settled() -> bool:
        before = names()
        time.sleep(0.5)
        shards = shards_in(tmp_path)
        return names() == before and len(shards) > 1 and shards[0] > "shard-00000"

    wait_until(settled)
    # A copy: nobody makes a damaged shard again there.
    folder = tmp_path.with_name(f"{tmp_path.name}-copy")
    shutil.copytree(tmp_path, folder)
    check = verify_store(folder)
    assert check.whole and 0 not in check.whole
    console = Console(width=120)
    with console.capture() as shown:
        console.print(show_summary(summarise_store(folder)))
    assert "in the training order of seed 5" in shown.get()
    assert f"of {POSITIONS} samples" in shown.get() and "missing" not in shown.get()
    with pytest.raises(StoreError, match="is a rolling store, whose shards come and go"):
        merge_stores(folder / "merged", [folder])
    path = max(folder.glob("shard-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=path.name):
        verify_store(folder)
    report_consumer(tmp_path, "run", Consumer(POSITIONS, POSITIONS), new_owner())
    extraction.finish()
