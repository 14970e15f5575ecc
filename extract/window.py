"""Which shards of a rolling store may lie on the disk: position of the slowest reader -> window.

The window is the longest run of shards from the one that holds the position whose files fit the
budget at their largest. It is a function of the position alone, so any number of workers agree on
it without talking. Cost: two binary searches.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np

from drafttrain.data.errors import StoreError
from drafttrain.data.sizes import human_bytes
from drafttrain.data.store_format import Shard, StoreMeta

# What the files of a shard take beyond its states, at most: ids and masks that do not compress,
# names, lengths and checksums, headers.
_PER_TOKEN, _PER_SAMPLE, _PER_SHARD = 8, 400, 12 << 10
# store.json, recipe.yaml, the readers' positions and claims.
_SMALL_FILES = 32 << 10


def largest_bytes(meta: StoreMeta, shard: Shard) -> int:
    """An upper bound of the bytes of a shard's files."""
    states = math.ceil((meta.bytes_per_token() + _PER_TOKEN) * shard.tokens)
    return states + _PER_SAMPLE * (shard.stop - shard.first) + _PER_SHARD


class Window:
    """The windows of one rolling store.

    Args:
        meta: the store's settings.
        shards: its plan.
        budget: bytes that the store may take in all.
        head_bytes: of them for the head.
        step: positions that a training step needs at the same time.

    Attributes:
        shards: as given.
        room: bytes for shards.
        least: the smallest budget that holds what one step needs.
    """

    def __init__(
        self, meta: StoreMeta, shards: Sequence[Shard], budget: int, head_bytes: int, step: int
    ) -> None:
        self.shards, self._budget = shards, budget
        self._first = np.array([shard.first for shard in shards])
        self._tokens = np.cumsum([0] + [shard.tokens for shard in shards])
        self._ends = np.cumsum([0] + [largest_bytes(meta, shard) for shard in shards])
        fixed = head_bytes + _SMALL_FILES
        self.room = budget - fixed
        self.least = fixed + self._widest_step(step)

    def check(self) -> None:
        """Refuse a budget that does not hold what one step needs.

        Raises:
            StoreError: says how much does.
        """
        if self._budget < self.least:
            raise StoreError(
                f"extract.budget {human_bytes(self._budget)} is too small: the head and the shards"
                f" of one training step take up to {human_bytes(self.least)}; raise it, or lower"
                " extract.shard_tokens or train.global_batch"
            )

    def at(self, position: int) -> range:
        """Numbers of the shards that may be there when nothing before ``position`` is needed."""
        first = self._shard_of(position)
        if position >= self.shards[-1].stop:
            return range(len(self.shards), len(self.shards))
        stop = int(np.searchsorted(self._ends, self._ends[first] + self.room, side="right")) - 1
        return range(first, stop)

    def bytes_of(self, numbers: Collection[int]) -> int:
        """What so many shards take at most."""
        return int(sum(self._ends[i + 1] - self._ends[i] for i in numbers))

    def tokens_left(self, window: range, missing: Collection[int]) -> int:
        """Tokens of a window's missing shards and of all behind it."""
        behind = int(self._tokens[-1] - self._tokens[window.stop])
        return behind + sum(self.shards[i].tokens for i in missing)

    def _shard_of(self, position: int | np.ndarray) -> np.ndarray | int:
        return np.searchsorted(self._first, position, side="right") - 1

    def _widest_step(self, step: int) -> int:
        starts = np.arange(0, self.shards[-1].stop, step)
        first = self._shard_of(starts)
        last = self._shard_of(np.minimum(starts + step, self.shards[-1].stop) - 1)
        return int((self._ends[last + 1] - self._ends[first]).max())
