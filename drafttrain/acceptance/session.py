"""The target during one response: prefill, verify a draft tree in one forward, keep one path.

    prefill(ids [n])          -> logits [1, V], taps [n, n_taps, d]
    verify(anchor, tree of N) -> logits [N+1, V], taps [N+1, n_taps, d]; row 0 is the anchor
    commit(path)              -> the cache holds exactly prefix + anchor + accepted nodes

Every node attends to the committed prefix, its ancestors and itself, at position prefix + depth, so
its logits are those of plain decoding along its own path; siblings and dropped nodes leave nothing
behind. This holds for full attention. Layers that keep anything else than keys and values by
position (sliding windows, recurrent states) are refused before any work.
Cost: one target forward per round; committing copies only the accepted rows.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from drafttrain.data.errors import TargetError
from drafttrain.extract.taps import TapRecorder
from drafttrain.extract.target import Target

from .tree import DraftTree

_MASKABLE = ("sdpa", "eager")


class Verified(NamedTuple):
    """What one target forward returned for its nodes."""

    logits: Tensor
    """float32 [nodes, V]"""
    taps: Tensor
    """[nodes, n_taps, d] in the target's dtype"""


def tree_mask(tree: DraftTree, prefix: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive attention mask [1, 1, N+1, prefix + N+1]: 0 where a node looks, else the minimum."""
    seen = torch.from_numpy(tree.ancestors()).to(device)
    nodes = len(tree) + 1
    mask = torch.zeros(1, 1, nodes, prefix + nodes, dtype=dtype, device=device)
    mask[0, 0, :, prefix:].masked_fill_(~seen, torch.finfo(dtype).min)
    return mask


class TargetSession:
    """Decoding state of one response; ``prefill`` starts the next one.

    Args:
        target: loaded for inference.
        taps: layer ids L whose outputs are returned as context features.

    Raises:
        TargetError: the target has layers or an attention kernel that cannot verify a tree exactly.
    """

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        _refuse_inexact(target)
        self._target, self._taps = target, list(taps)
        parameters = inspect.signature(target.model.forward).parameters
        # Transformers renamed the argument in 5.24; the old name still works there, with a warning.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cache = DynamicCache(config=target.model.config)
        self._length = 0

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return self._length

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self._target.device

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Verified:
        """Start a response: run the prompt.

        Args:
            ids: int64 [n], n >= 1.

        Returns:
            Logits of the last token alone [1, V], taps of all n tokens.
        """
        self._cache = DynamicCache(config=self._target.model.config)
        result = self._forward(ids.to(self._target.device), logits_to_keep=1)
        self._length = len(ids)
        return result

    @torch.inference_mode()
    def verify(self, anchor_id: int, tree: DraftTree) -> Verified:
        """Run the anchor and all drafted nodes; ``commit`` must follow before the next round."""
        assert self._cached() == self._length, "verify follows prefill or commit"
        device, dtype = self._target.device, self._target.dtype
        tokens = torch.tensor([anchor_id, *tree.tokens.tolist()], device=device)
        depths = torch.tensor([0, *tree.depths.tolist()], device=device)
        # A lone anchor sees everything: no mask, and the baseline runs as plain decoding does.
        mask = tree_mask(tree, self._length, dtype, device) if len(tree) else None
        return self._forward(
            tokens, attention_mask=mask, position_ids=(self._length + depths)[None]
        )

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows of the nodes on ``path`` (the root 0 first), drop all others."""
        kept = self._length + len(path)
        rows = torch.tensor(path, device=self._target.device) + self._length
        in_place = list(path) == list(range(len(path)))
        for layer in self._cache.layers:
            assert isinstance(layer, DynamicLayer) and layer.keys is not None
            assert layer.values is not None, "a forward fills both"
            if not in_place:
                # Indexing copies before it is written back, so overlapping rows are safe.
                layer.keys[:, :, self._length : kept] = layer.keys[:, :, rows]
                layer.values[:, :, self._length : kept] = layer.values[:, :, rows]
            layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
        self._length = kept

    def _forward(self, tokens: Tensor, **arguments: Any) -> Verified:
        arguments[self._cache_name] = self._cache
        with TapRecorder(self._target.layers, self._taps) as recorder:
            output = self._target.model(input_ids=tokens[None], use_cache=True, **arguments)
            return Verified(output.logits[0].float(), recorder.collect()[0])

    def _cached(self) -> int:
        return self._cache.get_seq_length()


def _refuse_inexact(target: Target) -> None:
    """Raise TargetError unless one masked forward equals decoding along every path."""
    model = target.model
    kinds = [type(layer) for layer in DynamicCache(config=model.config).layers]
    for number, kind in enumerate(kinds):
        if kind is not DynamicLayer:
            raise TargetError(
                f"layer {number} of the target keeps its past in a {kind.__name__}; live decoding "
                "is exact only for full-attention layers (DynamicLayer), because dropped draft "
                "tokens cannot be removed from other states: use replay, or another target"
            )
    kernel = model.config._attn_implementation
    if kernel not in _MASKABLE:
        raise TargetError(
            f"the target runs attention with '{kernel}', which takes no tree mask: load it with "
            "one of " + ", ".join(_MASKABLE)
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise TargetError(
            f"{type(model).__name__} takes no position_ids, so siblings of a draft tree cannot "
            "share a position: use replay, or another target"
        )
