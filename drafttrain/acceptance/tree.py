"""Per-slot draft logits [D, V] -> a draft tree of at most ``budget`` nodes.

The slots of a block are independent given the context, so a path (v_1 .. v_d) has probability
``w = prod_i q_i(v_i)`` and a prefix-closed set of nodes accepts ``sum of w`` draft tokens in
expectation. A child never outweighs its parent, so the ``budget`` heaviest nodes are already
prefix-closed and are the best tree; a heap pops them in order of weight. A chain is the tree that
looks only at the first-ranked token of each slot.

Guarantee: nodes are ordered by (weight, ranks along the path), heaviest first, and equal logits by
token id, so the tree of a smaller budget is the beginning of the tree of a larger one.
Cost: one pass over the logits, then O(budget * log budget) on the CPU.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafted nodes in the order they are verified; node 0 is the root, the anchor itself."""

    tokens: np.ndarray
    """int64 [N]: token of nodes 1..N."""
    parents: np.ndarray
    """int64 [N]: parent of nodes 1..N, counting the root as 0; a parent precedes its children."""
    depths: np.ndarray
    """int64 [N]: distance of nodes 1..N from the root."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, budget: int) -> "DraftTree":
        """The tree that a smaller budget would have given."""
        return DraftTree(self.tokens[:budget], self.parents[:budget], self.depths[:budget])

    def children(self) -> list[dict[int, int]]:
        """For every node, the root included: token -> child node."""
        table: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        pairs = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        for node, (parent, token) in enumerate(pairs, start=1):
            table[parent][token] = node
        return table

    def ancestors(self) -> np.ndarray:
        """Bool [N+1, N+1]: row sees column, i.e. the column is the row's ancestor or itself."""
        nodes = np.arange(len(self) + 1)
        parents = np.concatenate([[0], self.parents])
        seen = np.eye(len(nodes), dtype=bool)
        reached = nodes
        for _ in range(int(self.depths.max(initial=0))):
            reached = parents[reached]
            seen[nodes, reached] = True
        return seen

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along a sequence of tokens from the root, until it leaves the tree."""
        table, node, path = self.children(), 0, []
        for token in tokens:
            child = table[node].get(token)
            if child is None:
                break
            path.append(child)
            node = child
        return path


EMPTY_TREE = DraftTree(*(np.empty(0, dtype=np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Method:
    """A way of decoding: how many nodes a round drafts, and how they are chosen."""

    kind: Literal["autoregressive", "chain", "tree"]
    budget: int = 0
    """Nodes of a tree without the root; a chain drafts one node per slot."""

    @property
    def label(self) -> str:
        """The name in reports."""
        return f"tree@{self.budget}" if self.kind == "tree" else self.kind

    def draft(self, logits: Tensor) -> DraftTree:
        """The nodes to verify, from the logits [D, V] of slots 1..D."""
        if self.kind == "chain":
            return build_tree(logits, budget=len(logits), width=1)
        return build_tree(logits, self.budget)


AUTOREGRESSIVE = Method("autoregressive")
CHAIN = Method("chain")


def methods_of(budgets: Sequence[int]) -> list[Method]:
    """The methods of a report: the baseline, the chain and one tree per budget."""
    return [AUTOREGRESSIVE, CHAIN, *(Method("tree", budget) for budget in budgets)]


@dataclass(frozen=True, slots=True)
class TopSlots:
    """The likeliest tokens of drafted slots, best first; all that a chain or a tree needs."""

    logprobs: np.ndarray
    """float32 [..., D, k]"""
    ids: np.ndarray
    """int64 [..., D, k]"""


def top_slots(logits: Tensor, k: int) -> TopSlots:
    """Keep the k likeliest tokens of every slot, equal logits in order of token id.

    Args:
        logits: [..., D, V], any float dtype and device.
        k: at most V are kept.

    Raises:
        CheckpointError: a logit is NaN or infinite.
    """
    scores = logits.float()
    rows = scores.shape[-1]
    k = min(k, rows)
    normaliser = scores.logsumexp(-1, keepdim=True)
    if not torch.isfinite(normaliser).all():
        raise CheckpointError(
            "the drafter produced logits that are not finite: its weights are damaged or its "
            "context features are; check the checkpoint and the feature store"
        )
    values, ids = scores.topk(min(k + 1, rows), dim=-1)
    # topk takes any of several tokens tied at the last place; take the smallest ids instead.
    last, next_best = values[..., k - 1], values[..., -1]
    tied = (last == next_best) & (k < rows)
    values, ids = values[..., :k], ids[..., :k]
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_value)
    if tied.any():
        full = scores[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], ids[tied] = full.values[..., :k], full.indices[..., :k]
    return TopSlots((values - normaliser).cpu().numpy(), ids.cpu().numpy())


def grow_tree(top: TopSlots, budget: int) -> DraftTree:
    """Pop the heaviest paths.

    Args:
        top: of one anchor: logprobs and ids [D, k].
        budget: nodes to take; fewer only if there are no more.
    """
    scores, ids = top.logprobs.tolist(), top.ids.tolist()
    depth_limit, width = top.logprobs.shape
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    # Entries (-log w, ranks along the path, parent node): a child's weight is its parent's plus one
    # term and a sibling's swaps the last term, in float64, so that sums agree between budgets.
    heap: list[tuple[float, tuple[int, ...], int]] = [(-scores[0][0], (0,), 0)]
    while heap and len(tokens) < budget:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        slot = scores[depth - 1]
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        if rank + 1 < width and slot[rank + 1] > -np.inf:
            sibling = -cost - slot[rank] + slot[rank + 1]
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if depth < depth_limit:
            child = -cost + scores[depth][0]
            heapq.heappush(heap, (-child, (*ranks, 0), len(tokens)))
    return DraftTree(*(np.array(part, dtype=np.int64) for part in (tokens, parents, depths)))


def build_tree(logits: Tensor, budget: int, width: int | None = None) -> DraftTree:
    """The best tree of ``budget`` nodes under the slots' own probabilities.

    Args:
        logits: [D, V] of slots 1..D.
        budget: nodes without the root; 0 gives the empty tree.
        width: consider only this many tokens per slot; unset means no limit. 1 gives a chain.
    """
    if budget == 0:
        return EMPTY_TREE
    return grow_tree(top_slots(logits, budget if width is None else min(width, budget)), budget)
