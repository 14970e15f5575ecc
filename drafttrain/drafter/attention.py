"""Attention of the drafter: queries from the block, keys and values from context and block.

Context keys and values come from the context features of the target, computed once per context
token; block keys and values from the slots (DFlash, arXiv 2602.06036). Rotary angles are computed
in float32 from absolute positions and are no buffers, so casting the module cannot round them.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DrafterConfig

KeyValue = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32, weight applied after."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], same dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> KeyValue:
    """cos and sin, [R, 1, T, head_dim] float32, for positions [R, T]."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions[:, None, :, None].float() * (1.0 / theta ** (pairs / head_dim))
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: KeyValue) -> Tensor:
    """Apply rotary embedding (half-split pairs) to [R, heads, T, head_dim]."""
    cos, sin = (t.to(x.dtype) for t in table)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Grouped-query attention; ``mask`` is a dense bool tensor (SDPA) or a flex ``BlockMask``."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )
    return _compiled_flex_attention()(query, key, value, block_mask=mask, enable_gqa=True)


class DrafterAttention(nn.Module):
    """One attention sublayer; names and shapes as in published DFlash checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def key_value(self, x: Tensor, table: KeyValue) -> KeyValue:
        """Keys (normed, turned) and values, [R, kv_heads, T, head_dim], of states [R, T, width]."""
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return rotate(key, table), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, table: KeyValue, context: KeyValue, mask: Any) -> Tensor:
        """Attend from slots ``x`` [R, Q, width] to the context and the slots."""
        query = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), table)
        key, value = self.key_value(x, table)
        key = torch.cat((context[0], key), dim=2)
        value = torch.cat((context[1], value), dim=2)
        return self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))
