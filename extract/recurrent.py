"""Gated DeltaNet layers of known classes: how each projects its input, and one row of samples.

    project(layer, hidden [t, d]) -> convolution inputs [t, C], gate z [t, H D_v], b, a [t, H]
    mix_row(layer, parts, hidden [1, t, d]) -> output [1, t, d] for samples one after another

Every sample starts with an empty convolution window and a zero state, as if it were alone. Cost:
convolution, decays and gates are pointwise over the row (one kernel when compiled); the delta rule
is flash-linear-attention's chunk kernel on CUDA, elsewhere Transformers' torch rule per sample.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .row_kernels import AVAILABLE, convolve, fits
from .rows import Row, current_row
from .spread import own_weights

Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Convolution inputs [N, C] (q, k, v side by side), gate z [N, H D_v], b [N, H], a [N, H]."""


def _project_split(layer: Any, hidden: Tensor) -> Projected:
    """Qwen3.5/3.6: one projection each."""
    return (
        layer.in_proj_qkv(hidden),
        layer.in_proj_z(hidden),
        layer.in_proj_b(hidden),
        layer.in_proj_a(hidden),
    )


def _project_fused(layer: Any, hidden: Tensor) -> Projected:
    """Qwen3-Next: two projections whose rows are interleaved by key head."""
    parts = layer.fix_query_key_value_ordering(
        layer.in_proj_qkvz(hidden[None]), layer.in_proj_ba(hidden[None])
    )
    query, key, value, z, b, a = (part[0].flatten(1) for part in parts)
    return torch.cat([query, key, value], dim=-1), z, b, a


# Layer classes whose arithmetic is known, and how each projects its input.
PROJECTIONS: dict[str, Callable[[Any, Tensor], Projected]] = {
    "Qwen3_5GatedDeltaNet": _project_split,
    "Qwen3_5MoeGatedDeltaNet": _project_split,
    "Qwen3NextGatedDeltaNet": _project_fused,
}
_ACTIVATIONS = ("silu", "swish")


def known_variant(layer: Any) -> bool:
    """Whether a layer of a known class computes what is implemented here."""
    return layer.activation in _ACTIVATIONS and layer.conv1d.bias is None


def convolve_row(
    inputs: Tensor, weight: Tensor, positions: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Causal depthwise convolution and SiLU that never looks behind a sample's first token.

    Args:
        inputs: [t, C].
        weight: [C, K]; the last column meets the token itself.
        positions: int64 [t], place of each token in its sample.
        sizes: channels of q, k and v.

    Returns:
        q, k and v [t, size] each.
    """
    kernel = weight.shape[1]
    padded = F.pad(inputs, (0, 0, kernel - 1, 0))
    total = padded[kernel - 1 :].float() * weight[:, -1].float()
    for back in range(1, kernel):
        earlier = padded[kernel - 1 - back : len(padded) - back].float()
        inside = (positions >= back)[:, None]
        total = total + torch.where(inside, earlier * weight[:, kernel - 1 - back].float(), 0.0)
    return F.silu(total).to(inputs.dtype).split(list(sizes), dim=-1)


def decay_and_rate(a_log: Tensor, dt_bias: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Log decays float32 [t, H] and learning rates [t, H]."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()


DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Row], Tensor]
"""(q, k [1, t, H_k, D_k], v [1, t, H, D_v], log decay, rate [1, t, H], row) -> [1, t, H, D_v]."""


def _delta_rule(layer: Any, device: torch.device) -> DeltaRule:
    """The rule for a layer of a known class on this device."""
    if device.type == "cuda":
        try:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        except ImportError:
            pass
        else:

            def fused(
                q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, row: Row
            ) -> Tensor:
                return chunk_gated_delta_rule(
                    q, k, v, g=decay, beta=rate, use_qk_l2norm_in_kernel=True, cu_seqlens=row.ends
                )[0]

            return fused
    rule = sys.modules[type(layer).__module__].torch_chunk_gated_delta_rule

    def per_sample(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, row: Row
    ) -> Tensor:
        repeat = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeat, dim=2) for x in (q, k))
        parts = []
        for span in row.spans:
            one = (x[:, span] for x in (q, k, v))
            parts.append(
                rule(*one, g=decay[:, span], beta=rate[:, span], use_qk_l2norm_in_kernel=True)[0]
            )
        return torch.cat(parts, dim=1)

    return per_sample


@dataclass(frozen=True, slots=True)
class RowParts:
    """The functions that layers of one target share."""

    project: Callable[[Any, Tensor], Projected]
    convolve: Callable[[Tensor, Tensor, Tensor, Sequence[int]], tuple[Tensor, ...]]
    gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rule: DeltaRule

    @classmethod
    def of(cls, layer: Any, device: torch.device, compiled: Callable[[Any], Any]) -> "RowParts":
        """For layers of this class.

        Args:
            layer: any of them.
            device: of the target.
            compiled: applied to the pointwise functions.
        """
        project = PROJECTIONS[type(layer).__name__]
        rule = _delta_rule(layer, device)
        fused = device.type == "cuda" and AVAILABLE and fits(_sizes(layer))
        convolution = convolve if fused else compiled(convolve_row)
        return cls(project, convolution, compiled(decay_and_rate), rule)


def _sizes(layer: Any) -> tuple[int, int, int]:
    """Channels of q, k and v."""
    return layer.key_dim, layer.key_dim, layer.value_dim


def mix_row(layer: Any, parts: RowParts, hidden_states: Tensor, **arguments: Any) -> Tensor:
    """The forward of a Gated DeltaNet layer over the current row.

    Args:
        layer: of a known class.
        parts: its functions.
        hidden_states: [1, t, d].
        arguments: what the class takes besides; nothing of it applies to a row.
    """
    row, tokens = current_row().on(hidden_states.device), hidden_states.shape[1]
    inputs, z, b, a = parts.project(layer, hidden_states[0])
    with own_weights(layer.conv1d):
        weight = layer.conv1d.weight.squeeze(1)
        query, key, value = parts.convolve(inputs, weight, row.positions, _sizes(layer))
    decay, rate = parts.gates(layer.A_log, layer.dt_bias, a, b)
    out = parts.rule(
        query.reshape(1, tokens, -1, layer.head_k_dim),
        key.reshape(1, tokens, -1, layer.head_k_dim),
        value.reshape(1, tokens, -1, layer.head_v_dim),
        decay[None],
        rate[None],
        row,
    )
    normed = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(normed.reshape(1, tokens, -1))
