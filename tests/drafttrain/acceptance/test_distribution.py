"""Sampled decoding emits the target's distribution, by exact enumeration on a 4-token target.

The real sampler is driven through every outcome: each draw is scripted to the middle of one token's
interval of uniform numbers, whose width is the outcome's probability. The probabilities of all runs
that emit the same first three tokens add up to what the target assigns to those tokens, or the rule
is wrong. A rule that accepts too much is caught (last test).
"""

import itertools
from functools import partial

import pytest
import torch

from drafttrain.acceptance import decode as decoding
from drafttrain.acceptance.sampling import Sampler, probabilities
from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tree import AUTOREGRESSIVE, CHAIN, Method
from drafttrain.drafter.session import DrafterSession

from .factory import TAPS, limits, make_drafter, make_prompt, make_target, plain_logits
from .proposers import RuleProposer, random_rule

V, LENGTH, BLOCK = 4, 3, 4
PROMPT = make_prompt(5, vocab=V, seed=1)
METHODS = [AUTOREGRESSIVE, CHAIN, *(Method("tree", budget) for budget in (2, 6, 20))]


@pytest.fixture(scope="module")
def target():
    """In float64, so that 1e-6 tests the rule and not the arithmetic."""
    target = make_target(vocab=V, initializer_range=0.15)
    target.model.double()
    return target


def exact(target, temperature):
    """What the target assigns to every text of three tokens."""
    result = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        ids = PROMPT.tolist() + list(text)
        weights = probabilities(plain_logits(target, ids), temperature)
        steps = [float(weights[len(PROMPT) - 1 + i, token]) for i, token in enumerate(text)]
        result[text] = torch.tensor(steps, dtype=torch.float64).prod().item()
    return result


class Script:
    """Scripts the draws of one run and notes the branches it did not take."""

    def __init__(self, outcomes, temperature):
        self._outcomes = list(outcomes)
        self.taken, self.probability, self.unexplored = [], 1.0, []
        self._temperature, self._next = temperature, 0.0
        self._sampler = Sampler(temperature, lambda: self._next)

    def __call__(self, logits):
        at = self._sampler(logits)

        def token(node):
            weights = probabilities(logits[node], self._temperature)
            depth = len(self.taken)
            outcome = self._outcomes[depth] if depth < len(self._outcomes) else 0
            if depth >= len(self._outcomes):
                self.unexplored += [(*self.taken, other) for other in range(1, V)]
            edges = weights.cumsum(0)
            self._next = float(edges[outcome] - weights[outcome] / 2)
            self.taken.append(outcome)
            self.probability *= float(weights[outcome])
            assert at(node) == outcome, "the sampler was driven to this token"
            return outcome

        return token


def enumerate_runs(target, proposer, method, temperature, wrap=lambda script: script):
    """Distribution of the first three emitted tokens over all runs of the sampler."""
    result, open_branches, runs = {}, [()], 0
    session = TargetSession(target, TAPS)
    while open_branches:
        script = Script(open_branches.pop(), temperature)
        decoded = decoding.decode(session, proposer, PROMPT, method, limits(LENGTH), wrap(script))
        open_branches += script.unexplored
        text = tuple(decoded.tokens)
        result[text] = result.get(text, 0.0) + script.probability
        runs += 1
    assert abs(sum(result.values()) - 1) < 1e-9, f"{runs} runs leave something out"
    return result


def proposer_of(name, target):
    if name == "drafter":
        drafter, head = make_drafter(target, BLOCK)
        return DrafterSession(drafter.double(), head)
    return RuleProposer(random_rule(BLOCK, V, seed=int(name)), BLOCK, [])


def worst_error(target, found, temperature):
    expected = exact(target, temperature)
    return max(abs(found.get(text, 0.0) - weight) for text, weight in expected.items())


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize(
    ("name", "temperature"), [("0", 1.0), ("1", 1.0), ("drafter", 1.0), ("0", 0.5)]
)
def test_the_emitted_distribution_is_the_targets(target, method, name, temperature):
    """For the chain and for trees (fault kinds 73, 74)."""
    found = enumerate_runs(target, proposer_of(name, target), method, temperature)
    assert worst_error(target, found, temperature) < 1e-6


def test_the_distribution_is_far_from_degenerate(target):
    weights = exact(target, 1.0).values()
    assert max(weights) < 0.3 and min(weights) > 1e-4


@pytest.mark.parametrize("method", METHODS[1:], ids=lambda m: m.label)
def test_accepting_by_membership_in_the_top_two_fails_the_check(target, method, monkeypatch):
    """The check can tell a wrong rule: this one accepts more and distorts the text (fault 74)."""

    class Seen:
        """A node's token as usual, and the logits that the wrong rule looks at."""

        def __init__(self, script, logits):
            self.logits, self._at = logits, script(logits)

        def __call__(self, node):
            return self._at(node)

    def lenient_walk(tree, seen):
        children, path, tokens = tree.children(), [0], []
        while True:
            likely = seen.logits[path[-1]].topk(2).indices.tolist()
            accepted = [token for token in children[path[-1]] if token in likely]
            tokens.append(accepted[0] if accepted else seen(path[-1]))
            child = children[path[-1]].get(tokens[-1])
            if child is None:
                return path, tokens
            path.append(child)

    monkeypatch.setattr(decoding, "walk", lenient_walk)
    found = enumerate_runs(
        target, proposer_of("0", target), method, 1.0, lambda script: partial(Seen, script)
    )
    assert worst_error(target, found, 1.0) > 0.01
