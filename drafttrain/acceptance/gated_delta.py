"""Gated DeltaNet layers of a target while a draft tree is verified, and their states afterwards.

    adopt(cache)            the prompt's states become rows of two tensors, one row per layer
    with verifying(tree):   a target forward over the tree's N nodes; the states stay as they were
    commit(path)            the states become those after the path's last node, without a forward

During ``verifying`` each layer's ``forward`` is replaced: its projections, norm and output run as
they are, convolution and delta rule run along the tree (``delta_rule``; fused kernels on CUDA,
``delta_kernels``). What a commit needs of a node is kept: convolution input [C], key [H_k, D_k],
correction [H, D_v] and summed log decay [H]. Guarantee: exact, see ``delta_rule``; a commit reads
the nodes of the path only. Cost: per node and layer 49 KB at the Qwen3.6-27B geometry, where one
state is 3.1 MB; a commit is a handful of operations for all layers together.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from drafttrain.extract.recurrent import PROJECTIONS
from drafttrain.extract.spread import replaced_forward

from .delta_kernels import FUSED, convolve, solve
from .delta_rule import commit_state, conv_rows, tree_conv, tree_delta_rule, unit_heads
from .tree import DraftTree


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree of N nodes, the root included, as its layers read it."""

    ancestors: Tensor
    """bool [N, N]: the column is the row's ancestor or itself."""
    sums: Tensor
    """The same in float64 [N, N]: times values of nodes, it sums them along every path."""
    rows: Tensor
    """int64 [N, K]: inputs of each node's convolution, see ``conv_rows``."""
    levels: int
    """Nodes on the longest path."""

    @classmethod
    def of(cls, tree: DraftTree, ancestors: Tensor, kernel: int) -> "TreeShape":
        """The shape of a tree for layers whose convolution has ``kernel`` taps.

        Args:
            tree: drafted nodes.
            ancestors: bool [N, N] of the tree with its root, on the device of the layers.
            kernel: K.
        """
        rows = torch.from_numpy(conv_rows(np.concatenate([[-1], tree.parents]), kernel))
        levels = 1 + int(tree.depths.max(initial=0))
        return cls(ancestors, ancestors.double(), rows.to(ancestors.device), levels)


@dataclass(frozen=True, slots=True)
class Committed:
    """What one layer remembers of the committed tokens."""

    state: Tensor
    """[H, D_k, D_v]"""
    conv: Tensor
    """Last convolution inputs [C, K], oldest first."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What a commit needs of verified nodes: of all layers [layers, N, ...], or of one [N, ...]."""

    inputs: Tensor
    """Convolution inputs [layers, N, C]."""
    keys: Tensor
    """Normalised keys [layers, N, H_k, D_k]."""
    corrections: Tensor
    """U [layers, N, H, D_v]."""
    decay: Tensor
    """G float64 [layers, N, H]."""

    def map(self, part: Callable[[Tensor], Tensor]) -> "NodeMemory":
        """The same part of each tensor."""
        return NodeMemory(
            part(self.inputs), part(self.keys), part(self.corrections), part(self.decay)
        )


