"""Write one shard: features of whole samples -> three files, sealed last.

``ShardBuffer`` holds the encoded states of one shard (``[tokens, n_taps, hidden]`` and
``[tokens, hidden]``), filled sample by sample in any order. Gate (``store_gate``): a sample whose
states are not one row per token, not finite, zero in a whole row or repeated never gets in, and a
shard with absurd norms is not written. Guarantee: bytes depend only on samples and states, not on
the order of filling. Cost: the shard in memory once, one pass for norms and one for checksums of
samples while they are in the cache, one write, hashed on its way.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from .checked_write import write_checked, write_tensors
from .codec import CODECS, Encoded
from .errors import StoreError
from .files import publish, write_json
from .host_memory import Buffer
from .samples import Sample
from .shard_states import checksum_rows
from .store_format import (
    TRANSFORMERS,
    FileRecord,
    Shard,
    ShardRecord,
    StoreMeta,
    read_record,
)
from .store_gate import columns, find_bad_norm, find_bad_state, row_norms, statistics
from .store_shard import INDEX_SCHEMA

_REMEDY = (
    "the shard was not written: the target did not compute this state, or its dtype overflows"
    " (bfloat16 models do in float16)"
)
_ATTEMPTS = 3


class ShardBuffer:
    """The states of one shard while it is being filled.

    Args:
        meta: the store's settings.
        shard: the planned shard.
        samples: its samples, in table order.
        engine: what computed the states.
        memory: to hold them, of a shard that is not needed any more.
    """

    def __init__(
        self,
        meta: StoreMeta,
        shard: Shard,
        samples: Sequence[Sample],
        engine: str = TRANSFORMERS,
        memory: Buffer | None = None,
    ) -> None:
        assert len(samples) == shard.stop - shard.first, "samples do not match the shard plan"
        self._meta = meta
        self._shard = shard
        self._samples = samples
        self._engine = engine
        self._lengths = [len(sample.input_ids) for sample in samples]
        assert sum(self._lengths) == shard.tokens, "sample lengths do not match the shard plan"
        self._offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        shapes = {
            name: (dtype, (shard.tokens, *shape)) for name, (dtype, shape) in meta.tensors().items()
        }
        self._tensors = (memory or Buffer()).tensors(shapes)
        self._norms = torch.zeros((shard.tokens, len(columns(meta))))
        self._checksums: dict[str, list[str]] = {
            name: [""] * len(samples) for name in meta.fields()
        }
        self._filled = [False] * len(samples)

    def add(self, position: int, taps: Tensor | Encoded, final: Tensor | Encoded | None) -> None:
        """Put in one sample's states.

        Args:
            position: the sample's place in this shard.
            taps: ``[tokens, n_taps, hidden]``, or what this store's codec made of them.
            final: ``[tokens, hidden]`` after the final norm, likewise, or None where the store has
                none.

        Raises:
            StoreError: rows != tokens, NaN, infinity, an all-zero row, or one state for different
                tokens; names sample, tap and token.
        """
        assert (final is not None) == self._meta.final_hidden
        sample, length = self._samples[position], self._lengths[position]
        start = int(self._offsets[position])
        for field, states in (("taps", taps), ("final", final)):
            if states is None:
                continue
            if len(states) != length:
                raise StoreError(
                    f"sample {sample.sample_id}: {len(states)} rows of {field} for {length} tokens;"
                    " the target must return one state per token (no prefix reuse, no cache)"
                )
            if isinstance(states, Tensor):
                states = CODECS[self._meta.codec][field].encoded(states)
            for suffix, part in states.parts.items():
                self._tensors[field + suffix][start : start + length] = part
        tensors = {name: part[start : start + length] for name, part in self._tensors.items()}
        for field, names in self._meta.fields().items():
            self._checksums[field][position] = checksum_rows(tensors[name] for name in names)
        norms = row_norms(self._meta, tensors)
        problem = find_bad_state(self._meta, tensors, norms, sample.input_ids)
        if problem is not None:
            raise StoreError(f"sample {sample.sample_id}: {problem}; {_REMEDY}")
        self._norms[start : start + length] = norms
        self._filled[position] = True

    def seal(
        self, folder: Path, owner: str = "", confirm: Callable[[], None] = lambda: None
    ) -> ShardRecord:
        """Write the shard's files durably, the record last, and return the record.

        Args:
            folder: the store.
            owner: names the temporary files of one of several workers.
            confirm: called before each file gets its final name; raises if this worker may not
                write the shard any more.

        Raises:
            StoreError: absurd norms; nothing was written.
        """
        missing = [
            s.sample_id for s, done in zip(self._samples, self._filled, strict=True) if not done
        ]
        assert not missing, f"{self._shard.stem}: no states for samples {missing}"
        shard = self._shard
        names = [sample.sample_id for sample in self._samples]
        problem = find_bad_norm(self._meta, self._norms, self._offsets, names)
        if problem is not None:
            raise StoreError(f"{shard.stem}: {problem}; {_REMEDY}")
        taps = statistics(self._meta, self._norms)
        final = taps.pop("final", None)
        index = publish(folder / shard.parquet, self._write_index, owner, confirm)
        states = publish(
            folder / shard.states, lambda tmp: write_tensors(tmp, self._tensors), owner, confirm
        )
        record = ShardRecord(
            index=shard.index,
            engine=self._engine,
            store=self._meta.identity(),
            table_hash=self._meta.table_hash,
            num_samples=len(self._samples),
            num_tokens=shard.tokens,
            lengths=self._lengths,
            finite=True,
            taps=taps,
            final=final,
            files={shard.parquet: index, shard.states: states},
            sample_checksums=self._checksums,
        ).sealed()
        write_json(folder / shard.record, record.model_dump(), owner, confirm)
        return record

    def _write_index(self, path: Path) -> FileRecord:
        samples = self._samples
        columns = {
            "sample_id": [s.sample_id for s in samples],
            "source": [s.source for s in samples],
            "mode": [s.mode for s in samples],
            "greedy": [bool(s.greedy) for s in samples],
            "offset": self._offsets[:-1],
            "length": self._lengths,
            "input_ids": [np.asarray(s.input_ids, dtype=np.int32) for s in samples],
            "loss_mask": [np.asarray(s.loss_mask, dtype=bool) for s in samples],
        }
        sink = io.BytesIO()
        pq.write_table(pa.table(columns, schema=INDEX_SCHEMA), sink, compression="zstd")
        return write_checked(path, [sink.getbuffer()])


def is_sealed(folder: Path, shard: Shard, meta: StoreMeta) -> bool:
    """Whether a shard is finished; see ``sealed_record``."""
    return sealed_record(folder, shard, meta) is not None


def sealed_record(folder: Path, shard: Shard, meta: StoreMeta) -> ShardRecord | None:
    """The valid record of a shard whose files have the recorded sizes, or None.

    Raises:
        StoreError: there is a record, but it is damaged or of another store (nothing finished is
            overwritten on a guess).
    """
    failure: StoreError | None = None
    # Other workers may take a record away, to do the shard again, and put one there meanwhile: only
    # what fails again and again is damaged.
    for _ in range(_ATTEMPTS):
        if not (folder / shard.record).exists():
            return None
        try:
            record = read_record(folder, shard.record, meta)
            break
        except StoreError as exc:
            failure = exc
    else:
        assert failure is not None
        raise failure
    whole = all(_size(folder / name) == file.bytes for name, file in record.files.items())
    return record if whole else None


def _size(path: Path) -> int | None:
    """Bytes of a file, None where there is none; another worker may remove it at any time."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
