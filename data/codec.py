"""How hidden states are stored: float tensors ``[..., hidden]`` to stored tensors and back.

A codec maps one tensor to named parts (suffix -> tensor), each of which becomes one tensor of a
shard called ``<field><suffix>``; every part keeps the leading ``[tokens, ...]`` dimensions, so a
sample is the same row range of each. Decoding is exact for what encoding kept. Cost: one cast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store hidden states.

    Attributes:
        dtypes: suffix of each stored part -> its dtype (the shard reader checks them).
        bytes_per_value: stored bytes per hidden-state value, for size forecasts.
        encode: float tensor ``[..., hidden]`` -> parts.
        decode: parts -> tensor ``[..., hidden]``, without a copy where the codec allows.
    """

    dtypes: Mapping[str, torch.dtype]
    bytes_per_value: float
    encode: Callable[[Tensor], dict[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor]], Tensor]


def _plain(dtype: torch.dtype) -> Codec:
    return Codec(
        dtypes={"": dtype},
        bytes_per_value=dtype.itemsize,
        encode=lambda values: {"": values.to(dtype)},
        decode=lambda parts: parts[""],
    )


CODECS: dict[str, Codec] = {"bf16": _plain(torch.bfloat16), "fp32": _plain(torch.float32)}
