"""Decoding: the output is the target's own whatever is drafted, and rounds are counted exactly."""

import pytest
import torch

from drafttrain.acceptance.decode import decode
from drafttrain.acceptance.lossless import first_difference, near_tie_bound
from drafttrain.acceptance.sampling import greedy, make_chooser
from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tree import AUTOREGRESSIVE, CHAIN, Method

from .factory import (
    TAPS,
    VOCAB,
    greedy_text,
    limits,
    make_drafter,
    make_prompt,
    make_target,
    plain_logits,
)
from .proposers import RULES, RuleProposer, Spine, make_proposer

BLOCK = 6
METHODS = [AUTOREGRESSIVE, CHAIN, *(Method("tree", budget) for budget in (1, 3, 5, 12, 40))]
PROMPTS = [make_prompt(length, seed=length) for length in (1, 2, 7, 30)]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def texts(target):
    """Prompt length -> the target's own greedy text, from plain forwards."""
    return {len(prompt): greedy_text(target, prompt, 48) for prompt in PROMPTS}


def proposer_of(name, target, prompt, text, block_size=BLOCK):
    return make_proposer(name, target, block_size, prompt.tolist() + text)


def run(target, proposer, prompt, method, limit, choose=greedy):
    return decode(TargetSession(target, TAPS), proposer, prompt, method, limit, choose)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize("name", ["oracle", "wrong", "random", "drafter"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_output_is_the_targets_own(target, texts, prompt, name, method):
    """For the oracle, the always-wrong, the random and a real drafter (fault kinds 69, 77)."""
    text = texts[len(prompt)]
    result = run(target, proposer_of(name, target, prompt, text), prompt, method, limits(24))
    assert result.tokens == text[:24] and not result.stopped
    assert result.log.tokens == 23
    assert len(result.margins) == len(result.peaks) == 24 and min(result.margins) > 0


def test_the_text_wanders_so_that_equality_means_something(texts):
    assert all(len(set(text)) > 8 for text in texts.values())


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_an_oracle_reaches_exactly_the_block_size(target, texts, block_size, kind):
    """Block 8: 7 draft tokens and the bonus, 8 emitted in every full round (fault kind 78)."""
    prompt, text = PROMPTS[2], texts[len(PROMPTS[2])]
    method = CHAIN if kind == "chain" else Method("tree", block_size - 1)
    proposer = proposer_of("oracle", target, prompt, text, block_size)
    result = run(target, proposer, prompt, method, limits(1 + 4 * block_size))
    assert [item.emitted for item in result.log.rounds] == [block_size] * 4
    assert [item.accepted for item in result.log.rounds] == [block_size - 1] * 4
    assert result.log.tau == block_size


@pytest.mark.parametrize("method", METHODS[1:], ids=lambda m: m.label)
def test_an_always_wrong_drafter_gives_tau_one(target, texts, method):
    prompt, text = PROMPTS[1], texts[len(PROMPTS[1])]
    result = run(target, proposer_of("wrong", target, prompt, text), prompt, method, limits(20))
    assert {item.emitted for item in result.log.rounds} == {1} and result.log.tau == 1.0


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_spine_only_tree_is_the_chain(target, prompt):
    """Equal tokens and equal rounds, one by one (fault kind 70)."""
    drafter, head = make_drafter(target, BLOCK)
    results = [
        run(target, Spine(drafter, head), prompt, method, limits(40))
        for method in (CHAIN, Method("tree", BLOCK - 1))
    ]
    assert results[0].tokens == results[1].tokens
    assert results[0].log.rounds == results[1].log.rounds


class Half(RuleProposer):
    """The oracle, but the second-ranked token is right at every second slot."""

    def draft(self, anchor_id):
        logits = super().draft(anchor_id)
        logits[1::2, 0] = 21.0
        return logits


def test_a_tree_that_contains_the_chain_accepts_at_least_as_much(target, texts):
    """(fault kind 70)"""
    prompt, text = PROMPTS[3], texts[len(PROMPTS[3])]
    full = prompt.tolist() + text
    rule = RULES["oracle"](BLOCK, VOCAB)
    results = {}
    for method in (CHAIN, Method("tree", 40)):
        result = run(target, Half(rule, BLOCK, full), prompt, method, limits(40))
        results[method.kind] = {item.anchor: item.accepted for item in result.log.rounds}
    shared = results["chain"].keys() & results["tree"].keys()
    assert shared and all(results["tree"][at] >= results["chain"][at] for at in shared)
    assert any(results["tree"][at] > results["chain"][at] for at in shared)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize("name", ["oracle", "random"])
def test_the_length_limit_cuts_at_every_offset(target, texts, method, name):
    prompt, text = PROMPTS[2], texts[len(PROMPTS[2])]
    for limit in range(1, 2 * BLOCK + 3):
        proposer = proposer_of(name, target, prompt, text)
        result = run(target, proposer, prompt, method, limits(limit))
        assert result.tokens == text[:limit] and not result.stopped
        assert result.log.tokens == limit - 1
        assert all(r.emitted - r.accepted in (0, 1) for r in result.log.rounds)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize("name", ["oracle", "random"])
def test_a_stop_token_cuts_at_every_offset(target, texts, method, name):
    """As the first token, inside an accepted path, as its end, as the bonus."""
    prompt, text = PROMPTS[2], texts[len(PROMPTS[2])]
    for offset in range(2 * BLOCK + 2):
        if text[offset] in text[:offset]:
            continue
        proposer = proposer_of(name, target, prompt, text)
        result = run(target, proposer, prompt, method, limits(40, text[offset]))
        assert result.tokens == text[: offset + 1] and result.stopped
        assert result.log.tokens == offset


def test_every_stop_id_stops(target, texts):
    prompt, text = PROMPTS[2], texts[len(PROMPTS[2])]
    unseen = next(i for i in range(VOCAB) if i not in text)
    first, second = [i for i, token in enumerate(text) if token not in text[:i]][4:6]
    for stops in ([unseen, text[first]], [text[first], text[second]], [text[second], text[first]]):
        proposer = proposer_of("oracle", target, prompt, text)
        result = run(target, proposer, prompt, CHAIN, limits(40, *stops))
        assert result.tokens == text[: first + 1] and result.stopped


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("name", ["oracle", "random", "drafter"])
def test_with_one_seed_every_method_samples_the_same_text(target, name, temperature):
    """Draws and emitted tokens correspond one to one, so drafting cannot change the text."""
    prompt = PROMPTS[2]
    baseline = run(
        target, None, prompt, AUTOREGRESSIVE, limits(24), make_chooser(temperature, 3, "s")
    )
    for method in METHODS[1:]:
        proposer = proposer_of(name, target, prompt, baseline.tokens)
        chooser = make_chooser(temperature, 3, "s")
        assert run(target, proposer, prompt, method, limits(24), chooser).tokens == baseline.tokens


def test_a_vanishing_temperature_is_greedy(target, texts):
    """(fault kind 73)"""
    prompt = PROMPTS[3]
    for method in METHODS:
        proposer = proposer_of("drafter", target, prompt, [])
        chooser = make_chooser(1e-6, 0, "s")
        result = run(target, proposer, prompt, method, limits(20), chooser)
        assert result.tokens == texts[len(prompt)][:20]


class Observer:
    """The oracle that continues whatever was really committed, by asking the target."""

    block_size = BLOCK

    def __init__(self, target, prompt, committed):
        self._target, self._prompt, self._committed = target, prompt, committed

    def reset(self):
        self._length = 0

    def append_context(self, taps):
        self._length += len(taps)

    def draft(self, anchor_id):
        text = [*(self._prompt.tolist() + self._committed)[: self._length], anchor_id]
        logits = torch.zeros(BLOCK - 1, VOCAB)
        for slot in range(BLOCK - 1):
            text.append(int(plain_logits(self._target, text)[-1].argmax()))
            logits[slot, text[-1]] = 20.0
        return logits


def test_truth_is_recomputed_after_a_near_tie_flips(target, texts):
    """One flip at token 10: later drafts are judged by the text that was emitted (fault 76)."""
    prompt, text = PROMPTS[3], texts[len(PROMPTS[3])]
    committed = []

    def flipping(logits):
        at = greedy(logits)

        def token(node):
            best = at(node)
            if len(committed) == 10:  # the two best tokens swap, once
                best = int(logits[node].topk(2).indices[1])
            committed.append(best)
            return best

        return token

    proposer = Observer(target, prompt, committed)
    result = run(target, proposer, prompt, CHAIN, limits(40), flipping)
    assert first_difference(result.tokens, text) == 10
    behind = [item for item in result.log.rounds if item.anchor > len(prompt) + 10]
    assert len(behind) >= 3 and all(item.accepted == BLOCK - 1 for item in behind[:-1])
    # A reference fixed beforehand would have called nearly all of this wrong.
    wrong = sum(a != b for a, b in zip(result.tokens[10:], text[10:40], strict=True))
    assert wrong > 15


def test_bfloat16_differs_at_near_ties_only():
    """Float32 is exact (see above); here a flip needs a margin below the bound (fault kind 77)."""
    low = make_target(dtype=torch.bfloat16, seed=4)
    flips = 0
    for seed in range(6):
        prompt = make_prompt(10, seed=seed)
        baseline = run(low, None, prompt, AUTOREGRESSIVE, limits(32))
        for method in METHODS[1:]:
            proposer = proposer_of("random", low, prompt, [])
            result = run(low, proposer, prompt, method, limits(32))
            position = first_difference(baseline.tokens, result.tokens)
            if position is not None:
                flips += 1
                bound = near_tie_bound(low.dtype, baseline.peaks[position])
                assert baseline.margins[position] < bound
    assert flips < 6 * len(METHODS[1:]), "if everything differs, it is not rounding"


def test_stage_times_cover_every_stage_of_the_rounds(target, texts):
    prompt, text = PROMPTS[2], texts[len(PROMPTS[2])]
    result = run(target, proposer_of("random", target, prompt, text), prompt, CHAIN, limits(10))
    assert set(result.seconds) == {"draft", "tree", "verify", "commit"}
    assert all(value > 0 for value in result.seconds.values()) and result.prefill_seconds > 0
    plain = run(target, None, prompt, AUTOREGRESSIVE, limits(10))
    assert plain.seconds["draft"] == plain.seconds["tree"] == 0.0 < plain.seconds["verify"]
