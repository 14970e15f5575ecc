"""The target during one response: prefill, verify a draft tree in one forward, keep one path.

    prefill(ids [n])          -> logits [1, V], taps [n, n_taps, d]
    verify(anchor, tree of N) -> logits [N+1, V], taps [N+1, n_taps, d]; row 0 is the anchor
    commit(path)              -> the cache holds exactly prefix + anchor + accepted nodes

Every node depends on the committed prefix, its ancestors and itself, at position prefix + depth, so
its logits are those of plain decoding along its own path; siblings and dropped nodes leave nothing
behind. Attention layers take the ancestors as a mask; Gated DeltaNet layers run along the tree
(``gated_delta``). A chain is a tree without branches: there is one way through. Targets with layers
of any other kind are refused before any work (``exactness``).
Cost: one target forward per round; committing copies accepted rows and updates states in place.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from drafttrain.extract.taps import TapRecorder
from drafttrain.extract.target import Target

from .exactness import prove_exact, recurrent_layers
from .gated_delta import GatedDeltaLayers
from .tree import DraftTree


class Verified(NamedTuple):
    """What one target forward returned for its nodes."""

    logits: Tensor
    """float32 [nodes, V]"""
    taps: Tensor
    """[nodes, n_taps, d] in the target's dtype"""


def tree_mask(ancestors: Tensor, prefix: int, dtype: torch.dtype) -> Tensor:
    """Additive attention mask [1, 1, N, prefix + N]: 0 where a node looks, else the minimum.

    Args:
        ancestors: bool [N, N] of a tree with its root, on the target's device.
        prefix: committed tokens, which every node sees.
        dtype: of the mask.
    """
    nodes = len(ancestors)
    mask = torch.zeros(1, 1, nodes, prefix + nodes, dtype=dtype, device=ancestors.device)
    mask[0, 0, :, prefix:].masked_fill_(~ancestors, torch.finfo(dtype).min)
    return mask


class TargetSession:
    """Decoding state of one response; ``prefill`` starts the next one.

    Args:
        target: loaded for inference.
        taps: layer ids L whose outputs are returned as context features.

    Raises:
        TargetError: the target has layers or an attention kernel that cannot verify a tree exactly,
            or a trial over a few tokens does not give what plain forwards give.
    """

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        recurrent = recurrent_layers(target)
        self._target, self._taps = target, list(taps)
        self._recurrent = GatedDeltaLayers(recurrent) if recurrent else None
        parameters = inspect.signature(target.model.forward).parameters
        # Transformers renamed the argument in 5.24; the old name still works there, with a warning.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cache = DynamicCache(config=target.model.config)
        self._length = 0
        self._verified: DraftTree | None = None
        prove_exact(self, target)

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
        if self._recurrent is not None:
            self._recurrent.adopt(self._cache)
        self._length, self._verified = len(ids), None
        return result

    @torch.inference_mode()
    def verify(self, anchor_id: int, tree: DraftTree) -> Verified:
        """Run the anchor and all drafted nodes; ``commit`` must follow before the next round."""
        assert self._verified is None, "verify follows prefill or commit"
        self._verified = tree
        device = self._target.device
        tokens = torch.tensor([anchor_id, *tree.tokens.tolist()], device=device)
        depths = torch.tensor([0, *tree.depths.tolist()], device=device)
        positions = (self._length + depths)[None]
        # A lone anchor sees everything: no mask, and the baseline runs as plain decoding does.
        if not len(tree):
            return self._forward(tokens, position_ids=positions)
        ancestors = torch.from_numpy(tree.ancestors()).to(device)
        mask = tree_mask(ancestors, self._length, self._target.dtype)
        recurrent = self._recurrent
        with recurrent.verifying(tree, ancestors) if recurrent else nullcontext():
            return self._forward(tokens, attention_mask=mask, position_ids=positions)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows of the nodes on ``path`` (the root 0 first), drop all others."""
        assert self._verified is not None, "commit follows verify"
        kept = self._length + len(path)
        nodes = torch.tensor(path, device=self._target.device)
        # The plain forward of a lone anchor has advanced the recurrent states itself.
        if self._recurrent is not None and len(self._verified):
            self._recurrent.commit(nodes)
        in_place = list(path) == list(range(len(path)))
        rows: Tensor = nodes + self._length
        for layer in self._cache.layers:
            if not isinstance(layer, DynamicLayer):
                continue
            assert layer.keys is not None and layer.values is not None, "a forward fills both"
            if not in_place:
                rows = rows.to(layer.keys.device)  # not always the target's, if it is spread
                # Indexing copies before it is written back, so overlapping rows are safe.
                layer.keys[:, :, self._length : kept] = layer.keys[:, :, rows]
                layer.values[:, :, self._length : kept] = layer.values[:, :, rows]
            layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
        self._length, self._verified = kept, None

    def _forward(self, tokens: Tensor, **arguments: Any) -> Verified:
        arguments[self._cache_name] = self._cache
        with TapRecorder(self._target.layers, self._taps) as recorder:
            output = self._target.model(input_ids=tokens[None], use_cache=True, **arguments)
            return Verified(output.logits[0].float(), recorder.collect()[0].to(self._target.device))
