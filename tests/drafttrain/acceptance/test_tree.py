"""Draft trees: optimal, ordered, nested, and the chain as a special case."""

import itertools

import numpy as np
import pytest
import torch

from drafttrain.acceptance.tree import CHAIN, DraftTree, Method, build_tree, top_slots
from drafttrain.data.errors import CheckpointError


def logits_of(depth, vocab, seed=0):
    return torch.randn(depth, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def paths_of(tree):
    """Token path of every node, in order."""
    paths = [()]
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        paths.append((*paths[parent], int(token)))
    return paths[1:]


def weights_of(logits):
    """Every path of every depth with its log-probability, by enumeration."""
    logprobs = logits.double().log_softmax(-1).numpy()
    depth, vocab = logprobs.shape
    return {
        path: sum(logprobs[i][token] for i, token in enumerate(path))
        for length in range(1, depth + 1)
        for path in itertools.product(range(vocab), repeat=length)
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [1, 2, 7, 20])
def test_the_tree_holds_the_heaviest_paths_in_order(seed, budget):
    logits = logits_of(4, 5, seed)
    weights = weights_of(logits)
    best = sorted(weights, key=lambda path: -weights[path])[:budget]
    assert paths_of(build_tree(logits, budget)) == best


def test_a_tree_of_every_path_holds_every_path_once():
    logits = logits_of(3, 4)
    weights = weights_of(logits)
    paths = paths_of(build_tree(logits, budget=1000))
    assert len(paths) == len(weights) == 4 + 16 + 64
    assert set(paths) == set(weights)


@pytest.mark.parametrize("seed", range(5))
def test_a_smaller_budget_gives_the_beginning_of_the_larger_tree(seed):
    logits = logits_of(7, 30, seed)
    large = build_tree(logits, 64)
    for budget in (1, 3, 8, 32, 63):
        small, cut = build_tree(logits, budget), large.first(budget)
        for name in ("tokens", "parents", "depths"):
            np.testing.assert_array_equal(getattr(small, name), getattr(cut, name))


def test_a_tree_of_width_one_is_the_chain_of_likeliest_tokens():
    """(fault kind 70)"""
    logits = logits_of(7, 30)
    for tree in (build_tree(logits, budget=7, width=1), CHAIN.draft(logits)):
        assert tree.tokens.tolist() == logits.argmax(-1).tolist()
        assert tree.parents.tolist() == list(range(7))
        assert tree.depths.tolist() == list(range(1, 8))


def test_a_confident_drafter_spends_the_whole_budget_on_the_spine():
    logits = torch.zeros(5, 20)
    logits[:, 3] = 30.0
    assert build_tree(logits, 5).parents.tolist() == CHAIN.draft(logits).parents.tolist()


def test_equal_logits_are_taken_in_order_of_token_id():
    logits = torch.zeros(2, 50)
    logits[0, 40] = 1.0
    assert build_tree(logits, 4).tokens.tolist()[0] == 40
    assert top_slots(logits, 3).ids.tolist() == [[40, 0, 1], [0, 1, 2]]
    # Also at the last place kept, where topk alone may pick any of them.
    assert all(top_slots(logits, k).ids[1].tolist() == list(range(k)) for k in range(1, 50))


def test_ties_between_paths_go_to_the_better_ranks():
    logits = torch.zeros(2, 2)
    assert paths_of(build_tree(logits, 6)) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_impossible_tokens_never_enter_the_tree():
    logits = torch.full((2, 6), -torch.inf)
    logits[:, :2] = 0.0
    assert set(paths_of(build_tree(logits, 50))) == {
        (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)
    }  # fmt: skip


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(value):
    logits = logits_of(3, 10)
    logits[1, 4] = value
    with pytest.raises(CheckpointError, match="not finite"):
        build_tree(logits, 4)


def test_low_precision_logits_are_normalised_in_float32():
    logits = logits_of(4, 300).bfloat16()
    expected = logits.float().log_softmax(-1).amax(-1)
    np.testing.assert_allclose(top_slots(logits, 1).logprobs[:, 0], expected, atol=1e-6)


def test_no_budget_no_nodes():
    assert len(build_tree(logits_of(3, 5), 0)) == 0
    assert build_tree(logits_of(3, 5), 0).ancestors().tolist() == [[True]]


def test_ancestors_by_hand():
    """A node sees the root, its ancestors and itself; rows look, columns are seen (fault 72)."""
    #        0
    #      1   2
    #     3 4   5
    tree = DraftTree(np.arange(5), np.array([0, 0, 1, 1, 2]), np.array([1, 1, 2, 2, 2]))
    assert tree.ancestors().astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_following_a_text_ends_where_the_tree_does():
    tree = DraftTree(np.array([7, 8, 9]), np.array([0, 0, 1]), np.array([1, 1, 2]))
    assert tree.follow([7, 9, 1]) == [1, 3]
    assert tree.follow([8, 9]) == [2]
    assert tree.follow([9]) == []


def test_labels_name_the_budget():
    assert [m.label for m in (CHAIN, Method("tree", 32))] == ["chain", "tree@32"]
