"""How hidden states are stored: float tensors ``[..., hidden]`` to stored tensors and back.

A codec maps one tensor to named parts (suffix -> tensor), each of which becomes one tensor of a
shard called ``<field><suffix>``; every part keeps the leading ``[tokens, ...]`` dimensions, so a
sample is the same row range of each. A store has one codec per field:

    fp32, bf16   taps and final as they are, in that type
    fp8          taps as e4m3 with one float32 scale per row (token and tap), final in bf16

Guarantees: bytes depend on the states alone (every operation is exact or correctly rounded); parts
of zeros decode to zeros; a row with NaN or infinity never decodes to a finite one. Cost: one cast,
for fp8 a pass for the largest magnitude and a division more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_E4M3 = torch.float8_e4m3fn
# Multiplied by, not divided by: a GPU turns division by a constant into this, a CPU does not.
_PER_LARGEST = 1 / torch.finfo(_E4M3).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a codec: its dtype, and whether it has one value per row only."""

    dtype: torch.dtype
    per_row: bool = False


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store hidden states.

    Attributes:
        parts: suffix of each stored tensor -> what it is (the shard reader checks it).
        encode: float tensor ``[..., hidden]`` -> parts ``[..., hidden]`` or, per row, ``[...]``.
        decode: parts -> tensor ``[..., hidden]`` in the given dtype (None: the codec's own),
            rounded once, without a copy where the codec allows.
    """

    parts: Mapping[str, Part]
    encode: Callable[[Tensor], dict[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor], torch.dtype | None], Tensor]

    def encoded(self, states: Tensor) -> "Encoded":
        """Encode on the device where the states are."""
        return Encoded(self, self.encode(states))


@dataclass(frozen=True, slots=True)
class Encoded:
    """Hidden states as they are stored: ``[..., hidden]`` as the parts of a codec."""

    codec: Codec
    parts: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Encoded":
        """The same with every part changed, for instance moved."""
        return Encoded(self.codec, {suffix: change(part) for suffix, part in self.parts.items()})

    def at(self, where: Any) -> "Encoded":
        """Some of the leading dimensions, for instance the rows of one sample; no copy."""
        return self.map(lambda part: part[where])

    @property
    def nbytes(self) -> int:
        """Size of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def decode(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The states ``[..., hidden]``, moved as they are stored and decoded on the device.

        Args:
            device: where they are wanted; None leaves them where they are.
            dtype: a float dtype; None means the codec's own (float32 for fp8).
        """
        parts = self.parts
        if device is not None:
            parts = self.map(lambda part: part.to(device, non_blocking=True)).parts
        return self.codec.decode(parts, dtype)


def _plain(dtype: torch.dtype) -> Codec:
    return Codec(
        parts={"": Part(dtype)},
        encode=lambda values: {"": values.to(dtype)},
        decode=lambda parts, wanted: parts[""].to(wanted or dtype),
    )


def _encode_e4m3(values: Tensor) -> dict[str, Tensor]:
    # The largest magnitude of a row becomes the largest e4m3 value and is kept nearly exactly; it
    # is often a massive activation that outweighs the rest. The others keep 4 bits down to 1/28672
    # of it. NaN and infinity live on in the scale.
    largest = values.abs().amax(dim=-1).float()
    scale = (largest * _PER_LARGEST).clamp(min=_LEAST_SCALE)
    return {"": (values / scale[..., None]).to(_E4M3), "_scale": scale}


# What each of the 256 bytes stands for, float32.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(_E4M3).float().numpy()


def _widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 in a wider type, exactly; looked up on a CPU, where torch takes three times as long."""
    if values.device.type != "cpu":
        return values.to(dtype)
    return torch.from_numpy(_E4M3_VALUES.take(values.view(torch.uint8).numpy())).to(dtype)


def _decode_e4m3(parts: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
    # The product is formed in float32 and rounded to the dtype once.
    return _widened(parts[""], dtype or torch.float32).mul_(parts["_scale"][..., None])


_BF16, _FP32 = _plain(torch.bfloat16), _plain(torch.float32)
# A float32 scale: it costs 4 of a row's bytes, a bfloat16 one would round every value twice.
_FP8 = Codec(
    parts={"": Part(_E4M3), "_scale": Part(torch.float32, per_row=True)},
    encode=_encode_e4m3,
    decode=_decode_e4m3,
)

CODECS: dict[str, dict[str, Codec]] = {
    "bf16": {"taps": _BF16, "final": _BF16},
    "fp32": {"taps": _FP32, "final": _FP32},
    "fp8": {"taps": _FP8, "final": _BF16},
}
