"""Sample tables: token ids with the mask of what the target produced, on disk and in memory.

One sample is ``input_ids`` int32 [n] and ``loss_mask`` bool [n] (True: the target produced this
token, so the drafter may learn it). A table is a Parquet file plus ``<stem>.manifest.json``, which
holds counts, drop reasons, hashes of template and tokenizer, and the checksum of the Parquet file.

Guarantee: a table under its final name is complete, and ``read_table`` refuses one whose bytes are
not those its manifest describes. Row groups are bounded, list offsets are 64 bit, so size has no
limit. Cost: writing streams (one row group in memory); reading holds 4 1/8 bytes per token, with
no Python object per row or token.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import DataError
from .files import file_checksum, publish, read_json, write_json

FORMAT_VERSION = 1
MODES = ("think", "no_think", "tool")
# Token ids are embedding rows: int32 has room for every vocabulary (int16 does not).
ID_DTYPE = np.int32
SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("mode", pa.string(), nullable=False),
        pa.field("input_ids", pa.large_list(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.large_list(pa.bool_()), nullable=False),
        pa.field("greedy", pa.bool_(), nullable=False),
    ]
)

_GROUP_TOKENS = 1 << 20
_GROUP_ROWS = 1 << 14
_REMEDY = "run 'drafttrain data prepare' again"

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One training or evaluation text.

    Attributes:
        sample_id: content hash of ids and mask.
        source: the data set's name in reports.
        mode: one of ``MODES``.
        input_ids: int32 [n].
        loss_mask: bool [n], True where the target produced the token.
        greedy: the supervised tokens are the target's own greedy text, so replay is exact.
    """

    sample_id: str
    source: str
    mode: str
    input_ids: Ids
    loss_mask: Mask
    greedy: bool


def make_sample(input_ids: Any, loss_mask: Any, *, source: str, mode: str, greedy: bool) -> Sample:
    """Build a sample and its id from anything array-like.

    Args:
        input_ids: integers [n] that fit int32.
        loss_mask: booleans [n].
        source: the data set's name.
        mode: one of ``MODES``.
        greedy: whether the supervised tokens are the target's own greedy text.
    """
    ids = np.ascontiguousarray(input_ids, dtype=ID_DTYPE)
    mask = np.ascontiguousarray(loss_mask, dtype=np.bool_)
    assert ids.ndim == 1 and ids.shape == mask.shape, f"ids {ids.shape}, mask {mask.shape}"
    assert mode in MODES, f"unknown mode {mode!r}"
    digest = hashlib.sha256(ids.astype("<i4", copy=False).tobytes())
    digest.update(np.packbits(mask).tobytes())
    return Sample(digest.hexdigest()[:16], source, mode, ids, mask, greedy)


def manifest_path(table: Path) -> Path:
    """Where the manifest of a table lies: ``train.parquet`` -> ``train.manifest.json``."""
    return table.with_name(f"{table.stem}.manifest.json")


def write_table(path: Path, samples: Iterable[Sample], manifest: dict[str, Any]) -> dict[str, Any]:
    """Write a table and, after it, its manifest, both atomically.

    Args:
        path: the ``.parquet`` file to create or replace.
        samples: read once, in order; may be a generator.
        manifest: what the caller knows of the table. Read only after the last sample, so a
            generator may fill it while it runs.

    Returns:
        The manifest as written: the caller's entries plus counts, ``max_id`` and ``table_hash``.
    """
    totals = _Totals()

    def write(tmp: Path) -> None:
        with pq.ParquetWriter(tmp, SAMPLE_SCHEMA, compression="zstd") as writer:
            for group in _groups(samples):
                totals.add(group)
                writer.write_table(_to_arrow(group))

    publish(path, write)
    full = {
        "format_version": FORMAT_VERSION,
        **manifest,
        **totals.entries(),
        "table_hash": file_checksum(path),
    }
    write_json(manifest_path(path), full)
    return full