class GatedDeltaLayers:
    """The recurrent part of a target during one response.

    Args:
        layers: number of a decoder layer -> its Gated DeltaNet module, of a class in PROJECTIONS.
    """

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        self._numbers = list(layers)
        self._modules: list[Any] = list(layers.values())
        self._states = self._convs = torch.empty(0)
        self._memory: NodeMemory | None = None

    def adopt(self, cache: DynamicCache) -> None:
        """Move the states that a prefill left in the cache into rows of two tensors.

        The cache's layers keep views of them, so that plain forwards update them in place.
        """
        layers: list[Any] = [cache.layers[number] for number in self._numbers]
        self._states = torch.stack([layer.recurrent_states[0][0] for layer in layers])
        self._convs = torch.stack([layer.conv_states[0][0] for layer in layers])
        for layer, state, conv in zip(layers, self._states, self._convs, strict=True):
            layer.recurrent_states[0], layer.conv_states[0] = state[None], conv[None]

    @contextmanager
    def verifying(self, tree: DraftTree, ancestors: Tensor) -> Iterator[None]:
        """Let forwards of the target run over the nodes of ``tree``, the root first.

        Args:
            tree: drafted nodes.
            ancestors: bool [N, N] of the tree with its root, on the target's device.
        """
        shape = TreeShape.of(tree, ancestors, self._modules[0].conv_kernel_size)
        self._reserve(len(ancestors))
        with ExitStack() as stack:
            for place, layer in enumerate(self._modules):
                stack.enter_context(replaced_forward(layer, self._forward(place, shape)))
            yield

    def commit(self, path: Tensor) -> None:
        """Advance all states to the last node of ``path`` int64 [P], which starts at node 0."""
        assert self._memory is not None, "a commit follows a verified tree"
        nodes = self._memory.map(lambda part: part.index_select(1, path))
        commit_state(self._states, nodes.keys, nodes.corrections, nodes.decay)
        recent = torch.cat([self._convs, nodes.inputs.mT], dim=-1)
        self._convs.copy_(recent[..., -self._convs.shape[-1] :])

    def _reserve(self, nodes: int) -> None:
        """Make room for ``nodes`` nodes; the room is kept for the rounds that follow."""
        if self._memory is not None and self._memory.inputs.shape[1] >= nodes:
            return
        self._memory = None  # freed before the larger one is made
        layer, layers = self._modules[0], len(self._modules)
        weight, exact = layer.conv1d.weight, self._states
        key, value = (layer.num_k_heads, layer.head_k_dim), (layer.num_v_heads, layer.head_v_dim)
        self._memory = NodeMemory(
            weight.new_empty(layers, nodes, weight.shape[0]),
            weight.new_empty(layers, nodes, *key),
            exact.new_empty(layers, nodes, *value),
            exact.new_empty(layers, nodes, value[0], dtype=torch.float64),
        )

    def _forward(self, place: int, shape: TreeShape) -> Callable[..., Tensor]:
        """What takes the place of one layer's forward."""
        layer, nodes = self._modules[place], len(shape.rows)
        assert self._memory is not None
        memory = self._memory.map(lambda part: part[place, :nodes])
        committed = Committed(self._states[place], self._convs[place])
        project = PROJECTIONS[type(layer).__name__]

        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            inputs, z, b, a = project(layer, hidden_states[0])
            mix = mix_fused if FUSED and inputs.is_cuda else mix_nodes
            mixed = mix(layer, (inputs, b, a), shape, committed, memory).flatten(0, 1)
            gated = layer.norm(mixed.to(inputs.dtype), z.reshape(mixed.shape))
            return layer.out_proj(gated.reshape(1, nodes, -1))

        return forward


def mix_nodes(
    layer: Any,
    projected: tuple[Tensor, Tensor, Tensor],
    shape: TreeShape,
    committed: Committed,
    memory: NodeMemory,
) -> Tensor:
    """Convolution and delta rule of one layer over a tree, in plain torch.

    Args:
        layer: the module.
        projected: convolution inputs [N, C], b [N, H], a [N, H].
        shape: of the tree.
        committed: of this layer, unchanged.
        memory: of this layer [N, ...], filled.

    Returns:
        [N, H, D_v] in the dtype of the states.
    """
    inputs, b, a = projected
    memory.inputs.copy_(inputs)
    history = committed.conv[:, 1:].T
    mixed = tree_conv(inputs, history, layer.conv1d.weight.squeeze(1), shape.rows)
    key_dim = layer.num_k_heads * layer.head_k_dim
    query, key, value = mixed.split([key_dim, key_dim, mixed.shape[-1] - 2 * key_dim], dim=-1)
    query, key = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in (query, key))
    memory.keys.copy_(unit_heads(key))
    # As the layer itself: b is rounded to its own type after the sigmoid, the decay never is.
    step = F.softplus(a.float() + layer.dt_bias) * -layer.A_log.float().exp()
    memory.decay.copy_(shape.sums @ step.double())
    out, corrections = tree_delta_rule(
        (unit_heads(query) * layer.head_k_dim**-0.5).to(committed.state.dtype),
        memory.keys,
        value.unflatten(-1, (-1, layer.head_v_dim)),
        memory.decay,
        b.sigmoid(),
        shape.ancestors,
        committed.state,
    )
    memory.corrections.copy_(corrections)
    return out


def mix_fused(
    layer: Any,
    projected: tuple[Tensor, Tensor, Tensor],
    shape: TreeShape,
    committed: Committed,
    memory: NodeMemory,
) -> Tensor:
    """``mix_nodes`` in two kernels and one matrix product, for CUDA."""
    inputs, b, a = projected
    query, value, beta, step = convolve(layer, (inputs, b, a), shape.rows, committed.conv, memory)
    torch.mm(shape.sums, step, out=memory.decay)
    return solve((query, value, beta), shape, committed.state, memory)
