"""Read a feature store: sample number -> ids, masks and hidden states, in any order.

States come as slices of a memory map (``taps [n, n_taps, hidden]`` as they are encoded, ``final [n,
hidden]``), so a sample costs the pages it touches. Guarantee: a store opens only if every planned
shard is sealed, of this store and of its recorded size; a sample's checksums are compared every
time it is read (``shard_states``), those of ids and masks when a shard's are loaded. Memory: a
bounded number of shards is mapped and indexed at a time; nothing is kept per sample read. Cost:
opening reads one small record per shard; a sample, itself and at most the ids of its shard.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .codec import Encoded
from .errors import StoreError
from .read_ahead import ReadAhead
from .samples import Sample
from .shard_states import ShardStates
from .store_format import REPAIR, Shard, ShardRecord, StoreMeta, plan_shards, read_meta
from .store_shard import ShardIndex, checked_head, load_index, read_records

# Bounds on what stays open; samples in use keep their own map alive.
_OPEN_SHARDS = 8
_INDEXED_SHARDS = 64


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """One sample without its states.

    Attributes:
        sample_id: content hash of the sample.
        source: its data set.
        mode: "think", "no_think" or "tool".
        greedy: the supervised tokens are the target's own greedy text.
        input_ids: int64 ``[n]``.
        loss_mask: bool ``[n]``, True where the target produced the token.
    """

    sample_id: str
    source: str
    mode: str
    greedy: bool
    input_ids: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class StoredSample(SampleIndex):
    """One sample with its states.

    Attributes:
        encoded_taps: ``[n, n_taps, hidden]`` as stored; row t is token t.
        final: ``[n, hidden]`` after the target's final norm, or None where the store has none.
    """

    encoded_taps: Encoded
    final: Tensor | None

    @property
    def taps(self) -> Tensor:
        """``[n, n_taps, hidden]``, bfloat16 (codec bf16) or float32; a copy for fp8 only."""
        return self.encoded_taps.decode()


def stored_sample(sample: Sample, taps: Encoded, final: Encoded | None = None) -> StoredSample:
    """A row of a sample table with its states; arguments as ``StoredSample``."""
    return StoredSample(
        sample_id=sample.sample_id,
        source=sample.source,
        mode=sample.mode,
        greedy=sample.greedy,
        input_ids=torch.from_numpy(sample.input_ids.astype(np.int64)),
        loss_mask=torch.from_numpy(sample.loss_mask.copy()),
        encoded_taps=taps,
        final=None if final is None else final.decode(),
    )


class FeatureStore:
    """A finished feature store.

    Args:
        path: the store's folder.
        table_hash: the sample table it must be made from; None accepts any.
        final: False leaves the final hidden states unread, as if the store had none.

    Attributes:
        path: the folder.
        meta: what the store was made from.
        lengths: int64 ``[len(store)]``, tokens per sample.

    Raises:
        StoreError: the store is missing, incomplete, damaged, or not made from that table. Damage
            inside a shard is found when the shard is first used.
    """

    def __init__(self, path: Path | str, table_hash: str | None = None, final: bool = True) -> None:
        self.path = Path(path)
        self.meta: StoreMeta = read_meta(self.path)
        if self.meta.order_seed is not None:
            raise StoreError(
                f"{self.path} is a rolling store, whose shards come and go: only training with"
                " extract.features=rolling reads it"
            )
        if table_hash is not None and table_hash != self.meta.table_hash:
            raise StoreError(
                f"{self.path} was made from sample table {self.meta.table_hash}, not from"
                f" {table_hash}: extract the present table into another folder, or move this one"
            )
        self._fields = [name for name in self.meta.fields() if final or name != "final"]
        records = read_records(self.path, self.meta)
        self.lengths: npt.NDArray[np.int64] = np.array(
            [length for record in records for length in record.lengths], dtype=np.int64
        )
        shards = plan_shards(self.lengths, self.meta.shard_tokens)
        self._check_plan(shards, records)
        self._first = np.array([shard.first for shard in shards], dtype=np.int64)
        folder, meta = self.path, self.meta
        # The caches do not refer to the store, so its maps close as soon as it is dropped.
        self._index: Callable[[int], ShardIndex] = lru_cache(_INDEXED_SHARDS)(
            lambda shard: load_index(folder, records[shard])
        )
        self._states: Callable[[int], ShardStates] = lru_cache(_OPEN_SHARDS)(
            lambda shard: ShardStates(folder, meta, records[shard])
        )
        self._ahead: ReadAhead[int, StoredSample] = ReadAhead()

    def __reduce__(self) -> tuple[type["FeatureStore"], tuple[Path, None, bool]]:
        # A worker process opens (and checks) its own maps.
        return FeatureStore, (self.path, None, "final" in self._fields)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self.meta.num_tokens

    def index(self, i: int) -> SampleIndex:
        """Sample ``i`` without its states (no state file is touched)."""
        return SampleIndex(**self._sample_fields(*self._locate(i)))

    def prefetch(self, samples: Iterable[int]) -> None:
        """Say which samples will be read next, in this order; threads read and check them ahead.

        Replaces what was said before. Problems appear when the sample is read.
        """
        self._ahead.expect(samples, self._load)

    def sample(self, i: int) -> StoredSample:
        """Sample ``i`` with its states, as slices of the memory map.

        Raises:
            StoreError: its bytes have changed since they were written.
        """
        return self._ahead.take(i, self._load)

    def checked_head(self) -> Path:
        """Checksum ``head.safetensors`` and return its path.

        Raises:
            StoreError: its bytes are not those of the target the states were taken from.
        """
        return checked_head(self.path, self.meta)

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a store of {len(self)}")
        shard = int(np.searchsorted(self._first, i, side="right")) - 1
        return shard, i - int(self._first[shard])

    def _load(self, i: int) -> StoredSample:
        shard, row = self._locate(i)
        fields = self._sample_fields(shard, row)
        states = self._states(shard).read(row, fields["sample_id"], self._fields)
        final = states["final"].decode() if "final" in states else None
        return StoredSample(**fields, encoded_taps=states["taps"], final=final)

    def _sample_fields(self, shard: int, row: int) -> dict[str, Any]:
        index = self._index(shard)
        start, stop = int(index.offsets[row]), int(index.offsets[row + 1])
        return {
            **index.names[row],
            "input_ids": torch.from_numpy(index.input_ids[start:stop].astype(np.int64)),
            "loss_mask": torch.from_numpy(index.loss_mask[start:stop].copy()),
        }

    def _check_plan(self, shards: list[Shard], records: list[ShardRecord]) -> None:
        """The records must add up to the plan that their lengths imply."""
        meta = self.meta
        found = (len(self.lengths), int(self.lengths.sum()), len(shards))
        wanted = (meta.num_samples, meta.num_tokens, meta.num_shards)
        if found != wanted:
            raise StoreError(
                f"{self.path}: the shards hold {found[0]} samples, {found[1]} tokens in {found[2]}"
                f" shards, store.json says {wanted[0]}, {wanted[1]} in {wanted[2]}; move this"
                " folder away and run `drafttrain extract` again"
            )
        for shard, record in zip(shards, records, strict=True):
            if (record.num_samples, record.num_tokens, len(record.lengths)) != (
                shard.stop - shard.first,
                shard.tokens,
                shard.stop - shard.first,
            ):
                raise StoreError(
                    f"{self.path / shard.record}: {record.num_samples} samples and"
                    f" {record.num_tokens} tokens do not follow the shard plan"
                    f" ({shard.stop - shard.first}, {shard.tokens}); {REPAIR}"
                )
