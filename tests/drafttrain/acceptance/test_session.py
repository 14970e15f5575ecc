"""Verifying a tree in one forward equals decoding along each of its paths."""

import logging
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from drafttrain.acceptance.session import TargetSession, tree_mask
from drafttrain.acceptance.tree import EMPTY_TREE, DraftTree
from tests.extract.factory import load_target_at, save_target

from .factory import TAPS, VOCAB, make_prompt, make_target, plain_logits
from .hybrids import make_hybrid
from .trees import path_to, random_tree, tokens_of


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module", params=[make_target, make_hybrid])
def any_target(request):
    """Full attention alone, and mixed with recurrent layers."""
    return request.param()


def test_every_node_has_the_logits_and_taps_of_plain_decoding_along_its_path(any_target):
    target = any_target
    rng = np.random.default_rng(0)
    prompt = make_prompt(9)
    session = TargetSession(target, TAPS)
    session.prefill(prompt)
    tree = random_tree(rng, 12)
    verified = session.verify(5, tree)
    for node in range(13):
        text = prompt.tolist() + tokens_of(tree, path_to(tree, node), 5)
        torch.testing.assert_close(
            verified.logits[node], plain_logits(target, text)[-1], atol=1e-4, rtol=1e-4
        )
        hidden = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.stack([hidden[layer + 1][0, -1] for layer in TAPS])
        torch.testing.assert_close(verified.taps[node], expected, atol=1e-4, rtol=1e-4)


def test_after_random_commits_the_next_logits_are_those_of_a_plain_forward(any_target):
    """100 random trees, each followed by a commit of a random path (fault kind 69)."""
    target = any_target
    rng = np.random.default_rng(1)
    session = TargetSession(target, TAPS)
    for _ in range(10):
        prompt = make_prompt(int(rng.integers(1, 12)), seed=int(rng.integers(1000)))
        text = prompt.tolist()
        logits = session.prefill(prompt).logits[0]
        for _ in range(10):
            torch.testing.assert_close(logits, plain_logits(target, text)[-1], atol=1e-4, rtol=1e-4)
            tree = random_tree(rng, int(rng.integers(0, 14)))
            anchor = int(rng.integers(VOCAB))
            verified = session.verify(anchor, tree)
            path = path_to(tree, int(rng.integers(0, len(tree) + 1)))
            session.commit(path)
            text += tokens_of(tree, path, anchor)
            logits = verified.logits[path[-1]]
            assert session.length == len(text)


def test_the_whole_mask_by_hand():
    """Three prefix tokens, then five nodes; rows look at columns (fault kind 72)."""
    tree = DraftTree(np.arange(4), np.array([0, 0, 1, 2]), np.array([1, 1, 2, 2]))
    mask = tree_mask(torch.from_numpy(tree.ancestors()), prefix=3, dtype=torch.float32)
    low = torch.finfo(torch.float32).min
    assert mask.shape == (1, 1, 5, 8)
    assert (mask[0, 0] == torch.where(torch.tensor([
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1, 0, 1],
    ]) == 1, 0.0, low)).all()  # fmt: skip


def test_only_ancestors_matter(any_target):
    """Changing any node changes its descendants and nothing else, to the last bit (fault 72)."""
    rng = np.random.default_rng(2)
    tree = random_tree(rng, 10)
    session = TargetSession(any_target, TAPS)

    def verified(tokens):
        session.prefill(make_prompt(3))
        return session.verify(5, DraftTree(tokens, tree.parents, tree.depths))

    before, sees = verified(tree.tokens), tree.ancestors()
    for node in range(1, 11):
        changed = tree.tokens.copy()
        changed[node - 1] = (changed[node - 1] + 1) % VOCAB
        after = verified(changed)
        for other in range(11):
            same = torch.equal(before.logits[other], after.logits[other])
            same_taps = torch.equal(before.taps[other], after.taps[other])
            assert (same, same_taps) == (not sees[other, node],) * 2


def test_dropped_nodes_leave_nothing_behind(any_target):
    """What was rejected cannot be seen later, nor how much it was (fault kind 69)."""
    rng, session = np.random.default_rng(3), TargetSession(any_target, TAPS)

    def after(tree):
        session.prefill(make_prompt(7))
        session.verify(5, tree)
        session.commit([0])
        return session.verify(6, EMPTY_TREE).logits

    small, first, second = after(EMPTY_TREE), *(after(random_tree(rng, 12)) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, small, atol=1e-4, rtol=1e-4)  # shapes round differently


@pytest.mark.parametrize("memory", [0.7, 1e-4])
def test_a_target_spread_over_devices_decodes_as_the_whole_one(tmp_path, memory):
    folder = save_target(tmp_path / "target", max_position_embeddings=512)
    found = []
    for target in (load_target_at(folder), load_target_at(folder, memory)):
        rng, session = np.random.default_rng(4), TargetSession(target, TAPS)
        rounds = [session.prefill(make_prompt(9, target.vocab_rows))]
        for _ in range(6):
            tree = random_tree(rng, 12)
            tree = replace(tree, tokens=tree.tokens % target.vocab_rows)
            rounds.append(session.verify(5, tree))
            session.commit(path_to(tree, int(rng.integers(13))))
        found.append(rounds)
    for whole, parts in zip(*found, strict=True):
        assert torch.equal(whole.logits, parts.logits) and torch.equal(whole.taps, parts.taps)


def test_rejected_rounds_must_be_committed_before_the_next(target):
    session = TargetSession(target, TAPS)
    session.prefill(make_prompt(3))
    session.verify(5, EMPTY_TREE)
    with pytest.raises(AssertionError, match="verify follows"):
        session.verify(5, EMPTY_TREE)


def test_nothing_is_deprecated_on_the_way(target, caplog):
    logging.getLogger("transformers").propagate = True
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        session = TargetSession(target, TAPS)
        session.prefill(make_prompt(3))
        session.verify(5, random_tree(np.random.default_rng(0), 4))
        session.commit([0])
    assert not caplog.records


def test_both_names_of_the_cache_argument_are_understood(target, monkeypatch):
    """Transformers called it past_key_values before 5.24."""
    forward, seen = target.model.forward, []
    name = "past_key_values"

    def older(input_ids, attention_mask=None, position_ids=None, past_key_values=None, **rest):
        if past_key_values is not None:  # plain forwards of the trial have none
            assert isinstance(past_key_values, DynamicCache)
            seen.append(name)
            rest[session_name] = past_key_values
        return forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **rest)

    plain = TargetSession(target, TAPS)
    session_name = plain._cache_name
    expected = plain.prefill(make_prompt(4)).logits, plain.verify(5, EMPTY_TREE).logits
    monkeypatch.setattr(target.model, "forward", older)
    old = TargetSession(target, TAPS)
    assert old._cache_name == name
    got = old.prefill(make_prompt(4)).logits, old.verify(5, EMPTY_TREE).logits
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert seen