def read_table(path: Path) -> "SampleTable":
    """Open a finished table.

    Raises:
        DataError: table or manifest is missing, of another format, or they do not belong together.
    """
    manifest = read_json(manifest_path(path), DataError, _REMEDY)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{manifest_path(path)} has format_version {manifest.get('format_version')!r}, this "
            f"version reads {FORMAT_VERSION}: {_REMEDY}"
        )
    if not path.is_file():
        raise DataError(f"{path} does not exist although its manifest does: {_REMEDY}")
    found = file_checksum(path)
    if found != manifest.get("table_hash"):
        raise DataError(
            f"{path} has checksum {found}, its manifest says {manifest.get('table_hash')}: the "
            f"file is damaged or from another run; {_REMEDY}"
        )
    table = pq.read_table(path)
    if not table.schema.equals(SAMPLE_SCHEMA):
        raise DataError(f"{path} has columns {table.schema.names}, not a sample table: {_REMEDY}")
    return SampleTable(table, manifest)


class SampleTable:
    """A finished table in memory: ``len(table)``, ``table[i]``, iteration in table order.

    Attributes:
        manifest: the manifest as written by ``write_table``.
        table_hash: checksum that later artifacts name this table by.
        lengths: int64 [len(self)], tokens of each sample.
    """

    def __init__(self, table: pa.Table, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        self.table_hash: str = manifest["table_hash"]
        self._columns = {
            name: _one_chunk(table[name]) for name in ("sample_id", "source", "mode", "greedy")
        }
        ids = _one_chunk(table["input_ids"])
        mask = _one_chunk(table["loss_mask"])
        self._offsets = ids.offsets.to_numpy().astype(np.int64)
        assert np.array_equal(self._offsets, mask.offsets.to_numpy()), "ids and mask differ"
        self._ids: Ids = ids.values.to_numpy()
        self._mask = mask.values
        self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a table of {len(self)}")
        start, length = int(self._offsets[index]), int(self.lengths[index])
        return Sample(
            sample_id=self._columns["sample_id"][index].as_py(),
            source=self._columns["source"][index].as_py(),
            mode=self._columns["mode"][index].as_py(),
            input_ids=self._ids[start : start + length],
            loss_mask=self._mask.slice(start, length).to_numpy(zero_copy_only=False),
            greedy=self._columns["greedy"][index].as_py(),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


class _Totals:
    """Counts over all samples of a table."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.supervised = self.greedy = 0
        self.max_id = -1
        self.modes: Counter[str] = Counter()

    def add(self, group: list[Sample]) -> None:
        for sample in group:
            self.samples += 1
            self.tokens += len(sample.input_ids)
            self.supervised += int(sample.loss_mask.sum())
            self.greedy += sample.greedy
            self.max_id = max(self.max_id, int(sample.input_ids.max(initial=-1)))
            self.modes[sample.mode] += 1

    def entries(self) -> dict[str, Any]:
        return {
            "num_samples": self.samples,
            "num_tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "greedy_samples": self.greedy,
            "modes": {mode: self.modes[mode] for mode in MODES},
            "max_id": self.max_id,
        }


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Cut the stream into row groups of bounded size."""
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        group.append(sample)
        tokens += len(sample.input_ids)
        if tokens >= _GROUP_TOKENS or len(group) >= _GROUP_ROWS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _to_arrow(group: list[Sample]) -> pa.Table:
    lengths = [len(sample.input_ids) for sample in group]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    ids = pa.array(np.concatenate([sample.input_ids for sample in group]), pa.int32())
    mask = pa.array(np.concatenate([sample.loss_mask for sample in group]), pa.bool_())
    return pa.Table.from_arrays(
        [
            pa.array([sample.sample_id for sample in group]),
            pa.array([sample.source for sample in group]),
            pa.array([sample.mode for sample in group]),
            pa.LargeListArray.from_arrays(offsets, ids),
            pa.LargeListArray.from_arrays(offsets, mask),
            pa.array([sample.greedy for sample in group]),
        ],
        schema=SAMPLE_SCHEMA,
    )


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    chunks = column.chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [_empty(column.type)])


def _empty(kind: pa.DataType) -> pa.Array:
    return pa.array([], kind)
