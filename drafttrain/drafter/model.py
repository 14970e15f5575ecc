"""The DFlash drafter: context features of the target + blocks of mask slots -> slot states.

    context features c_t = RMSNorm(W_fc [tap_1; ...; tap_n])        [R, S, d]
    every layer          keys/values from (c, slots), queries from the slots alone
    slot states          RMSNorm(last layer)                        [R, A*B, d]

The token embedding and the LM head are the target's own, frozen, and not part of this module.
Training and decoding run the same two functions (``context_kv`` and ``blocks``), so they cannot
drift apart; a parity test compares them. Parameter names are those of published checkpoints.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import DrafterAttention, KeyValue, RMSNorm, rotary_table
from .config import DrafterConfig

_INIT_STD = 0.02


class DrafterMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = DrafterMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, table: KeyValue, context: KeyValue, mask: Any) -> Tensor:
        """Slots [R, Q, d] -> [R, Q, d]."""
        x = x + self.self_attn(self.input_layernorm(x), table, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable network; see the module docstring.

    Attributes:
        recompute: layers keep their inputs alone and run again in the backward pass. Values and
            gradients have the same bits.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        width = config.hidden_size
        self.fc = nn.Linear(config.num_taps * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, seed: int) -> "Drafter":
        """Draw all matrices from N(0, 0.02²) with a generator of their own; norms are 1."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, _INIT_STD, generator=generator)
            else:
                parameter.fill_(1.0)
        return self

    def context_kv(self, taps: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of context tokens for every layer.

        Args:
            taps: [R, S, n_taps, d], any float dtype.
            positions: [R, S] int64, absolute within the document.

        Returns:
            Per layer (keys, values), each [R, kv_heads, S, head_dim] in the drafter's dtype.
        """
        features = self.hidden_norm(self.fc(taps.flatten(2).to(self.fc.weight.dtype)))
        table = self._table(positions)
        return [layer.self_attn.key_value(features, table) for layer in self._layers()]

    def blocks(
        self, embeds: Tensor, positions: Tensor, context: list[KeyValue], masks: dict
    ) -> Tensor:
        """Slot states of blocks.

        Args:
            embeds: [R, Q, d], the anchor's embedding in slot 0 and the mask embedding elsewhere.
            positions: [R, Q] int64.
            context: what ``context_kv`` returned.
            masks: per layer kind, from ``masks.layer_masks``.

        Returns:
            [R, Q, d] after the final norm, ready for the target's LM head.
        """
        x = embeds.to(self.fc.weight.dtype)
        table = self._table(positions)
        for layer, kind, kv in zip(self._layers(), self.config.layer_types, context, strict=True):
            if self.recompute and torch.is_grad_enabled():
                # Nothing is drawn at random, so there is no generator to set back.
                x = checkpoint(
                    layer, x, table, kv, masks[kind], use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(x, table, kv, masks[kind])
        return self.norm(x)

    def forward(
        self,
        taps: Tensor,
        context_positions: Tensor,
        embeds: Tensor,
        block_positions: Tensor,
        masks: dict,
    ) -> Tensor:
        """``context_kv`` followed by ``blocks``: the training step."""
        context = self.context_kv(taps, context_positions)
        return self.blocks(embeds, block_positions, context, masks)

    def _table(self, positions: Tensor) -> KeyValue:
        return rotary_table(positions, self.config.head_dim, self.config.rope_theta)

    def _layers(self) -> list[DrafterLayer]:
        return list(self.layers)  # type: ignore[arg-type]
