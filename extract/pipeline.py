"""Fill and seal shards behind the engine: features of samples -> sealed shards, in two threads.

    engine -> (bytes bounded) -> encode, gate, copy into the shard -> (one shard) -> write, seal

Torch, NumPy, Arrow, the checksum and the file system work outside Python's lock, so all of this
runs while the target computes. Guarantee: a failure in any stage stops the stages before it and
reaches the caller as it was raised; shards that were whole by then are sealed, no other is; a shard
that another worker has taken over is dropped. Memory: ``SHARDS`` shards at most (being filled,
waiting, being written) and ``_WAITING_BYTES`` of states, or one sample more.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Queue
from types import TracebackType
from typing import NamedTuple

from drafttrain.data.codec import Encoded
from drafttrain.data.host_memory import Buffer
from drafttrain.data.samples import Sample
from drafttrain.data.store_format import TRANSFORMERS, Shard, StoreMeta
from drafttrain.data.store_writer import ShardBuffer

from .claims import ClaimLost, Claims

# Two would do; the third is begun while the last states of the one before are on their way.
SHARDS = 3
_WAITING_BYTES = 4 << 30
_LOGGER = logging.getLogger(__name__)


class _Filled(NamedTuple):
    """One sample's states for a shard."""

    shard: int
    position: int
    taps: Encoded
    final: Encoded | None

    @property
    def bytes(self) -> int:
        return self.taps.nbytes + (0 if self.final is None else self.final.nbytes)


class ShardWriter:
    """Takes features in any order within a shard, shards in order; use as a context manager.

    Args:
        meta: the store's settings.
        out_dir: its folder.
        claims: holds every shard that is begun; released once it is sealed or dropped.
        sealed: called with each shard once it is sealed, in the writing thread.
        keep: whether a shard is still wanted; asked before each of its files gets its name.
        engine: what computes the features.
    """

    def __init__(
        self,
        meta: StoreMeta,
        out_dir: Path,
        claims: Claims,
        sealed: Callable[[Shard], None],
        keep: Callable[[Shard], bool] = lambda shard: True,
        engine: str = TRANSFORMERS,
    ) -> None:
        self._meta, self._out_dir, self._claims = meta, out_dir, claims
        self._sealed, self._keep, self._engine = sealed, keep, engine
        self._open: dict[int, tuple[Shard, ShardBuffer, list[int]]] = {}
        self._features: Queue[_Filled | None] = Queue()
        self._shards: Queue[tuple[Shard, ShardBuffer] | None] = Queue()
        room = (meta.shard_tokens + 1) * meta.bytes_per_token()
        self._memory = [Buffer(room) for _ in range(SHARDS)]
        self._held: dict[int, Buffer] = {}  # by shard
        self._room = threading.Condition()
        self._waiting = 0  # bytes of states
        self._failure: BaseException | None = None
        self._unwritable = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(stage,), daemon=True)
            for stage in (self._fill, self._seal)
        ]

    def __enter__(self) -> "ShardWriter":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._fail(error)
        self._features.put(None)
        for thread in self._threads:
            thread.join()
        if self._failure is not None and self._failure is not error:
            raise self._failure

    def begin(self, shard: Shard, samples: Sequence[Sample]) -> None:
        """Announce the next shard and its samples; waits while ``SHARDS`` are in memory.

        Raises:
            BaseException: what a later stage failed with.
        """
        with self._room:
            self._room.wait_for(lambda: self._memory or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            memory = self._held[shard.index] = self._memory.pop()
        buffer = ShardBuffer(self._meta, shard, samples, self._engine, memory)
        self._open[shard.index] = (shard, buffer, [len(samples)])

    def drain(self, timeout_s: float) -> bool:
        """Wait until no shard is in memory; False if some still are after ``timeout_s``.

        Raises:
            BaseException: what a later stage failed with.
        """
        with self._room:
            done = self._room.wait_for(
                lambda: not self._held or self._failure is not None, timeout_s
            )
            if self._failure is not None:
                raise self._failure
            return done

    def put(self, shard: int, position: int, taps: Encoded, final: Encoded | None) -> None:
        """Hand over one sample's states; waits while too many are on their way.

        Args:
            shard: index of a shard that was begun.
            position: the sample's place in it.
            taps: [n, n_taps, hidden].
            final: [n, hidden], if the store has it.

        Raises:
            BaseException: what a later stage failed with.
        """
        item = _Filled(shard, position, taps, final)
        with self._room:
            self._room.wait_for(
                lambda: (
                    self._failure is not None
                    or not self._waiting
                    or self._waiting + item.bytes <= _WAITING_BYTES
                )
            )
            if self._failure is not None:
                raise self._failure
            self._waiting += item.bytes
        self._features.put(item)

    def _fill(self) -> None:
        while (item := self._features.get()) is not None:
            if self._failure is None:
                self._add(item)
            with self._room:
                self._waiting -= item.bytes
                self._room.notify_all()
        self._shards.put(None)

    def _add(self, item: _Filled) -> None:
        shard, buffer, left = self._open[item.shard]
        buffer.add(item.position, item.taps, item.final)
        left[0] -= 1
        if not left[0]:
            del self._open[item.shard]
            self._shards.put((shard, buffer))

    def _seal(self) -> None:
        while (item := self._shards.get()) is not None:
            if not self._unwritable:
                # Cleared only after success: a failure here ends all sealing.
                self._unwritable = True
                self._publish(*item)
                self._unwritable = False
            with self._room:
                self._memory.append(self._held.pop(item[0].index))
                self._room.notify_all()

    def _publish(self, shard: Shard, buffer: ShardBuffer) -> None:
        claims, unit = self._claims, shard.stem

        def confirm() -> None:
            if not self._keep(shard):
                raise ClaimLost(unit)
            claims.confirm(unit)

        try:
            with claims.writing(unit):
                confirm()
                buffer.seal(self._out_dir, claims.owner, confirm)
        except ClaimLost:
            if self._keep(shard):
                _LOGGER.warning("%s was taken over by another worker and is dropped here", unit)
            claims.drop(unit)
        else:
            claims.release(unit)
            self._sealed(shard)

    def _guarded(self, stage: Callable[[], None]) -> None:
        """Run a stage; after a failure it only empties its queue, so that no other one waits."""
        while True:
            try:
                stage()
            except BaseException as exc:
                self._fail(exc)
            else:
                return

    def _fail(self, error: BaseException) -> None:
        with self._room:
            self._failure = self._failure or error
            self._waiting = 0
            self._room.notify_all()
