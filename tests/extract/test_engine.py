"""Target forwards: every state belongs to its own token and its own sample."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.extract.engine import Engine, plan_batches, plan_rows
from drafttrain.extract.target import build_target

from .factory import (
    VOCAB,
    extract_features,
    make_model,
    make_target,
    make_tokenizer,
    without_layers,
)

TAPS = [0, 2, 4]


def make_ids(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_batches_hold_every_sample_once_within_the_budget(lengths, batch_tokens):
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert len(batch) * longest <= batch_tokens or len(batch) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_rows_hold_every_sample_once_and_no_two_could_be_one(lengths, batch_tokens):
    rows = plan_rows(lengths, batch_tokens)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert all(n <= batch_tokens or len(row) == 1 for n, row in zip(used, rows, strict=True))
    assert all(a + b > batch_tokens for a, b in itertools.combinations(used, 2))


def test_groups_are_told_apart_and_asked_for_one_by_one():
    target, samples = make_target(), make_ids([5, 9, 4])
    asked = []

    def groups():
        for group in (samples[:2], samples[2:], samples):
            asked.append(len(group))
            yield group

    with Engine(target, TAPS, "fp32") as engine:
        found = engine.features(groups(), 9)
        first = next(found)
        assert asked == [2] and first.group == 0
        numbers = [(item.group, item.number) for item in found]
    assert sorted(numbers) == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5_text"])
def test_batched_samples_get_the_states_they_get_alone(kind):
    """(fault kind 39)"""
    target = make_target(kind)
    samples = make_ids([7, 20, 3, 20, 1, 12])
    together = {i: (t, f) for i, t, f in extract_features(target, TAPS, samples, 64)}
    assert set(together) == set(range(6))
    for i, ids in enumerate(samples):
        ((_, taps, final),) = extract_features(target, TAPS, [ids], 64)
        assert taps.shape == (len(ids), 3, target.hidden_size)
        assert torch.allclose(together[i][0], taps, atol=1e-5)
        assert torch.allclose(together[i][1], final, atol=1e-5)


def test_changing_a_neighbour_in_the_batch_changes_nothing():
    target = make_target()
    samples = make_ids([9, 9, 5])
    before = {i: taps for i, taps, _ in extract_features(target, TAPS, samples, 1000)}
    samples[0] = (samples[0] + 1) % VOCAB
    after = {i: taps for i, taps, _ in extract_features(target, TAPS, samples, 1000)}
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


def test_state_t_belongs_to_token_t():
    """A target whose layers do nothing: each state is its token's embedding. (fault kind 29)"""
    target = build_target(without_layers(make_model()), make_tokenizer())
    samples = make_ids([11, 4])
    for i, taps, final in extract_features(target, TAPS, samples, 1000):
        embedded = target.embed(torch.from_numpy(samples[i].astype(np.int64)))
        assert len(taps) == len(final) == len(samples[i])
        for tap in range(len(TAPS)):
            assert torch.equal(taps[:, tap], embedded)
        assert torch.allclose(final, target.norm(embedded), atol=1e-6)


def test_states_depend_on_their_own_and_earlier_tokens_only():
    """(fault kind 29)"""
    target = make_target()
    (ids,) = make_ids([12])
    changed = ids.copy()
    changed[6] = (changed[6] + 1) % VOCAB
    ((_, before, _),) = extract_features(target, TAPS, [ids], 100)
    ((_, after, _),) = extract_features(target, TAPS, [changed], 100)
    moved = (before != after).flatten(1).any(dim=1)
    assert moved.tolist() == [t >= 6 for t in range(12)]


def test_final_is_the_models_own_last_hidden_state():
    """(fault kind 27)"""
    target = make_target("qwen3")
    (ids,) = make_ids([10])
    ((_, _, final),) = extract_features(target, TAPS, [ids], 100)
    with torch.no_grad():
        output = target.model(
            torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True
        )
    assert torch.allclose(final, output.hidden_states[-1][0], atol=1e-6)
    assert torch.allclose(target.logits(final), output.logits[0], atol=1e-5)


def test_common_prefixes_are_computed_for_every_sample():
    """(fault kind 23)"""
    target = make_target()
    prefix, *rest = make_ids([16, 4, 6])
    samples = [np.concatenate([prefix, ids]) for ids in rest]
    for i, taps, _ in extract_features(target, TAPS, samples, 1000):
        assert len(taps) == len(samples[i])
