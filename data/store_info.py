"""What a store holds, finished or not: folder -> ``StoreSummary``, from the small files only.

Reads ``store.json``, the records and four columns of each Parquet file; no state is read and no
checksum computed (``store_check`` does that). Cost: milliseconds a shard.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import StoreError
from .progress import tracked
from .store_format import HEAD_NAME, Shard, ShardRecord, StoreMeta, read_meta
from .store_shard import read_checked_record

_COLUMNS = ["source", "mode", "greedy", "length"]


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one source and mode.

    Attributes:
        source: the data set.
        mode: "think", "no_think" or "tool".
        samples: how many.
        greedy: how many of them hold the target's own greedy text.
        tokens: of all of them.
    """

    source: str
    mode: str
    samples: int
    greedy: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What is there.

    Attributes:
        folder: the store.
        meta: its settings.
        records: of the sealed shards, by number.
        missing: shards that are not sealed.
        bad: one line for each shard whose record or sizes are wrong.
        head: whether ``head.safetensors`` is there.
        bytes: size of the files of sealed shards.
        groups: sealed samples by source and mode, largest first.
        lengths: int64 ``[sealed samples]``, tokens of each.
    """

    folder: Path
    meta: StoreMeta
    records: dict[int, ShardRecord]
    missing: list[int]
    bad: list[str]
    head: bool
    bytes: int
    groups: list[Group]
    lengths: npt.NDArray[np.int64]


def summarise_store(folder: Path) -> StoreSummary:
    """Summarise a store.

    Raises:
        StoreError: ``store.json`` cannot be used.
    """
    meta = read_meta(folder)
    records: dict[int, ShardRecord] = {}
    tables: list[pa.Table] = []
    missing: list[int] = []
    bad: list[str] = []
    for index in tracked(range(meta.num_shards), f"read {folder.name}"):
        shard = Shard.named(index)
        if not (folder / shard.record).exists():
            missing.append(index)
            continue
        try:
            record = read_checked_record(folder, shard, meta)
            table = pq.read_table(folder / shard.parquet, columns=_COLUMNS, memory_map=False)
        except (StoreError, pa.ArrowInvalid, OSError, KeyError) as exc:
            if not (folder / shard.record).exists():  # a rolling store's may go at any time
                missing.append(index)
            elif isinstance(exc, StoreError):
                bad.append(str(exc))
            else:
                bad.append(f"{folder / shard.parquet}: not readable ({exc})")
        else:
            records[index] = record
            tables.append(table)
    stored = sum(file.bytes for record in records.values() for file in record.files.values())
    return StoreSummary(
        folder=folder,
        meta=meta,
        records=records,
        missing=missing,
        bad=bad,
        head=(folder / HEAD_NAME).is_file(),
        bytes=stored,
        groups=_groups(tables),
        lengths=np.array([n for r in records.values() for n in r.lengths], dtype=np.int64),
    )


def _groups(tables: list[pa.Table]) -> list[Group]:
    if not tables:
        return []
    table = pa.concat_tables(tables)
    table = table.set_column(
        table.schema.get_field_index("greedy"), "greedy", table["greedy"].cast(pa.int64())
    )
    sums = table.group_by(["source", "mode"]).aggregate(
        [("length", "count"), ("greedy", "sum"), ("length", "sum")]
    )
    groups = [
        Group(row["source"], row["mode"], row["length_count"], row["greedy_sum"], row["length_sum"])
        for row in sums.to_pylist()
    ]
    return sorted(groups, key=lambda group: (-group.tokens, group.source, group.mode))
