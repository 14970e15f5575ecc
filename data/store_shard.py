"""Read one shard of a feature store: its record, its Parquet index, its memory-mapped states.

Guarantee: a file's checksum is compared with the record the first time this process uses it, and
what the file holds (columns, rows, tensor names, dtypes, shapes) must be what the store's settings
and the record say. Cost: the first use of a file reads it once; later ones map or parse it only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from .errors import StoreError
from .files import file_checksum
from .store_format import (
    HEAD_NAME,
    INDEX_SCHEMA,
    REMEDY,
    REPAIR,
    TRANSFORMERS,
    FileRecord,
    Shard,
    ShardRecord,
    StoreMeta,
    read_record,
)
from .store_parity import require_parity
from .tensor_map import map_tensors

_NAMED_IN_ERRORS = 8


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One shard's Parquet columns: rows are samples, ids and masks are concatenated.

    Attributes:
        names: sample_id, source, mode and greedy of each sample.
        offsets: int64 ``[samples + 1]``.
        input_ids: int32 ``[tokens]``.
        loss_mask: bool ``[tokens]``.
    """

    names: list[dict[str, Any]]
    offsets: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


class ShardFiles:
    """The two data files of one sealed shard.

    Args:
        folder: the store.
        meta: its settings.
        shard: the planned shard.
        files: sizes and checksums from its record.
        lengths: int64 ``[samples]``, tokens per sample from its record.
    """

    def __init__(
        self,
        folder: Path,
        meta: StoreMeta,
        shard: Shard,
        files: dict[str, FileRecord],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        self._folder = folder
        self._meta = meta
        self._shard = shard
        self._files = files
        self._lengths = lengths
        self._verified: set[str] = set()

    def _verify(self, name: str) -> Path:
        path = self._folder / name
        if name not in self._verified:
            found = file_checksum(path)
            wanted = self._files[name].xxh3_128
            if found != wanted:
                raise StoreError(
                    f"{path}: its bytes have changed since it was written (checksum {found},"
                    f" recorded {wanted}); {REPAIR}"
                )
            self._verified.add(name)
        return path

    def load_index(self) -> ShardIndex:
        """Read the Parquet file.

        Raises:
            StoreError: its bytes, columns, rows or lengths are not the recorded ones.
        """
        path = self._verify(self._shard.parquet)
        offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        try:
            table = pq.read_table(path, memory_map=False)
        except (pa.ArrowInvalid, OSError) as exc:
            raise StoreError(f"{path}: not readable ({exc}); {REPAIR}") from None
        if not table.schema.equals(INDEX_SCHEMA):
            raise StoreError(
                f"{path}: columns {table.schema.names} instead of {INDEX_SCHEMA.names}; {REPAIR}"
            )
        ids, mask = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
        lengths = [table["length"], ids.value_lengths(), mask.value_lengths()]
        agree = len(table) == len(self._lengths) and all(
            np.array_equal(found.to_numpy(), self._lengths) for found in lengths
        )
        if not agree or not np.array_equal(table["offset"].to_numpy(), offsets[:-1]):
            raise StoreError(
                f"{path}: its rows, lengths or offsets are not the recorded ones; {REPAIR}"
            )
        return ShardIndex(
            names=table.select(["sample_id", "source", "mode", "greedy"]).to_pylist(),
            offsets=offsets,
            input_ids=ids.flatten().to_numpy(),
            loss_mask=mask.flatten().to_numpy(zero_copy_only=False),
        )

    def map_states(self) -> dict[str, Tensor]:
        """Map the safetensors file: tensor name -> ``[tokens, ...]``.

        Raises:
            StoreError: its bytes, names, dtypes or shapes are not the recorded ones.
        """
        path = self._verify(self._shard.states)
        tensors = map_tensors(path, REPAIR)
        found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        wanted = {
            name: (dtype, (self._shard.tokens, *shape))
            for name, (dtype, shape) in self._meta.tensors().items()
        }
        if found != wanted:
            raise StoreError(
                f"{path}: holds {found}, the record and store.json say {wanted} (one row per"
                f" token); {REPAIR}"
            )
        return tensors


def checked_head(folder: Path, meta: StoreMeta) -> Path:
    """Checksum ``head.safetensors`` and return its path.

    Raises:
        StoreError: it is missing, or not of the target that the states were taken from.
    """
    path = folder / HEAD_NAME
    if not path.is_file():
        raise StoreError(f"{path}: is missing; {REPAIR}")
    found = file_checksum(path)
    if found != meta.head_checksum:
        raise StoreError(
            f"{path}: its bytes have changed since it was written (checksum {found}, recorded"
            f" {meta.head_checksum}); {REPAIR}"
        )
    return path


def read_records(folder: Path, meta: StoreMeta) -> list[ShardRecord]:
    """Read the records of all planned shards; sizes are compared, contents are not read.

    Raises:
        StoreError: files are missing (says which), a record is damaged or foreign, or a file has
            another size than recorded.
    """
    shards = [Shard.named(i) for i in range(meta.num_shards)]
    missing = [] if (folder / HEAD_NAME).is_file() else [HEAD_NAME]
    for shard in shards:
        # Without its record a shard does not exist, whatever else is there.
        absent = [
            name
            for name in (shard.record, shard.parquet, shard.states)
            if not (folder / name).is_file()
        ]
        missing += absent[:1]
    if missing:
        shown = ", ".join(missing[:_NAMED_IN_ERRORS])
        more = len(missing) - _NAMED_IN_ERRORS
        raise StoreError(
            f"{folder}: incomplete, {len(missing)} of {len(shards)} shards or the head are missing"
            f" ({shown}{f' and {more} more' if more > 0 else ''}): extraction has not finished;"
            f" {REMEDY}"
        )
    return [read_checked_record(folder, shard, meta) for shard in shards]


def read_checked_record(folder: Path, shard: Shard, meta: StoreMeta) -> ShardRecord:
    """Read a shard's record, and compare the sizes of its files.

    Raises:
        StoreError: the record is damaged or foreign, a file is missing or of another size, or the
            shard is of an engine that has not proved its parity in this folder.
    """
    record = read_record(folder, shard.record, meta)
    if record.index != shard.index or set(record.files) != {shard.parquet, shard.states}:
        raise StoreError(
            f"{folder / shard.record}: describes shard {record.index} with files"
            f" {sorted(record.files)}; {REPAIR}"
        )
    for name, file in record.files.items():
        path = folder / name
        if not path.is_file():
            raise StoreError(f"{path}: is missing, though {shard.record} is there; {REPAIR}")
        size = path.stat().st_size
        if size != file.bytes:
            raise StoreError(
                f"{path}: has {size} bytes, its record says {file.bytes}: truncated or"
                f" appended to; {REPAIR}"
            )
    if record.engine != TRANSFORMERS:
        require_parity(folder, meta, record.engine, shard.record)
    return record
