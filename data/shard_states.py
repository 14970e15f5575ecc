"""The states of one sealed shard: row of the shard -> one sample's stored tensors, checked.

    taps [n, n_taps, hidden], final [n, hidden], each as the parts of its codec, in a memory map

Guarantee: a sample's bytes are compared with its checksums in the record every time it is read,
the file's size and header with record and settings when it is opened; between them they cover all
of the file. What was read stays readable when the file is removed. The bytes are read, not only
touched in the map, so that a bad disk or a file that is cut meanwhile is an error and does not kill
the process. Cost: the header once; a sample once from the disk and once from memory. Any thread may
read.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from .codec import CODECS, Encoded
from .errors import StoreError
from .store_format import REPAIR, Shard, ShardRecord, StoreMeta
from .tensor_map import map_tensors

_PIECE_BYTES = 1 << 20  # stays in the processor's cache between reading and hashing
_local = threading.local()


def checksum_rows(rows: Iterable[Tensor]) -> str:
    """xxh3-64 of the bytes of contiguous CPU tensors, one after another."""
    digest = xxhash.xxh3_64()
    for part in rows:
        digest.update(part.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ShardStates:
    """The state file of one sealed shard, open.

    Args:
        folder: the store.
        meta: its settings.
        record: of the shard, as ``read_checked_record`` gives it.

    Attributes:
        tensors: tensor name -> ``[tokens, ...]``, views of the map, unchecked.

    Raises:
        StoreError: names, dtypes or shapes in the file are not the recorded ones.
    """

    def __init__(self, folder: Path, meta: StoreMeta, record: ShardRecord) -> None:
        path = folder / Shard.named(record.index).states
        self._path, self._meta, self._record = path, meta, record
        self._offsets = np.concatenate([[0], np.cumsum(record.lengths)]).tolist()
        self._file = path.open("rb", buffering=0)
        self.tensors = map_tensors(path, REPAIR)
        found = {name: (t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}
        wanted = {
            name: (dtype, (record.num_tokens, *shape))
            for name, (dtype, shape) in meta.tensors().items()
        }
        if found != wanted:
            raise StoreError(
                f"{path}: holds {found}, the record and store.json say {wanted} (one row per"
                f" token); {REPAIR}"
            )

    def read(self, row: int, sample_id: str, fields: Sequence[str]) -> dict[str, Encoded]:
        """The states of one sample.

        Args:
            row: its place in the shard.
            sample_id: its name, for messages.
            fields: "taps", "final" or both; of others no byte is touched.

        Returns:
            Field -> its states ``[n, ...]``, slices of the memory map.

        Raises:
            StoreError: its bytes are not those that were written, or cannot be read.
        """
        tokens = slice(self._offsets[row], self._offsets[row + 1])
        states = {}
        for field in fields:
            rows = {name: self.tensors[name][tokens] for name in self._meta.fields()[field]}
            found = self._checksum(rows.values())
            wanted = self._record.sample_checksums[field][row]
            if found != wanted:
                raise StoreError(
                    f"{self._path}: {field} of sample {sample_id} have changed since they were"
                    f" written (checksum {found}, recorded {wanted}); {REPAIR}"
                )
            codec = CODECS[self._meta.codec][field]
            states[field] = Encoded(codec, {suffix: rows[field + suffix] for suffix in codec.parts})
        return states

    def _checksum(self, rows: Iterable[Tensor]) -> str:
        """As ``checksum_rows``, of what the file holds at the places of these views of the map."""
        digest = xxhash.xxh3_64()
        for part in rows:
            # The storage is the whole map, so that places in it are those in the file.
            place = int(part.storage_offset()) * part.itemsize
            end = place + part.nbytes
            while place < end:
                piece = self._read_piece(place, end)
                digest.update(piece)
                place += len(piece)
        return digest.hexdigest()

    def _read_piece(self, place: int, end: int) -> memoryview:
        """Bytes of the file from ``place`` on, not beyond ``end``; valid until the next piece."""
        piece = _buffer()[: end - place]
        try:
            count = os.preadv(self._file.fileno(), [piece], place)
        except OSError as exc:  # a bad disk
            raise StoreError(f"{self._path}: cannot be read ({exc}); {REPAIR}") from None
        if count == 0:
            raise StoreError(f"{self._path}: was cut while it was open; {REPAIR}")
        return piece[:count]


def _buffer() -> memoryview:
    """This thread's own piece of memory."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_PIECE_BYTES))
    return _local.buffer
