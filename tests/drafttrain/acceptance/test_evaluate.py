"""Evaluation of a store: what is measured, what is left out, and how parts of ranks merge."""

import logging
from dataclasses import replace

import pytest
import torch

from drafttrain.acceptance.config import EvalConfig
from drafttrain.acceptance.evaluate import evaluate_replay, replay_store
from drafttrain.acceptance.live import decode_store, evaluate_live, live_indices
from drafttrain.acceptance.records import LiveResult, ReplayResult, merge
from drafttrain.acceptance.summary import live_sections, replay_section
from drafttrain.data.errors import TargetError

from .factory import (
    greedy_text,
    make_drafter,
    make_prompt,
    make_store,
    make_target,
    stored,
)
from .proposers import drafting

BLOCK, VOCAB = 6, 16
CONFIG = EvalConfig(
    tree_budgets=[4, 16], live_prompts=2, max_new_tokens=30, context_buckets=[16, 32],
    bootstrap_resamples=100,
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return make_target(vocab=VOCAB)


@pytest.fixture(scope="module")
def store(target, tmp_path_factory):
    samples = []
    for seed, source, mode, length, tokens in [
        (1, "math", "think", 5, 60),
        (2, "math", "no_think", 12, 20),
        (3, "chat", "no_think", 8, 25),
        (4, "math", "think", 6, 12),
        (5, "chat", "no_think", 9, 2),
    ]:
        prompt = make_prompt(length, VOCAB, seed)
        text = greedy_text(target, prompt, tokens)
        samples.append(stored(prompt.tolist(), text, source=source, mode=mode))
    sampled = make_prompt(10, VOCAB, seed=9).tolist()
    samples.insert(2, stored(sampled[:4], sampled[4:], source="chat", greedy=False))
    return make_store(tmp_path_factory.mktemp("store") / "eval", target, samples)


@pytest.fixture(scope="module")
def trained(target):
    return make_drafter(target, BLOCK)


@pytest.fixture(scope="module")
def replayed(store, trained):
    return evaluate_replay(*trained, store, CONFIG, progress=False)


@pytest.fixture(scope="module")
def live(target, store, trained):
    config = CONFIG.model_copy(update={"temperatures": [0.0, 0.8]})
    return evaluate_live(target, *trained, store, config, progress=False), config


def test_every_token_of_greedy_responses_is_replayed_and_others_are_counted(replayed):
    assert (replayed.samples, replayed.skipped) == (5, 1)
    for method in ("autoregressive", "chain", "tree@4", "tree@16"):
        mine = [item.tally for item in replayed.records if item.method == method]
        assert sum(tally.tokens for tally in mine) == 59 + 19 + 24 + 11 + 1
    baseline = [item.tally for item in replayed.records if item.method == "autoregressive"]
    assert all(tally.tau == 1.0 for tally in baseline)


def test_rounds_fall_into_the_bucket_of_their_own_anchor(replayed):
    """A long response crosses buckets: 5 prompt tokens, 60 in the response."""
    mine = {
        item.bucket: item.tally.tokens
        for item in replayed.records
        if item.method == "autoregressive" and item.mode == "think" and item.tally.tokens > 11
    }
    assert mine == {"<=16": 12, "<=32": 16, ">32": 31}


def test_the_first_ids_of_the_first_prompts_are_shown(replayed, store):
    """(fault kind 79)"""
    assert replayed.prompt_heads["math"] == store.index(0).input_ids[:5].tolist()
    # Also of samples that are not replayed: the first chat sample was sampled, not greedy.
    assert replayed.prompt_heads["chat"] == store.index(2).input_ids[:4].tolist()


def test_parts_of_ranks_merge_to_the_whole(store, trained, replayed):
    parts = [
        evaluate_replay(*trained, store, CONFIG, range(rank, 6, 2), progress=False)
        for rank in range(2)
    ]
    sent = [ReplayResult.model_validate_json(part.model_dump_json()) for part in parts]
    merged = merge(sent)
    assert (merged.samples, merged.skipped) == (5, 1)
    assert merged.prompt_heads.keys() == replayed.prompt_heads.keys()
    assert replay_section(merged, CONFIG).rows == replay_section(replayed, CONFIG).rows
    assert parts[0].records and len(parts[0].records) < len(merged.records)


def test_live_parts_merge_too(target, store):
    known = drafting("oracle", BLOCK, VOCAB)
    parts = [decode_store(target, known, store, CONFIG, [i], progress=False) for i in (0, 1)]
    merged = merge([LiveResult.model_validate_json(part.model_dump_json()) for part in parts])
    whole = decode_store(target, known, store, CONFIG, [0, 1], progress=False)
    assert merged.records == whole.records and len(merged.speed) == len(whole.speed) == 8


def test_an_empty_part_merges(store, trained, replayed):
    empty = evaluate_replay(*trained, store, CONFIG, [], progress=False)
    assert merge([empty, replayed]) == replayed


def test_the_first_prompts_of_every_data_set_are_decoded(store):
    assert live_indices(store, 2) == [0, 1, 2, 3]
    assert live_indices(store, 0) == []


def test_every_prompt_temperature_and_method_is_decoded(live):
    result, _ = live
    runs = {(item.sample_id, item.temperature, item.method) for item in result.speed}
    assert len(runs) == len(result.speed) == 4 * 2 * 4
    assert all(item.identical for item in result.outputs)
    assert len(result.outputs) == 4 * 2 * 3


def test_live_greedy_decoding_runs_over_the_stored_text(live):
    """Three of the four prompts have greedy text; all of it is reproduced (fault kind 76)."""
    result, _ = live
    assert len(result.stored) == 3 and all(item.identical for item in result.stored)


def test_replay_agrees_with_live_round_for_round(live):
    result, config = live
    greedy, sampled = live_sections(result, config)
    assert [row.gap for row in greedy.gaps] == [0.0, 0.0, 0.0]
    assert [row.prompts for row in greedy.gaps] == [3, 3, 3]
    assert sampled.gaps == [] and sampled.stored is None
    names = {item.sample_id for item in result.replayed}
    both = [item for item in result.records if item.sample_id in names and item.temperature == 0]
    assert sorted(both, key=str) == sorted(result.replayed, key=str)


def test_a_limit_applies_to_live_and_replay_alike(live, store):
    """The first sample has 60 response tokens, the limit is 30: 29 in rounds."""
    result, _ = live
    name = store.index(0).sample_id
    for records in (result.records, result.replayed):
        key = (name, 0.0, "chain")
        mine = [i for i in records if (i.sample_id, i.temperature, i.method) == key]
        assert sum(item.tally.tokens for item in mine) == 29


def test_an_oracle_is_measured_as_one(target, store):
    """(fault kind 78)"""
    known = drafting("oracle", BLOCK, VOCAB)
    section = replay_section(replay_store(known, store, CONFIG, [0], progress=False), CONFIG)
    assert section.overall("chain").tau == pytest.approx(59 / 10)  # 9 full rounds and one of 5
    assert section.slots["chain"].unconditional == [1.0] * 5
    live = decode_store(target, known, store, CONFIG, [0], progress=False)
    assert live_sections(live, CONFIG)[0].overall("chain").tau == pytest.approx(29 / 5)


def test_a_prompt_that_does_not_fit_is_refused(store, trained):
    small = make_target(vocab=VOCAB, max_position_embeddings=32)
    with pytest.raises(TargetError, match=r"prompt of 5 tokens.*the target has 32"):
        evaluate_live(small, *trained, store, CONFIG, progress=False)


def test_bfloat16_reports_flips_with_their_margins(store):
    """The stored text is that of the float32 model: some of it flips (fault kind 77)."""
    low = make_target(vocab=VOCAB, dtype=torch.bfloat16)
    known = drafting("random", BLOCK, VOCAB)
    result = decode_store(low, known, store, CONFIG, [0, 1, 3], progress=False)
    section = live_sections(result, CONFIG)[0]
    for row in [*section.lossless, section.stored]:
        assert row.identical + len(row.differences) == row.responses == 3
        for item in row.differences:
            assert item.margin is not None and item.bound > 0
            assert item.near_tie == (item.margin < item.bound)


def test_rounds_behind_the_trained_length_are_counted_apart(target, store, caplog):
    """Of the first sample, positions 5 to 64, trained to 40 (fault kind 82)."""
    known = replace(drafting("oracle", BLOCK, VOCAB), trained_length=40)
    result = replay_store(known, store, CONFIG, [0], progress=False)
    chain = {item.beyond: item.tally for item in result.records if item.method == "chain"}
    # Anchors 5, 11, .. 35 and 41, 47, 53, 59: the last of these emits 5.
    anchors = [r for r in result.records if r.method == "autoregressive" and r.beyond]
    assert sum(item.tally.rounds for item in anchors) == 24  # 40 .. 63
    assert len(chain) == 2
    row = next(r for r in replay_section(result, CONFIG).beyond if r.method == "chain")
    whole = replay_section(result, CONFIG).overall("chain")
    assert row.rounds_within + row.rounds_beyond == whole.rounds == 10
    assert (row.rounds_within, row.tau_within) == (6, 6.0)
    assert row.tau_beyond == pytest.approx(23 / 4)
    with caplog.at_level(logging.WARNING):
        decode_store(target, known, store, CONFIG, [0], progress=False)
        assert not caplog.records  # 5 + 30 tokens stay within 40
        decode_store(target, replace(known, trained_length=34), store, CONFIG, [0], progress=False)
    assert "1 of 1 live prompts" in caplog.text and "the 34 tokens" in caplog.text


def test_a_drafter_of_unknown_training_is_not_judged_by_length(store):
    known = drafting("oracle", BLOCK, VOCAB)
    assert known.trained_length is None
    result = replay_store(known, store, CONFIG, [0], progress=False)
    assert replay_section(result, CONFIG).beyond == []
