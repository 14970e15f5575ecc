"""Read the small files of a feature store: head, records and Parquet indices.

Guarantee: whatever is returned belongs to the store, and what a file holds (columns, rows, lengths)
is what its record says, by checksum. The states have a module of their own, ``shard_states``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from .errors import StoreError
from .files import file_checksum
from .store_format import (
    HEAD_NAME,
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

_NAMED_IN_ERRORS = 8

# The Parquet file holds ids, masks and pointers only; the states stay in safetensors.
INDEX_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("mode", pa.string()),
        ("greedy", pa.bool_()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)


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


def verify_file(path: Path, wanted: FileRecord) -> None:
    """Read a whole file and compare its checksum with the recorded one.

    Raises:
        StoreError: its bytes have changed.
    """
    _compare(path, file_checksum(path), wanted)


def _compare(path: Path, found: str, wanted: FileRecord) -> None:
    if found != wanted.xxh3_128:
        raise StoreError(
            f"{path}: its bytes have changed since it was written (checksum {found},"
            f" recorded {wanted.xxh3_128}); {REPAIR}"
        )


def load_index(folder: Path, record: ShardRecord) -> ShardIndex:
    """Read the Parquet file of a sealed shard, checking its checksum.

    Raises:
        StoreError: its bytes, columns, rows or lengths are not the recorded ones.
    """
    name = Shard.named(record.index).parquet
    path, lengths = folder / name, np.array(record.lengths, dtype=np.int64)
    data = path.read_bytes()
    _compare(path, xxhash.xxh3_128_hexdigest(data), record.files[name])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowInvalid, OSError) as exc:
        raise StoreError(f"{path}: not readable ({exc}); {REPAIR}") from None
    if not table.schema.equals(INDEX_SCHEMA):
        raise StoreError(
            f"{path}: columns {table.schema.names} instead of {INDEX_SCHEMA.names}; {REPAIR}"
        )
    ids, mask = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
    counts = [table["length"], ids.value_lengths(), mask.value_lengths()]
    agree = len(table) == len(lengths) and all(
        np.array_equal(found.to_numpy(), lengths) for found in counts
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
    sums = {field: len(found) for field, found in record.sample_checksums.items()}
    counts = (len(record.lengths), sum(record.lengths), sums)
    samples = record.num_samples
    if counts != (samples, record.num_tokens, dict.fromkeys(meta.fields(), samples)):
        raise StoreError(
            f"{folder / shard.record}: {samples} samples and {record.num_tokens} tokens"
            f" are not those of its lengths and checksums; {REPAIR}"
        )
    return record
