"""The convolution of a row of samples as one kernel (Triton): what ``recurrent.convolve_row`` does.

    inputs [t, C], weight [C, K], positions [t] -> q [t, C_q], k [t, C_k], v [t, C_v], contiguous

Each program makes a tile of tokens and channels; an earlier token counts only within the sample.
Guarantee: sums in float32, rounded once before and once after SiLU, as the layer itself rounds.
Cost: the inputs are read from memory once (the K - 1 earlier tokens of a tile come from the cache),
the outputs written once; as a compiled expression the same took four times as long at C = 10,240.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without; the kernel is defined and never launched
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=None)

AVAILABLE = not isinstance(triton, SimpleNamespace)
"""Whether the kernel can run here (on CUDA tensors)."""
_TOKENS, _CHANNELS = 32, 128


@triton.jit
def _convolve_kernel(
    inputs, weight, positions, query, key, value, tokens,
    WIDTH: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KERNEL: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One tile of tokens and channels; the tile's channels belong to q, k or v alone."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * CHANNELS
    channel = first + tl.arange(0, CHANNELS)
    inside = token < tokens
    place = tl.load(positions + token, inside, other=0)
    row = token.to(tl.int64)[:, None]
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for back in tl.static_range(KERNEL):
        seen = inside & (place >= back)
        x = tl.load(inputs + (row - back) * WIDTH + channel[None, :], seen[:, None], other=0.0)
        w = tl.load(weight + channel * KERNEL + (KERNEL - 1 - back))
        total += x.to(tl.float32) * w.to(tl.float32)[None, :]
    total = total.to(inputs.dtype.element_ty).to(tl.float32)
    out = (total / (1.0 + tl.exp(-total))).to(inputs.dtype.element_ty)
    if first < Q:
        tl.store(query + row * Q + channel[None, :], out, inside[:, None])
    elif first < Q + K:
        tl.store(key + row * K + (channel[None, :] - Q), out, inside[:, None])
    else:
        tl.store(value + row * V + (channel[None, :] - Q - K), out, inside[:, None])


def fits(sizes: Sequence[int]) -> bool:
    """Whether the channels of q, k and v fill whole tiles."""
    return all(size % _CHANNELS == 0 for size in sizes)


def convolve(
    inputs: Tensor, weight: Tensor, positions: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution and SiLU of a row, split into q, k and v.

    Args:
        inputs: [t, C].
        weight: [C, K], contiguous; the last column meets the token itself.
        positions: int64 [t], place of each token in its sample.
        sizes: channels of q, k and v, see ``fits``.
    """
    tokens, width = inputs.shape
    inputs, weight = inputs.contiguous(), weight.contiguous()
    outs = tuple(inputs.new_empty(tokens, size) for size in sizes)
    grid = (triton.cdiv(tokens, _TOKENS), width // _CHANNELS)
    with torch.cuda.device(inputs.device) if inputs.is_cuda else torch.no_grad():
        _convolve_kernel[grid](
            inputs, weight, positions, *outs, tokens,
            width, *sizes, weight.shape[1], _TOKENS, _CHANNELS,
        )  # fmt: skip
    return outs[0], outs[1], outs[2]
