"""Rolling extractions and their readers in threads, and what to look at meanwhile."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drafttrain.data.rolling_reader import RollingStore
from drafttrain.data.samples import read_table
from drafttrain.data.stream import Stream
from drafttrain.extract.owners import new_owner
from drafttrain.extract.rolling import rolling_worker

from .factory import CONFIG, LENGTHS

EPOCHS, STEP, SEED = 9, 4, 5
POSITIONS = EPOCHS * len(LENGTHS)
BUDGET = 160_000  # the head, 32 KB of small files, and three of 63 shards
ROLLING = CONFIG.model_copy(
    update={"features": "rolling", "budget": f"{BUDGET}B", "claim_expiry_s": 2}
)


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
    return RollingStore(folder, stream, "drafttrain extract", name, new_owner())


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


def assert_same(found: list, expected: list) -> None:
    assert [entry[0] for entry in found] == [entry[0] for entry in expected]
    for (_, taps, final), (_, wanted, wanted_final) in zip(found, expected, strict=True):
        assert torch.allclose(taps, wanted, atol=1e-4, rtol=1e-4)
        assert torch.allclose(final, wanted_final, atol=1e-4, rtol=1e-4)


def shards_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("shard-*.json"))
