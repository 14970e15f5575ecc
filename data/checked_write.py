"""Write a file and its checksum in one pass: buffers or tensors -> file, ``FileRecord``.

    safetensors layout: length of the header, header (JSON, padded to 8 bytes), tensors end to end

The bytes are those of ``safetensors.torch.save_file`` (tested), which can neither hash what it
writes nor write under a name of our choice, and hides the system's error. Cost: every byte is read
once, while it is in the processor's cache; the disk works along from the first 64 MB on.
"""

import json
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from .files import start_flush
from .store_format import FileRecord

# In the order in which the format lays tensors out: wide types first, so that all are aligned.
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_PIECE_BYTES = 1 << 22
_FLUSH_BYTES = 1 << 26


def write_checked(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write buffers one after another; return their size and checksum.

    Raises:
        OSError: as the system reports it (disk full, quota).
    """
    digest, size, flushing = xxhash.xxh3_128(), 0, 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            for start in range(0, view.nbytes, _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                digest.update(piece)
                _write(file, piece)
                size += piece.nbytes
                if size - flushing >= _FLUSH_BYTES:
                    start_flush(file.fileno(), flushing, size - flushing)
                    flushing = size
    return FileRecord(bytes=size, xxh3_128=digest.hexdigest())


def _write(file: FileIO, piece: memoryview) -> None:
    """All of it: the system may take less at a time."""
    while piece.nbytes:
        piece = piece[file.write(piece) :]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a safetensors file; return its size and checksum.

    Args:
        path: the file to create.
        tensors: contiguous CPU tensors by name.

    Raises:
        OSError: as the system reports it (disk full, quota).
    """
    order = list(_DTYPE_NAMES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header, end = {}, 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    values = (tensors[name].view(-1).view(torch.uint8).numpy().data for name in names)
    return write_checked(path, [len(text).to_bytes(8, "little"), text, *values])
