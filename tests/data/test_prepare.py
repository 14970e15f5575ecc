"""From source files to the two tables of a run."""

import logging

import pytest

from drafttrain.data.config import DataConfig
from drafttrain.data.drops import RowDropped
from drafttrain.data.errors import DataError, TemplateError
from drafttrain.data.loss_mask import Marked
from drafttrain.data.prepare import prepare
from drafttrain.data.prepare_checks import CorpusRules
from drafttrain.data.samples import SampleTable, read_table

from . import chat_factory as toy
from .chat_factory import (
    MASK_ID,
    STOP_IDS,
    VOCAB_ROWS,
    assistant,
    make_tokenizer,
    user,
    write_jsonl,
)


def chat(question: str, answer: str) -> dict:
    return {"messages": [user(question), assistant(answer)]}


def record(prompt: list[int], response: list[int]) -> dict:
    return {"prompt_ids": prompt, "response_ids": response, "sampling": "greedy"}


EVAL = [chat("held out", "answer")]


def run(folder, train, eval_rows=EVAL, *, template=toy.CHATML, max_length=200, **limits) -> None:
    """Prepare rows into ``folder / "samples"``."""
    config = DataConfig(
        train=[{"path": write_jsonl(folder / "train.jsonl", train), "name": "t"}],
        eval=[{"path": write_jsonl(folder / "eval.jsonl", eval_rows), "name": "e"}],
        max_length=max_length,
    )
    limits = {"vocab_rows": VOCAB_ROWS, "mask_token_id": MASK_ID, "stop_ids": STOP_IDS} | limits
    prepare(config, make_tokenizer(template), out_dir=folder / "samples", **limits)


def table(folder, split="train") -> SampleTable:
    return read_table(folder / "samples" / f"{split}.parquet")


