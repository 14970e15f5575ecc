"""Random draft trees, and the paths through them."""

import numpy as np

from drafttrain.acceptance.tree import DraftTree

from .factory import VOCAB


def random_tree(rng, nodes, depth=5, newest=None):
    """Any tree: not best-first, siblings in any order.

    A parent is drawn from the ``newest`` last nodes: 1 gives a chain, many a wide tree.
    """
    parents, depths = [], [0]
    while len(parents) < nodes:
        first = 0 if newest is None else max(0, len(parents) + 1 - newest)
        parent = int(rng.integers(first, len(parents) + 1))
        while depths[parent] >= depth:  # too deep: one further up takes the child
            parent = parents[parent - 1]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    tokens = rng.integers(0, VOCAB, nodes) if nodes > VOCAB else rng.choice(VOCAB, nodes, False)
    return DraftTree(tokens, np.array(parents, dtype=np.int64), np.array(depths[1:], np.int64))


def path_to(tree, node):
    """Nodes from the root 0 to a node."""
    path = []
    while node:
        path.append(node)
        node = int(tree.parents[node - 1])
    return [0, *reversed(path)]


def tokens_of(tree, path, anchor):
    return [anchor, *(int(tree.tokens[node - 1]) for node in path[1:])]


def leaves(tree):
    """Nodes without children; every node is on the path to one."""
    return sorted(set(range(len(tree) + 1)) - set(tree.parents.tolist())) or [0]
