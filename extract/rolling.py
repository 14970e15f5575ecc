"""Rolling extraction: a training stream and a budget -> shards that appear ahead and vanish behind.

    readers' positions -> window of shards -> what lies outside goes, what is missing inside comes

Any number of workers on any machines run the same command, as for a whole store. Guarantee: the
store's files never take more than the budget; a shard in the window of the slowest reader is there
sooner or later, also again when a reader was killed and goes back; shards are those that a whole
store of the stream would have. Ends when every reader is done. Cost: one target forward per token
and epoch, and again for what a reader that went back needs again.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from drafttrain.data.consumers import read_consumers
from drafttrain.data.samples import read_table
from drafttrain.data.sizes import human_bytes
from drafttrain.data.store_format import Shard
from drafttrain.data.stream import Stream

from .claims import Claims
from .config import ExtractConfig
from .head import head_bytes
from .opening import STORE_UNIT, check_samples
from .settings import store_settings
from .target import Target
from .window import Window
from .worker import Worker

_LOGGER = logging.getLogger(__name__)


class RollingWorker(Worker):
    """One worker's part in a rolling store.

    Args:
        target: the frozen target.
        config: what to take, how to store it, and the budget.
        stream: the samples in training order.
        out_dir: the store's folder.
        step: positions that a training step needs at the same time.

    Raises:
        StoreError: the budget is too small.
    """

    def __init__(
        self, target: Target, config: ExtractConfig, stream: Stream, out_dir: Path, step: int
    ) -> None:
        super().__init__(target, config, stream, out_dir)
        meta = store_settings(target, config, stream, "")
        self._window = Window(meta, self._shards, config.budget_bytes, head_bytes(target), step)
        self._window.check()
        self._claims: Claims
        self._position = 0

    def roll(self) -> None:
        """Extract until every reader is done.

        Raises:
            StoreError: as ``worker.extract``.
        """
        with self._opened() as (meta, claims):
            self._claims = claims
            claims.sweep({STORE_UNIT})
            _LOGGER.info(
                "%s: %s tokens in %d shards roll through %s: training can start",
                self._out_dir,
                f"{int(self._table.lengths.sum()):,}",
                len(self._shards),
                human_bytes(self._config.budget_bytes),
            )
            self._extract(meta, claims)
            self._empty(range(0))

    def _unfinished(self) -> bool:
        """Look where the readers are, move the window, and list what is missing in it."""
        consumers = read_consumers(self._out_dir)
        waiting = [c.position for c in consumers.values() if not c.done]
        everyone = len(consumers) >= self._config.consumers
        if everyone and not waiting:
            self._position = len(self._table)
            return False
        # Who has not reported yet begins at the start.
        self._position = min(waiting) if everyone else 0
        window = self._window.at(self._position)
        self._empty(window)
        missing = [i for i in window if not (self._out_dir / self._shards[i].record).exists()]
        self._pending = {i: self._shards[i] for i in missing}
        self._progress.remaining(self._window.tokens_left(window, missing))
        return True

    def _candidates(self) -> Iterator[Shard]:
        """The first missing shard nobody works on, looked for anew each time."""
        tried: set[int] = set()
        while self._unfinished():
            shard = next((s for i, s in self._pending.items() if i not in tried), None)
            if shard is None:
                return
            tried.add(shard.index)
            yield shard

    def _admit(self, shard: Shard) -> bool:
        """Whether a claimed shard fits beside all that lie here or are being written.

        All workers agree on the window, and the window fits, so this fails only while a worker
        still holds a shard from before a reader went back; that worker drops it in ``_keep``.
        """
        held = {shard.index}
        for path in (*self._out_dir.glob("shard-*.claim"), *self._out_dir.glob("shard-*.json")):
            number = path.stem.removeprefix("shard-").removesuffix(".taking")
            held.add(int(number))
        return self._keep(shard) and self._window.bytes_of(held) <= self._window.room

    def _keep(self, shard: Shard) -> bool:
        return shard.index in self._window.at(self._position)

    def _empty(self, window: range) -> None:
        """Remove everything that is not in a window, the record first: without it there is none."""
        stems = {self._shards[i].stem for i in window}
        for record in self._out_dir.glob("shard-*.json"):
            if record.stem not in stems:
                record.unlink(missing_ok=True)
        for path in self._out_dir.glob("shard-*.*"):
            unit = path.name.split(".")[0]
            if unit in stems:
                continue
            # What a living worker is at is left to it; a dead one's is taken and removed.
            if self._claims.take(unit):
                for name in self._files(unit):
                    (self._out_dir / name).unlink(missing_ok=True)
                self._claims.drop(unit)

    @staticmethod
    def _files(unit: str) -> tuple[str, ...]:
        shard = Shard.named(int(unit.removeprefix("shard-")))
        return shard.record, shard.parquet, shard.states


def rolling_worker(
    target: Target,
    config: ExtractConfig,
    table_path: Path,
    out_dir: Path,
    *,
    seed: int,
    positions: int,
    step: int,
) -> RollingWorker:
    """A worker for a training stream, checked as far as it can be before anything is written.

    Args:
        target: the frozen target.
        config: what to take, how to store it, and the budget.
        table_path: a finished sample table.
        out_dir: the store's folder; made if absent.
        seed: of the training order.
        positions: of the whole training.
        step: positions that a training step needs at the same time.

    Raises:
        StoreError: table and target do not fit, or the budget is too small.
        TargetError: the taps do not fit.
        DataError: the table is missing or damaged.
    """
    table = read_table(table_path)
    check_samples(table, target, table_path)
    return RollingWorker(target, config, Stream(table, seed, positions), out_dir, step)
