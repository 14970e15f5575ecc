"""Gated DeltaNet hybrids: one forward over a tree equals plain forwards along each of its paths."""

import numpy as np
import pytest
import torch

from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tree import EMPTY_TREE, DraftTree

from .factory import TAPS, VOCAB, make_prompt, plain_logits
from .hybrids import make_hybrid, plain_rows
from .trees import leaves, path_to, random_tree, tokens_of

KINDS = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
NEXT = 8
TREES_PER_SEED = 25


@pytest.fixture(scope="module")
def target():
    return make_hybrid()


def any_tree(rng, trial):
    """2 to 128 nodes with the root: chains, deep, bushy and one-level trees in turn."""
    nodes = int(rng.integers(1, 128)) if trial else 127
    newest, depth = [(1, 200), (3, 200), (16, 15), (None, 1)][trial % 4]
    return random_tree(rng, nodes, depth, newest)


def assert_nodes_are_plain(target, logits, text, anchor, tree):
    """Every node of ``logits`` against a forward of its own path, one per leaf."""
    ends = [path_to(tree, leaf) for leaf in leaves(tree)]
    rows = plain_rows(target, [text + tokens_of(tree, path, anchor) for path in ends])
    for path, plain in zip(ends, rows, strict=True):
        torch.testing.assert_close(logits[path], plain[-len(path) :], atol=1e-4, rtol=1e-4)


def next_tokens(session, rng, one_by_one):
    """Logits of the next NEXT tokens, decoded singly or verified as a chain."""
    tokens = rng.integers(0, VOCAB, NEXT)
    if one_by_one:
        found = []
        for token in tokens.tolist():
            found.append(session.verify(token, EMPTY_TREE).logits)
            session.commit([0])
        return tokens, torch.cat(found)
    steps = np.arange(NEXT - 1)
    chain = DraftTree(tokens[1:], steps, steps + 1)
    found = session.verify(int(tokens[0]), chain).logits
    session.commit(list(range(NEXT)))
    return tokens, found


@pytest.mark.parametrize("seed", range(8))
def test_random_trees_and_what_follows_a_commit(target, seed):
    """200 trees over all seeds, 2 to 128 nodes (fault kinds 69, 70, 72).

    Each node has the logits of a plain forward of its path; after any node was committed, the next
    tokens have theirs, however they are run.
    """
    rng = np.random.default_rng(seed)
    session = TargetSession(target, TAPS)
    for trial in range(TREES_PER_SEED):
        text = make_prompt(int(rng.integers(1, 80)), seed=int(rng.integers(1000))).tolist()
        tree, anchor = any_tree(rng, trial), int(rng.integers(VOCAB))
        session.prefill(torch.tensor(text))
        verified = session.verify(anchor, tree)
        assert_nodes_are_plain(target, verified.logits, text, anchor, tree)
        path = path_to(tree, int(rng.integers(0, len(tree) + 1)))
        session.commit(path)
        text += tokens_of(tree, path, anchor)
        tokens, logits = next_tokens(session, rng, one_by_one=trial % 2 == 0)
        plain = plain_logits(target, text + tokens.tolist())[-NEXT:]
        torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_round_after_round(kind):
    """Commits add up: twelve rounds of trees and single tokens in one response."""
    target = make_hybrid(kind)
    rng, session = np.random.default_rng(1), TargetSession(target, TAPS)
    text = make_prompt(3).tolist()
    session.prefill(torch.tensor(text))
    for step in range(12):
        tree = random_tree(rng, 0 if step % 4 == 3 else int(rng.integers(1, 30)))
        anchor = int(rng.integers(VOCAB))
        logits = session.verify(anchor, tree).logits
        assert_nodes_are_plain(target, logits, text, anchor, tree)
        path = path_to(tree, int(rng.integers(0, len(tree) + 1)))
        session.commit(path)
        text += tokens_of(tree, path, anchor)
        assert session.length == len(text)


def test_a_response_leaves_nothing_to_the_next(target):
    """The same prompt twice with another response between: bit-equal (fault kind 69)."""
    rng, session = np.random.default_rng(5), TargetSession(target, TAPS)
    trees = [random_tree(rng, 20) for _ in range(3)]

    def respond(prompt):
        found = [session.prefill(prompt).logits]
        for tree in trees:
            found.append(session.verify(5, tree).logits)
            session.commit(path_to(tree, 7))
        return torch.cat(found)

    first = respond(make_prompt(11))
    other = respond(make_prompt(64, seed=9))
    assert not torch.equal(first, other)
    assert torch.equal(respond(make_prompt(11)), first)


def test_a_failed_round_leaves_the_layers_as_they_were(target):
    """An error in the middle of a verification must not leave the tree's forward in place."""
    session = TargetSession(target, TAPS)
    plain = plain_logits(target, [1, 2, 3])
    session.prefill(make_prompt(5))
    with pytest.raises(IndexError):
        session.verify(VOCAB + 5, random_tree(np.random.default_rng(6), 4))
    assert torch.equal(plain_logits(target, [1, 2, 3]), plain)
    assert all("forward" not in vars(layer.linear_attn) for layer in target.layers if
               hasattr(layer, "linear_attn"))  # fmt: skip


def test_positions_follow_depth_in_every_plane(target, monkeypatch):
    """Text, time, height and width of M-RoPE: siblings share a position, the prefix is counted."""
    seen = []
    rotary = target.decoder.rotary_emb
    real = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, ids: (seen.append(ids), real(x, ids))[1])
    session = TargetSession(target, TAPS)
    session.prefill(make_prompt(6))
    tree = DraftTree(np.arange(4), np.array([0, 0, 1, 3]), np.array([1, 1, 2, 3]))
    session.verify(5, tree)
    assert seen[-1].shape == (3, 1, 5)
    assert seen[-1].unique(dim=0).tolist() == [[[6, 7, 7, 8, 9]]]


def test_memory_does_not_hold_a_state_per_node():
    """128 nodes are kept in far fewer bytes than one state for each of them."""
    target = make_hybrid(linear_key_head_dim=64, linear_value_head_dim=64)
    session = TargetSession(target, TAPS)
    session.prefill(make_prompt(6))
    session.verify(5, random_tree(np.random.default_rng(7), 127, depth=15))
    memory, states = session._recurrent._memory, session._recurrent._states
    kept = sum(part.nbytes for part in (
        memory.inputs, memory.keys, memory.corrections, memory.decay))  # fmt: skip
    assert memory.keys.shape[1] == 128
    assert kept < 128 * states.nbytes / 20
