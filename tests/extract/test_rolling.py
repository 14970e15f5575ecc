"""Rolling extraction with real readers: bounded, complete, restartable on both sides."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from drafttrain.data.consumers import Consumer, read_consumers, report_consumer
from drafttrain.data.errors import StoreError
from drafttrain.data.rolling_reader import RollingStore
from drafttrain.data.samples import read_table
from drafttrain.data.store_format import HEAD_NAME
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.stream import Stream
from drafttrain.extract.rolling import rolling_worker
from drafttrain.extract.window import Window
from drafttrain.extract.worker import extract

from .factory import CONFIG, LENGTHS, make_table, make_target

EPOCHS, STEP, SEED = 9, 4, 5
POSITIONS = EPOCHS * len(LENGTHS)
BUDGET = 160_000  # the head, 32 KB of small files, and three of 63 shards
ROLLING = CONFIG.model_copy(
    update={"features": "rolling", "budget": f"{BUDGET}B", "claim_expiry_s": 2}
)


@pytest.fixture(scope="module")
def table(tmp_path_factory, target) -> Path:
    return make_table(tmp_path_factory.mktemp("table") / "train.parquet", LENGTHS)


def roll(target, config, table: Path, folder: Path, positions: int = POSITIONS) -> None:
    rolling_worker(target, config, table, folder, seed=SEED, positions=positions, step=STEP).roll()


STARTED: list["Extraction"] = []


class Extraction(threading.Thread):
    """Extraction in the background, as another process would run it."""

    def __init__(self, target, table: Path, folder: Path, **changes) -> None:
        super().__init__(daemon=True)
        self._run = (target, ROLLING.model_copy(update=changes), table, folder)
        self.failure: BaseException | None = None
        STARTED.append(self)
        self.start()

    def run(self) -> None:
        try:
            roll(*self._run)
        except BaseException as exc:
            self.failure = exc

    def finish(self) -> None:
        self.join(60)
        assert not self.is_alive() and self.failure is None, self.failure


class Watch(threading.Thread):
    """The largest size that a folder was seen with."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.largest, self.samples, self.ended = folder, 0, 0, False
        self.start()

    def run(self) -> None:
        while not self.ended:
            total = 0
            for path in self.folder.glob("*"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    total += 0
            self.largest, self.samples = max(self.largest, total), self.samples + 1
            time.sleep(0.002)

    def stop(self) -> int:
        self.ended = True
        self.join()
        assert self.samples > 20
        return self.largest


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"nothing happened for a minute: {STARTED[-1].failure}"
        time.sleep(0.02)


def reader(folder: Path, table: Path, name: str = "run", positions: int = POSITIONS):
    stream = Stream(read_table(table), SEED, positions)
    return RollingStore(folder, stream, "drafttrain extract", name, "")


def opened(folder: Path, table: Path, name: str = "run") -> RollingStore:
    wait_until(lambda: (folder / "store.json").exists())
    return reader(folder, table, name)


def read_all(store: RollingStore, begin: int = 0, end: int = POSITIONS) -> list:
    found = []
    for start in range(begin, end, STEP):
        positions = range(start, start + STEP)
        store.wait(positions)
        for position in positions:
            sample = store.sample(position)
            found.append((sample.sample_id, sample.taps.clone(), sample.final.clone()))
        store.release(start + STEP)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory, target, table) -> list:
    """What training reads from a whole store of the same samples, position by position."""
    store = extract(target, CONFIG, table, tmp_path_factory.mktemp("whole"))
    order = Stream(read_table(table), SEED, POSITIONS)
    by_id = {store.index(i).sample_id: i for i in range(len(store))}
    samples = [store.sample(by_id[order[p].sample_id]) for p in range(POSITIONS)]
    return [(sample.sample_id, sample.taps, sample.final) for sample in samples]


def assert_same(found: list, expected: list) -> None:
    assert [entry[0] for entry in found] == [entry[0] for entry in expected]
    for (_, taps, final), (_, wanted, wanted_final) in zip(found, expected, strict=True):
        assert torch.allclose(taps, wanted, atol=1e-4, rtol=1e-4)
        assert torch.allclose(final, wanted_final, atol=1e-4, rtol=1e-4)


def shards_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("shard-*.json"))


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
    report_consumer(tmp_path, "one", Consumer(POSITIONS, POSITIONS), "")
    report_consumer(tmp_path, "two", Consumer(POSITIONS, POSITIONS), "")
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
    report_consumer(tmp_path, "run", Consumer(POSITIONS, POSITIONS), "")
    extraction.finish()


def test_the_window_of_the_tests_is_small(target, table, tmp_path):
    """Guards the other tests: the budget holds a few of many shards."""
    extraction = Extraction(target, table, tmp_path)
    store = opened(tmp_path, table)
    stream = Stream(read_table(table), SEED, POSITIONS)
    from drafttrain.data.store_format import plan_shards

    shards = plan_shards(stream.lengths, store.meta.shard_tokens)
    head = (tmp_path / HEAD_NAME).stat().st_size
    window = Window(store.meta, shards, BUDGET, head, STEP)
    sizes = [len(window.at(position)) for position in range(POSITIONS)]
    assert max(sizes) <= len(shards) // 5 and np.mean(sizes) >= 2
    report_consumer(tmp_path, "run", Consumer(POSITIONS, POSITIONS), "")
    extraction.finish()