def test_tables_and_manifest_hold_what_the_sources_gave(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = [
        chat("Q", "A"),
        record([10, 11], [12, 13, STOP_IDS[0]]),
        {"messages": [user("Q"), {"role": "alien", "content": ""}]},
        chat("Q", "A"),
    ]
    run(tmp_path, rows)
    first, second = table(tmp_path)
    # user: start "user\n" Q end "\n", header: start "assistant\n"; then A and end.
    assert first.loss_mask.tolist() == [False] * (1 + 5 + 1 + 1 + 1 + 1 + 10) + [True] * 2
    assert (first.source, first.mode, first.greedy) == ("t", "no_think", False)
    assert second.input_ids.tolist() == [10, 11, 12, 13, STOP_IDS[0]]
    assert second.loss_mask.tolist() == [False, False, True, True, True]
    assert second.greedy
    manifest = table(tmp_path).manifest
    assert manifest["drops"] == {"unknown_role": 1, "duplicate": 1}
    assert manifest["sources"]["t"] == {
        "records": 3,
        "samples": 2,
        "tokens": 27,
        "supervised_tokens": 5,
        "supervised_share": round(5 / 27, 4),
        "greedy_samples": 1,
        "truncated": 0,
        "modes": {"think": 0, "no_think": 2, "tool": 0},
        "drops": {"unknown_role": 1, "duplicate": 1},
        "drop_examples": manifest["sources"]["t"]["drop_examples"],
    }
    (line,) = [m for m in caplog.messages if m.startswith("train t:")]
    assert "2 samples, 27 tokens, 18.5 % supervised" in line
    assert f"1 unknown_role (first: {tmp_path / 'train.jsonl'} line 3" in line


def test_modes_are_counted_per_sample(tmp_path):
    """(fault kind 20)"""
    think = {"messages": [user("a"), assistant("A", reasoning_content="why")]}
    tool = {"messages": [user("b"), assistant("A")], "tools": [{"type": "function"}]}
    called = {"messages": [user("c"), {"role": "tool", "content": "4"}, assistant("A")]}
    run(tmp_path, [think, tool, called, chat("d", "A")], template=toy.REWRITING)
    assert table(tmp_path).manifest["modes"] == {"think": 1, "no_think": 1, "tool": 2}
    assert [s.mode for s in table(tmp_path)] == ["think", "tool", "tool", "no_think"]


@pytest.mark.parametrize(
    ("response", "extra", "mode"),
    [
        ("why</think>A<|im_end|>", {}, "think"),
        ("still thinki", {}, "think"),
        ("</think>A<|im_end|>", {}, "no_think"),
        ("<tool_call>get</tool_call>", {}, "tool"),
        ("why</think>A", {"tools": [{"type": "function"}]}, "tool"),
    ],
)
def test_mode_of_a_token_record_is_read_from_its_text(tmp_path, response, extra, mode):
    tokenizer = make_tokenizer()
    ids = [tokenizer.encode(t, add_special_tokens=False) for t in ("Q<think>\n", response)]
    run(tmp_path, [{**record(*ids), **extra}])
    assert table(tmp_path)[0].mode == mode


@pytest.mark.parametrize(
    ("left", "kept"), [(-5, False), (0, False), (1, False), (2, True), (7, True), (8, True)]
)
def test_supervised_tokens_are_counted_after_truncation(tmp_path, left, kept):
    """(fault kind 14)"""
    prompt, response = list(range(20, 50)), list(range(60, 75))
    rows = [record(prompt, response), record([8], [8, 9])]
    run(tmp_path, rows, [record([9], [9, 8])], max_length=30 + left)
    samples = list(table(tmp_path))
    assert len(samples) == 1 + kept
    manifest = table(tmp_path).manifest
    assert manifest["drops"] == ({} if kept else {"nothing_left_after_truncation": 1})
    assert manifest["sources"]["t"]["truncated"] == kept
    if kept:
        assert samples[0].input_ids.tolist() == (prompt + response)[: 30 + left]
        assert samples[0].loss_mask.sum() == left


def test_everything_truncated_away_is_an_error_that_lists_the_reasons(tmp_path):
    """(fault kinds 2, 14)"""
    with pytest.raises(DataError, match=r"'t'.*no sample.*2 nothing_left_after_truncation"):
        run(tmp_path, [chat("Q" * 40, "A"), chat("R" * 40, "B")], max_length=34)


def test_turns_of_one_token_hold_no_anchor(tmp_path):
    """(fault kinds 2, 14)"""
    rows = [record([15, 16], [7]), record([15, 16], [7, 8])]
    run(tmp_path, rows)
    assert table(tmp_path).manifest["drops"] == {"too_few_supervised_tokens": 1}


def test_supervised_tokens_that_never_touch_hold_no_anchor():
    """(fault kind 14)"""
    rules = CorpusRules(max_length=9, vocab_rows=9, mask_token_id=8, stop_ids=frozenset())
    apart, together = [False, True, False, True], [False, True, True, False]
    with pytest.raises(RowDropped, match="too_few_supervised_tokens"):
        rules.apply(Marked([1, 2, 3, 4], apart, "think"), "row")
    assert rules.apply(Marked([1, 2, 3, 4], together, "think"), "row")[1].tolist() == together


def test_ids_are_valid_up_to_the_last_embedding_row(tmp_path):
    """(fault kind 18)"""
    tokenizer = make_tokenizer()
    base = tokenizer.vocab_size
    tokenizer.add_tokens(["<new>", "<newer>"])
    last_added = len(tokenizer) - 1
    valid = [base - 1, base, last_added, VOCAB_ROWS - 1]
    run(tmp_path, [record([i], [i, i]) for i in valid])
    assert [int(s.input_ids[0]) for s in table(tmp_path)] == valid
    assert table(tmp_path).manifest["max_id"] == VOCAB_ROWS - 1
    with pytest.raises(DataError, match=rf"line 2 holds token id {VOCAB_ROWS},.*rows 0\.\."):
        run(tmp_path, [record([1], [1, 1]), record([VOCAB_ROWS], [1, VOCAB_ROWS + 1])])


def test_large_vocabularies_need_no_small_integer_type(tmp_path):
    """(fault kind 18)"""
    run(tmp_path, [record([70_000], [248_319, 40_000])], vocab_rows=248_320)
    assert table(tmp_path)[0].input_ids.tolist() == [70_000, 248_319, 40_000]


@pytest.mark.parametrize(
    ("mask_id", "message"),
    [
        (11, "train.jsonl line 2 holds the mask token id 11 at position 3"),
        (VOCAB_ROWS, "is not a row of the target's embedding"),
        (-1, "is not a row of the target's embedding"),
        (STOP_IDS[0], "is a stop token of the target"),
    ],
)
def test_mask_token_must_exist_and_never_occur(tmp_path, mask_id, message):
    """(fault kind 56)"""
    rows = [record([8, 9], [8, 9]), record([8, 9], [10, 11])]
    with pytest.raises(DataError, match=message):
        run(tmp_path, rows, mask_token_id=mask_id)


def test_mask_token_in_a_rendered_conversation_names_the_row(tmp_path):
    """(fault kind 56)"""
    with pytest.raises(DataError, match=r"train\.jsonl line 2 holds the mask token"):
        run(tmp_path, [chat("Q", "A"), chat("Q", "see <mask> there")])


def test_train_prompts_that_occur_in_eval_are_dropped(tmp_path):
    rows = [
        chat("Held  OUT", "another answer"),
        {"messages": [{"role": "system", "content": "S"}, *chat("held out", "x")["messages"]]},
        record([30, 31], [40, 41]),
        {"messages": [user("fresh"), assistant("A"), user("held out"), assistant("B")]},
    ]
    run(tmp_path, rows, [*EVAL, record([30, 31], [50, 51])])
    manifest = table(tmp_path).manifest
    assert manifest["drops"] == {"prompt_in_eval": 3}
    assert manifest["num_samples"] == 1


def test_train_prompt_inside_a_longer_eval_conversation_is_dropped(tmp_path):
    long = [user("one"), assistant("A"), user("two"), assistant("B")]
    tokenizer = make_tokenizer()
    prompt = tokenizer.apply_chat_template(long[:3], add_generation_prompt=True, return_dict=False)
    run(tmp_path, [record(prompt, [40, 41]), record([9], [9, 9])], [{"messages": long}])
    assert table(tmp_path).manifest["drops"] == {"prompt_in_eval": 1}


def test_rows_the_template_refuses_are_dropped_and_the_others_kept(tmp_path):
    """(fault kind 12)"""
    rows = [chat(f"q{i}", "A") for i in range(8)]
    rows.insert(2, {"messages": [{"role": "system", "content": "S"}, assistant("A")]})
    rows.insert(5, {"messages": [{"role": "tool", "content": "4"}, assistant("A")]})
    run(tmp_path, rows, template=toy.REWRITING)
    manifest = table(tmp_path).manifest
    assert manifest["num_samples"] == 8
    assert manifest["drops"] == {"template_raised": 2}
    assert "No user query found" in manifest["sources"]["t"]["drop_examples"]["template_raised"][0]


def test_template_that_fails_on_every_row_is_refused(tmp_path):
    """(fault kinds 1, 2, 7)"""
    with pytest.raises(TemplateError, match=r"'e'.*cannot be trusted.*prompt_not_prefix"):
        run(tmp_path, [chat("Q", "A")], template=toy.UNSTABLE)
    assert not (tmp_path / "samples" / "eval.parquet").exists()


def test_token_records_need_no_chat_template(tmp_path):
    run(tmp_path, [record([8], [8, 9])], [record([9], [8, 9])], template=None)
    assert len(table(tmp_path)) == 1


def test_rewriting_template_gives_a_sample_per_turn(tmp_path):
    turns = [user("Q"), assistant("A"), user("R"), assistant("B")]
    run(tmp_path, [{"messages": turns}], template=toy.REWRITING)
    assert table(tmp_path).manifest["sources"]["t"]["records"] == 1
    assert len(table(tmp_path)) == 2


def times(folder) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in (folder / "samples").iterdir()}


