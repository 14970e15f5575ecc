"""Decoding a hybrid target: the text is the target's own whatever is drafted."""

import numpy as np
import pytest
import torch

from drafttrain.acceptance.decode import decode, walk
from drafttrain.acceptance.lossless import first_difference, near_tie_bound
from drafttrain.acceptance.sampling import greedy
from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tree import AUTOREGRESSIVE, CHAIN, DraftTree, Method, build_tree

from .factory import TAPS, greedy_text, limits, make_drafter, make_prompt
from .hybrids import CHUNK, CONV_KERNEL, make_hybrid
from .proposers import Spine, make_proposer, random_rule

BLOCK, TOKENS = 6, 128
LENGTHS = [1, CONV_KERNEL - 1, CHUNK, CHUNK + 1]
METHODS = [AUTOREGRESSIVE, CHAIN, Method("tree", 4), Method("tree", 24)]


@pytest.fixture(scope="module")
def target():
    return make_hybrid()


@pytest.fixture(scope="module")
def texts(target):
    """Prompt length -> the target's own greedy text, from plain forwards without a cache."""
    return {n: greedy_text(target, make_prompt(n, seed=n), TOKENS) for n in LENGTHS}


def proposer_of(name, target, prompt, text):
    return make_proposer(name, target, BLOCK, prompt.tolist() + text)


@pytest.mark.parametrize("name", ["oracle", "wrong", "random", "drafter"])
def test_greedy_text_is_the_targets_own_response_after_response(target, texts, name):
    """One session decodes prompts of every length with every method (fault kinds 69, 70).

    Shorter than the convolution, whole chunks of the chunk rule and one token more.
    """
    session = TargetSession(target, TAPS)
    for length in LENGTHS:
        prompt = make_prompt(length, seed=length)
        for method in METHODS:
            proposer = proposer_of(name, target, prompt, texts[length])
            result = decode(session, proposer, prompt, method, limits(TOKENS), greedy)
            assert result.tokens == texts[length]
            accepted = [item.accepted for item in result.log.rounds]
            if name == "oracle" and method.kind == "chain":
                assert all(count == BLOCK - 1 for count in accepted[:-1])
            if name == "wrong":
                assert sum(accepted) == 0


def test_a_tree_without_branches_is_the_chain(target, texts):
    """Rounds and text of a tree that only has the spine equal the chain's (fault kind 70)."""
    prompt, text = make_prompt(CHUNK, seed=CHUNK), texts[CHUNK]

    drafter, head = make_drafter(target, BLOCK)
    found = []
    for method in (CHAIN, Method("tree", BLOCK - 1)):
        proposer = Spine(drafter, head)
        result = decode(
            TargetSession(target, TAPS), proposer, prompt, method, limits(TOKENS), greedy
        )
        assert result.tokens == text
        found.append(result.log.rounds)
    assert found[0] == found[1]


def test_branches_never_lower_what_a_round_accepts(target, texts):
    """The same round with more and more branches behind the spine (fault kind 70)."""
    rng = np.random.default_rng(0)
    prompt, text = make_prompt(CHUNK, seed=CHUNK), texts[CHUNK]
    rule = random_rule(BLOCK, target.vocab_rows)
    session = TargetSession(target, TAPS)
    session.prefill(prompt)
    grown = 0
    for start in range(0, 30):
        spine = [int(t) for t in rng.integers(0, target.vocab_rows, BLOCK - 1)]
        right = int(rng.integers(0, BLOCK))
        spine[:right] = text[start + 1 : start + 1 + right]
        steps = np.arange(BLOCK - 1)
        tree = DraftTree(np.array(spine), steps, steps + 1)
        branches = build_tree(rule(text, start), 24)
        lengths = []
        for extra in (0, 6, 24):
            both = joined(tree, branches.first(extra))
            session.prefill(torch.cat([prompt, torch.tensor(text[:start], dtype=torch.long)]))
            logits = session.verify(text[start], both).logits
            accepted = len(walk(both, greedy(logits))[0]) - 1
            assert accepted >= (lengths[-1] if lengths else right)
            lengths.append(accepted)
        grown += lengths[-1] > lengths[0]
    assert grown > 0, "some branch must help, or nothing was tested"


def joined(spine, branches):
    """A spine with further nodes behind it; what both have stays once."""
    tokens, parents = spine.tokens.tolist(), spine.parents.tolist()
    depths = spine.depths.tolist()
    table = {(p, t): i for i, (p, t) in enumerate(zip(parents, tokens, strict=True), start=1)}
    moved = {0: 0}
    for node in range(1, len(branches) + 1):
        parent, token = moved[int(branches.parents[node - 1])], int(branches.tokens[node - 1])
        if (parent, token) not in table:
            tokens.append(token)
            parents.append(parent)
            depths.append(int(branches.depths[node - 1]))
            table[parent, token] = len(tokens)
        moved[node] = table[parent, token]
    return DraftTree(np.array(tokens), np.array(parents), np.array(depths))


def test_bfloat16_differs_at_near_ties_only():
    """Single tokens and trees run other kernels; a flip needs a margin below the bound (77)."""
    low = make_hybrid(dtype=torch.bfloat16, seed=2)
    responses = flips = 0
    for seed in range(4):
        prompt = make_prompt(10, seed=seed)
        session = TargetSession(low, TAPS)
        baseline = decode(session, None, prompt, AUTOREGRESSIVE, limits(24), greedy)
        for method in METHODS[1:]:
            proposer = proposer_of("random", low, prompt, [])
            result = decode(session, proposer, prompt, method, limits(24), greedy)
            position = first_difference(baseline.tokens, result.tokens)
            responses += 1
            if position is not None:
                flips += 1
                bound = near_tie_bound(low.dtype, baseline.peaks[position])
                assert baseline.margins[position] < bound
    assert flips < responses, "if everything differs, it is not rounding"
