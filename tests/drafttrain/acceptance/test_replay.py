"""Replay from stored features gives the rounds that live decoding gives, one by one."""

import weakref
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from drafttrain.acceptance.decode import decode
from drafttrain.acceptance.replay import replay_span, spans_of
from drafttrain.acceptance.sampling import greedy
from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tree import CHAIN, Method, methods_of
from drafttrain.drafter.parallel import draft_anchors
from drafttrain.drafter.session import DrafterSession

from .factory import (
    TAPS,
    VOCAB,
    greedy_text,
    limits,
    make_drafter,
    make_prompt,
    make_store,
    make_target,
    stored,
)
from .proposers import drafting

BLOCK = 6
METHODS = methods_of([2, 5, 17, 60])


FEW = 12  # a vocabulary in which an untrained drafter is right often enough to matter


def greedy_store(target, path):
    samples = []
    for length, tokens in [(3, 40), (20, 25), (9, 2)]:
        prompt = make_prompt(length, target.vocab_rows, seed=length)
        samples.append(stored(prompt.tolist(), greedy_text(target, prompt, tokens)))
    return make_store(path / "eval", target, samples)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def store(target, tmp_path_factory):
    return greedy_store(target, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    target = make_target(vocab=FEW)
    return target, greedy_store(target, tmp_path_factory.mktemp("few"))


def live_rounds(target, proposer, sample, method, *stop_ids):
    start, end = spans_of(sample.loss_mask)[0]
    session = TargetSession(target, TAPS)
    prompt = sample.input_ids[:start]
    result = decode(session, proposer, prompt, method, limits(end - start, *stop_ids), greedy)
    assert result.tokens == sample.input_ids[start:end].tolist()
    return result.log.rounds


@pytest.mark.parametrize("seed", range(4))
def test_a_real_drafter_gets_the_same_rounds(few, seed):
    """Tokens, rounds, drafted nodes and accepted lengths, for chain and every tree."""
    target, store = few
    drafter, head = make_drafter(target, BLOCK, seed)
    lengths = {method.label: set() for method in METHODS}
    for number in range(3):
        sample = store.sample(number)
        span = spans_of(sample.loss_mask)[0]
        draft = partial(draft_anchors, drafter, head, sample, chunk=7)
        logs = replay_span(sample.input_ids, span, draft, METHODS)
        for method in METHODS:
            live = live_rounds(target, DrafterSession(drafter, head), sample, method)
            assert logs[method].rounds == live
            lengths[method.label] |= {item.accepted for item in live}
    assert len(lengths["chain"]) >= 2 and len(lengths["tree@60"]) >= 3


@pytest.mark.parametrize("name", ["oracle", "wrong", "random"])
def test_known_proposals_get_the_same_rounds(target, store, name):
    known = drafting(name, BLOCK, VOCAB)
    for number in range(3):
        sample = store.sample(number)
        span = spans_of(sample.loss_mask)[0]
        logs = replay_span(sample.input_ids, span, known.anchors(sample), METHODS)
        for method in METHODS:
            live = live_rounds(target, known.proposer(sample), sample, method)
            assert logs[method].rounds == live


def test_a_text_that_ends_on_a_stop_token_gets_the_same_rounds(target, store):
    known, sample = drafting("oracle", BLOCK, VOCAB), store.sample(0)
    start, end = spans_of(sample.loss_mask)[0]
    text = sample.input_ids[start:end].tolist()
    for offset in range(1, 20):
        if text[offset] in text[:offset]:
            continue
        span = (start, start + offset + 1)
        logs = replay_span(sample.input_ids, span, known.anchors(sample), METHODS)
        session = TargetSession(target, TAPS)
        for method in METHODS:
            live = decode(
                session, known.proposer(sample), sample.input_ids[:start], method,
                limits(100, text[offset]), greedy,
            )  # fmt: skip
            assert live.stopped and logs[method].rounds == live.log.rounds


def test_the_oracle_fills_every_block_but_the_last(store):
    """40 tokens, one from the prefill: 6 rounds of 6 and one of 3 (fault kind 78)."""
    known, sample = drafting("oracle", BLOCK, VOCAB), store.sample(0)
    logs = replay_span(sample.input_ids, (3, 43), known.anchors(sample), [CHAIN])
    assert [item.emitted for item in logs[CHAIN].rounds] == [6] * 6 + [3]
    assert [item.accepted for item in logs[CHAIN].rounds] == [5] * 6 + [3]


def test_tau_is_not_the_mean_over_anchors():
    """Half the text is easy and half is hard: the hard half takes most rounds."""
    length, easy = 400, 200
    ids = torch.arange(length)

    def draft(anchors):
        logits = torch.zeros(len(anchors), 7, length)
        for row, anchor in enumerate(anchors.tolist()):
            reach = 7 if anchor < easy else 1
            for slot in range(reach):
                logits[row, slot, min(anchor + 1 + slot, length - 1)] = 20.0
            logits[row, reach:, 0] = 20.0
        yield anchors, logits

    log = replay_span(ids, (1, length), draft, [CHAIN])[CHAIN]
    assert log.tau == pytest.approx(2 / (1 / 8 + 1 / 2), rel=0.02)  # 3.2, not the mean of 5


def test_a_wider_budget_never_accepts_less_at_the_same_anchor(few):
    target, store = few
    drafter, head = make_drafter(target, BLOCK)
    sample = store.sample(0)
    span = spans_of(sample.loss_mask)[0]
    draft = partial(draft_anchors, drafter, head, sample)
    logs = replay_span(sample.input_ids, span, draft, METHODS[2:])
    at = [{item.anchor: item.accepted for item in logs[method].rounds} for method in METHODS[2:]]
    for small, large in pairwise(at):
        shared = small.keys() & large.keys()
        assert shared and all(large[anchor] >= small[anchor] for anchor in shared)


def test_memory_holds_the_likeliest_tokens_only(store):
    """All anchors' logits are never held at once: each chunk is freed before the next."""
    sample, alive = store.sample(0), []

    def draft(anchors):
        for part in anchors.split(4):
            assert sum(reference() is not None for reference in alive) <= 1
            logits = torch.randn(len(part), BLOCK - 1, VOCAB)
            alive.append(weakref.ref(logits))
            yield part, logits
            del logits

    replay_span(sample.input_ids, (3, 43), draft, [CHAIN, Method("tree", 8)])
    assert len(alive) == 10


def test_spans_are_the_supervised_stretches_that_have_a_prompt():
    def spans(text):
        return spans_of(torch.tensor([c == "x" for c in text]))

    assert spans("..xxx..x.") == [(2, 5), (7, 8)]
    assert spans("....") == []
    assert spans("xxx") == [(1, 3)]  # the first token is the prompt
    assert spans("x.x") == [(2, 3)]


def test_a_response_of_one_token_has_no_round():
    logs = replay_span(torch.arange(5), (4, 5), lambda anchors: pytest.fail("drafted"), [CHAIN])
    assert logs[CHAIN].rounds == []


def test_responses_of_one_sample_are_replayed_separately(target):
    """The second response starts at its own first token, with the first one as context."""
    text = np.arange(30) % VOCAB
    seen = []

    def draft(anchors):
        seen.extend(anchors.tolist())
        yield anchors, torch.randn(len(anchors), 3, VOCAB)

    for span in [(4, 9), (20, 24)]:
        replay_span(torch.from_numpy(text), span, draft, [CHAIN])
    assert seen == [4, 5, 6, 7, 20, 21, 22]
