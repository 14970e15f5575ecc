"""Read a rolling store: position of the training stream -> sample with its states.

Shards appear while extraction runs ahead and vanish when every consumer is past them. Guarantee: a
sample is given only from a sealed shard of this store, checked as in a whole store; what is not
there yet is waited for, with a line in the log that says for what. Memory: the maps of the shards
that one step needs; they are closed before a position is reported as done, so that the disk is
free when extraction removes the files. Ids and masks come from the sample table.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .consumers import Consumer, report_consumer
from .errors import StoreError
from .read_ahead import ReadAhead
from .shard_states import ShardStates
from .store_format import META_NAME, Shard, StoreMeta, plan_shards, read_meta
from .store_reader import StoredSample, stored_sample
from .store_shard import checked_head, read_checked_record
from .stream import Stream

_POLL_S = 0.2
_SAY_EVERY_S = 30.0
_LOGGER = logging.getLogger(__name__)


class RollingStore:
    """One reader of a rolling store.

    Args:
        folder: the store.
        stream: the samples in training order.
        command: what fills the store, for messages.
        consumer: the name under which to say how far this reader is; None says nothing (all ranks
            but one of a run).
        owner: of temporary files.
        final: False leaves the final hidden states unread, as if the store had none.

    Attributes:
        meta: the store's settings.

    Raises:
        StoreError: it does not exist yet, or is of another order, table or length.
    """

    def __init__(
        self,
        folder: Path,
        stream: Stream,
        command: str,
        consumer: str | None,
        owner: str,
        final: bool = True,
    ) -> None:
        self._folder, self._stream, self._command = folder, stream, command
        self._consumer, self._owner = consumer, owner
        self._reported = -1  # the shard that was last said to be needed
        if not (folder / META_NAME).exists():
            raise StoreError(f"{folder}: nothing was extracted yet: start `{command}` first")
        self.meta: StoreMeta = read_meta(folder)
        self._check_order()
        # A store that goes on further than this reader has the same shards up to its last one.
        self._shards = plan_shards(stream.lengths, self.meta.shard_tokens)
        self._first = np.array([shard.first for shard in self._shards])
        self._open: dict[int, ShardStates] = {}
        self._fields = [name for name in self.meta.fields() if final or name != "final"]
        self._ahead: ReadAhead[int, StoredSample] = ReadAhead()

    def _check_order(self) -> None:
        meta, stream = self.meta, self._stream
        wrong = [
            f"{name} {found} there, {wanted} here"
            for name, found, wanted in (
                ("sample table", meta.table_hash, stream.table_hash),
                ("seed", meta.order_seed, stream.seed),
            )
            if found != wanted
        ]
        if meta.num_samples < len(stream):
            wrong.append(f"{meta.num_samples} samples there, {len(stream)} are to be trained on")
        if wrong:
            raise StoreError(
                f"{self._folder} does not roll in this run's order ({'; '.join(wrong)}): run"
                f" `{self._command}` with this recipe and another folder"
            )

    def checked_head(self) -> Path:
        """As that of a whole store."""
        return checked_head(self._folder, self.meta)

    def wait(self, positions: range) -> None:
        """Return when every shard of these positions is there and open.

        Raises:
            StoreError: one is damaged.
        """
        said = began = time.monotonic()
        for index in range(self._shard_of(positions[0]), self._shard_of(positions[-1]) + 1):
            while index not in self._open and not self._try_open(self._shards[index]):
                now = time.monotonic()
                if now - said >= _SAY_EVERY_S:
                    said = now
                    _LOGGER.info(
                        "waiting since %.0f s for %s of %s: is `%s` running?",
                        now - began,
                        self._shards[index].stem,
                        self._folder,
                        self._command,
                    )
                time.sleep(_POLL_S)

    def prefetch(self, positions: Sequence[int]) -> None:
        """Say which positions will be read next; those whose shard is open are read ahead."""
        there = [position for position in positions if self._shard_of(position) in self._open]
        self._ahead.expect(there, self._load)

    def sample(self, position: int) -> StoredSample:
        """The sample at a position that was waited for; its states are slices of a memory map.

        Raises:
            StoreError: its bytes have changed since they were written.
        """
        return self._ahead.take(position, self._load)

    def _load(self, position: int) -> StoredSample:
        index, sample = self._shard_of(position), self._stream[position]
        row = position - self._shards[index].first
        return stored_sample(sample, **self._open[index].read(row, sample.sample_id, self._fields))

    def release(self, position: int) -> None:
        """Close all shards that end at or before a position, and say that they are not needed.

        The file is written once a shard, when the reader has moved on to another one, also if that
        is an earlier one.
        """
        # The loader may open a shard at the same time.
        for index in [i for i in list(self._open) if self._shards[i].stop <= position]:
            del self._open[index]
        until = len(self._stream)
        shard = self._shard_of(position) if position < until else len(self._shards)
        if self._consumer is not None and shard != self._reported:
            self._reported = shard
            consumer = Consumer(position, until)
            report_consumer(self._folder, self._consumer, consumer, self._owner)

    def _shard_of(self, position: int) -> int:
        return int(np.searchsorted(self._first, position, side="right")) - 1

    def _try_open(self, shard: Shard) -> bool:
        """Map a shard; False if it is not there, or was taken away while it was looked at."""
        record_path = self._folder / shard.record
        if not record_path.exists():
            return False
        try:
            record = read_checked_record(self._folder, shard, self.meta)
            lengths = self._stream.lengths[shard.first : shard.stop]
            if record.lengths[: len(lengths)] != lengths.tolist():
                raise StoreError(f"{record_path}: holds other samples than this place of the order")
            self._open[shard.index] = ShardStates(self._folder, self.meta, record)
        except (StoreError, FileNotFoundError):
            if not record_path.exists():
                return False
            raise
        return True
