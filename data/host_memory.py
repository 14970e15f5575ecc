"""Large tensors in main memory.

The first write to a page costs more than all that is done with it later: seconds a gigabyte in some
virtual machines. So large pages are asked for (NumPy does), and buffers are used again.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

_ALIGNED_BYTES = 64

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As ``torch.zeros(shape, dtype=dtype)`` on the CPU, but zeroed by the system when touched."""
    if not prod(shape):
        return torch.zeros(shape, dtype=dtype)
    flat = torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8))
    return flat.view(dtype).view(shape)


class Buffer:
    """Memory that holds sets of tensors, one set after another.

    Args:
        room: bytes that are expected; untouched memory costs nothing.
    """

    def __init__(self, room: int = 0) -> None:
        self._bytes = host_zeros((room,), torch.uint8)

    def tensors(self, shapes: Shapes) -> dict[str, Tensor]:
        """Tensors of these dtypes and shapes, with any values; those given before are void."""
        sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if end > len(self._bytes):
            self._bytes = host_zeros((end,), torch.uint8)
        return {
            name: self._bytes[starts[name] : starts[name] + sizes[name]].view(dtype).view(shape)
            for name, (dtype, shape) in shapes.items()
        }