def test_unchanged_inputs_keep_the_finished_tables(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(tmp_path, [chat("Q", "A")])
    before = times(tmp_path)
    run(tmp_path, [chat("Q", "A")])
    assert times(tmp_path) == before
    assert set(before) == {
        f"{split}.{end}" for split in ("train", "eval") for end in ("parquet", "manifest.json")
    }
    assert "up to date, kept" in caplog.messages[-1]


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 199},
        {"vocab_rows": VOCAB_ROWS + 1},
        {"mask_token_id": MASK_ID - 1},
        {"template": toy.CHATML + "{# another #}"},
        {"train": [chat("Q", "B")]},
        {"eval_rows": [chat("other", "B")]},
    ],
)
def test_changed_inputs_rebuild_both_tables(tmp_path, change):
    run(tmp_path, [chat("Q", "A")])
    before = times(tmp_path)
    run(tmp_path, **{"train": [chat("Q", "A")], **change})
    after = times(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)


def test_damaged_table_is_rebuilt(tmp_path):
    run(tmp_path, [chat("Q", "A")])
    whole = table(tmp_path).manifest
    path = tmp_path / "samples" / "train.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    run(tmp_path, [chat("Q", "A")])
    assert table(tmp_path).manifest == whole


def test_failed_rebuild_leaves_the_finished_tables(tmp_path):
    run(tmp_path, [chat("Q", "A")])
    before = [table(tmp_path, split).manifest for split in ("train", "eval")]
    with pytest.raises(DataError):
        run(tmp_path, [chat("Q", "<mask>")], [chat("new", "eval")])
    assert [table(tmp_path, split).manifest for split in ("train", "eval")] == before
