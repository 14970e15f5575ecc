"""A safetensors file -> its tensors as views of a memory map, with strict checks of the layout.

The map is copy-on-write: nothing that is done to a tensor reaches the file. Guarantee: header and
file agree to the byte (a map of a short file would read garbage or kill the process), tensors do
not overlap and leave no gaps. Cost: the header is read; data pages are read when touched.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import StoreError

_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_MAX_HEADER_BYTES = 1 << 20


def map_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    """Map every tensor of a safetensors file.

    Args:
        path: the file.
        remedy: what the user should do if it is damaged.

    Returns:
        Tensor name -> view, in the dtypes and shapes of the header.

    Raises:
        StoreError: the header is malformed or declares another length than the file has.
    """
    size = path.stat().st_size
    header, start = _read_header(path, size, remedy)
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    end = spans[-1][1] if spans else 0
    gaps = any(a[1] != b[0] for a, b in pairwise(spans)) or (spans and spans[0][0] != 0)
    if start + end != size or gaps:
        raise StoreError(
            f"{path}: its header declares {start + end} bytes, the file has {size}: truncated,"
            f" appended to or damaged; {remedy}"
        )
    raw = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
    tensors = {}
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if last - first != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise StoreError(
                f"{path}: tensor '{name}' has {last - first} bytes for shape {shape}; {remedy}"
            )
        tensors[name] = raw[first:last].view(dtype).view(shape)
    return tensors


def _read_header(path: Path, size: int, remedy: str) -> tuple[dict[str, Any], int]:
    """The tensor entries of the header, and the byte at which the data starts."""
    damaged = StoreError(f"{path}: not a safetensors file, or its header is damaged; {remedy}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise damaged
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise damaged from None
    if not isinstance(header, dict):
        raise damaged
    header.pop("__metadata__", None)
    for entry in header.values():
        try:
            first, last = entry["data_offsets"]
            known = entry["dtype"] in _DTYPES and all(n >= 0 for n in entry["shape"])
        except (TypeError, KeyError, ValueError):
            raise damaged from None
        if not known or not 0 <= first <= last:
            raise damaged
    return header, 8 + length
