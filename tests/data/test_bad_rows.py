"""A table of malformed source rows and files: each is one clear sentence or a counted reason."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from drafttrain.data.config import DataConfig
from drafttrain.data.drops import REASONS
from drafttrain.data.errors import DataError
from drafttrain.data.prepare import prepare
from drafttrain.data.samples import read_table

from .chat_factory import (
    MASK_ID,
    REWRITING,
    STOP_IDS,
    VOCAB_ROWS,
    assistant,
    make_tokenizer,
    user,
    write_jsonl,
)

GOOD = {"messages": [user("Q"), assistant("A")]}


def turns(*extra):
    return {"messages": [user("q"), *extra]}


def calls(*tool_calls):
    return turns({"role": "assistant", "content": "", "tool_calls": list(tool_calls)})


# A row (or a raw line), and the reason under which it is counted.
BAD_ROWS = {
    "not json": ("{'messages': []}", "invalid_json"),
    "two values on a line": ("{} {}", "invalid_json"),
    "nested too deeply": ("[" * 100_000, "invalid_json"),
    "not utf-8": (b'{"messages": "\xff"}', "not_utf8"),
    "a list": ([1, 2], "not_an_object"),
    "a number": (7, "not_an_object"),
    "other columns": ({"text": "hello"}, "no_messages"),
    "response without prompt": ({"response_ids": [1, 2]}, "no_messages"),
    "messages null": ({"messages": None}, "no_messages"),
    "messages text": ({"messages": "hello"}, "messages_not_a_list"),
    "messages empty": ({"messages": []}, "empty_conversation"),
    "message text": ({"messages": ["hello"]}, "message_not_an_object"),
    "no role": (turns({"content": "A"}), "missing_role"),
    "role number": (turns({"role": 3, "content": "A"}), "missing_role"),
    "role unknown": (turns({"role": "narrator", "content": "A"}), "unknown_role"),
    "from unknown": ({"conversations": [{"from": "alien", "value": "A"}]}, "unknown_role"),
    "content number": (turns({"role": "assistant", "content": 5}), "content_not_text"),
    "reasoning list": (turns(assistant("A", reasoning_content=["r"])), "content_not_text"),
    "image part": (turns(user([{"type": "image_url", "image_url": {}}])), "non_text_part"),
    "part without text": (turns(user([{"type": "text"}])), "non_text_part"),
    "silent assistant": (turns(assistant(" ")), "empty_assistant_turn"),
    "assistant null": (turns(assistant(None)), "empty_assistant_turn"),
    "only user": (turns(), "no_assistant_turn"),
    "only assistant": ({"messages": [assistant("A")]}, "no_assistant_turn"),
    "unclosed think": (turns(assistant("<think>why")), "unbalanced_think_tags"),
    "closed twice": (turns(assistant("a</think>b</think>c")), "unbalanced_think_tags"),
    "opened twice": (turns(assistant("<think><think>a</think>b")), "unbalanced_think_tags"),
    "opened late": (turns(assistant("Hi <think>a</think>b")), "unbalanced_think_tags"),
    "closed before opened": (turns(assistant("a</think>b<think>")), "unbalanced_think_tags"),
    "reasoning twice": (
        turns(assistant("r</think>A", reasoning_content="r")),
        "unbalanced_think_tags",
    ),
    "tool_calls mapping": (turns(assistant("", tool_calls={"a": 1})), "invalid_tool_calls"),
    "call without name": (calls({"function": {"arguments": {}}}), "invalid_tool_calls"),
    "call is text": (calls("get"), "invalid_tool_calls"),
    "function_call not json": (
        {"conversations": [{"from": "function_call", "value": "get()"}]},
        "invalid_tool_calls",
    ),
    "arguments not json": (
        calls({"function": {"name": "f", "arguments": "{city: Rome"}}),
        "invalid_tool_arguments",
    ),
    "arguments list": (
        calls({"function": {"name": "f", "arguments": "[1]"}}),
        "invalid_tool_arguments",
    ),
    "tools not json": ({**GOOD, "tools": "[{"}, "invalid_tools"),
    "tools of text": ({**GOOD, "tools": ["get"]}, "invalid_tools"),
    "no user turn": (
        {"messages": [{"role": "system", "content": "S"}, assistant("A")]},
        "template_raised",
    ),
    "stop token in text": (turns(assistant("a<|im_end|>b")), "stop_token_inside_turn"),
    "ids of text": ({"prompt_ids": ["a"], "response_ids": [1, 2]}, "ids_not_integers"),
    "ids of floats": ({"prompt_ids": [1.0], "response_ids": [1, 2]}, "ids_not_integers"),
    "ids of truths": ({"prompt_ids": [True], "response_ids": [1, 2]}, "ids_not_integers"),
    "ids not a list": ({"prompt_ids": 5, "response_ids": [1, 2]}, "ids_not_integers"),
    "negative id": ({"prompt_ids": [1], "response_ids": [-1, 2]}, "ids_not_integers"),
    "huge id": ({"prompt_ids": [1], "response_ids": [2**70, 2]}, "ids_not_integers"),
    "no prompt": ({"prompt_ids": [], "response_ids": [1, 2]}, "empty_prompt"),
    "no response": ({"prompt_ids": [1], "response_ids": []}, "empty_response"),
    "tombstone": ({"id": "a", "discarded": "empty_response"}, "discarded_response"),
    "one-token response": ({"prompt_ids": [1], "response_ids": [1]}, "too_few_supervised_tokens"),
    "prompt too long": ({"messages": [user("y" * 500), assistant("z")]}, "nothing_left_after_"),
    "seen before": (GOOD, "duplicate"),
    "prompt in eval": ({"messages": [user("held out"), assistant("B")]}, "prompt_in_eval"),
}


def run(tmp_path, train):
    eval_path = write_jsonl(
        tmp_path / "eval.jsonl", [{"messages": [user("held out"), assistant("A")]}]
    )
    config = DataConfig(
        train=[{"path": train, "name": "t"}],
        eval=[{"path": eval_path, "name": "e"}],
        max_length=200,
    )
    prepare(
        config,
        make_tokenizer(REWRITING),
        vocab_rows=VOCAB_ROWS,
        mask_token_id=MASK_ID,
        stop_ids=STOP_IDS,
        out_dir=tmp_path / "samples",
    )
    return read_table(tmp_path / "samples" / "train.parquet").manifest


def as_line(row) -> bytes:
    if isinstance(row, bytes):
        return row
    return (row if isinstance(row, str) else json.dumps(row)).encode()


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_counted_by_reason_and_its_neighbours_are_kept(tmp_path, name):
    row, reason = BAD_ROWS[name]
    path = tmp_path / "train.jsonl"
    neighbour = {"messages": [user("R"), assistant("B")]}
    path.write_bytes(b"\n".join([as_line(GOOD), as_line(row), as_line(neighbour), b""]))
    manifest = run(tmp_path, path)
    ((found, count),) = manifest["drops"].items()
    assert found.startswith(reason) and found in REASONS and count == 1
    (example,) = manifest["sources"]["t"]["drop_examples"][found]
    assert example.startswith(f"{path} line 2")
    assert manifest["num_samples"] == 2


def test_conversation_with_one_turn_beyond_the_limit_keeps_the_others(tmp_path):
    row = turns(assistant("x"), user("y" * 500), assistant("z"))
    manifest = run(tmp_path, write_jsonl(tmp_path / "train.jsonl", [row]))
    assert manifest["num_samples"] == 1
    assert manifest["drops"] == {"nothing_left_after_truncation": 1}


def write_bytes(content: bytes):
    return lambda path: path.write_bytes(content)


def parquet(rows):
    return lambda path: pq.write_table(pa.Table.from_pylist(rows), path)


def short_parquet(path):
    parquet([{"prompt_ids": [1], "response_ids": [1, 2]}])(path)
    path.write_bytes(path.read_bytes()[:-20])


def damaged_parquet(path):
    """Intact footer, damaged pages."""
    parquet([{"prompt_ids": [i], "response_ids": [1, 2]} for i in range(500)])(path)
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)


# A file that as a whole gives nothing, and what the error says besides its path.
BAD_FILES = {
    "missing.jsonl": (lambda path: None, "is not a file"),
    "folder.jsonl": (lambda path: path.mkdir(), "is not a file"),
    "empty.jsonl": (write_bytes(b""), "the file is empty"),
    "blank.jsonl": (write_bytes(b"\n  \n\n"), "the file is empty"),
    "binary.jsonl": (write_bytes(b"\x93NUMPY\xff\n\xfe\n"), "2 not_utf8 (first: "),
    "array.jsonl": (write_bytes(b"[\n{}\n]\n"), "2 invalid_json (first: "),
    "half.jsonl": (write_bytes(b'{"messages": ['), "1 unfinished_last_line (first: "),
    "wrong-columns.jsonl": (write_bytes(b'{"text": "a"}\n'), "1 no_messages (first: "),
    "text.parquet": (write_bytes(b"hello"), "is not a readable Parquet file"),
    "empty.parquet": (write_bytes(b""), "is not a readable Parquet file"),
    "short.parquet": (short_parquet, "is not a readable Parquet file"),
    "damaged.parquet": (damaged_parquet, "cannot be read after row 0"),
    "no-columns.parquet": (parquet([{"text": "a"}]), "has columns ['text']: it needs messages"),
    "null-ids.parquet": (
        parquet([{"prompt_ids": [1, None], "response_ids": [1, 2]}]),
        "1 ids_not_integers",
    ),
    "other-vocabulary.jsonl": (
        write_bytes(b'{"prompt_ids": [1], "response_ids": [2, 999999]}\n'),
        "line 1 holds token id 999999",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_one_clear_sentence_and_writes_nothing(tmp_path, name):
    make, message = BAD_FILES[name]
    path = tmp_path / name
    make(path)
    with pytest.raises(DataError) as caught:
        run(tmp_path, path)
    text = str(caught.value)
    assert str(path) in text and message in text and "\n" not in text
    assert not list((tmp_path / "samples").glob("*.parquet"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": []}, "at least 1 item"),
        ({"train": [{"path": "a.csv", "name": "a"}]}, "must end in .jsonl or .parquet"),
        ({"train": [{"path": "a.jsonl", "name": ""}]}, "at least 1 character"),
        ({"train": [{"path": "a.jsonl", "name": "a", "limit": 0}]}, "greater than 0"),
        ({"train": [{"path": "a.jsonl", "name": "a", "split": "x"}]}, "Extra inputs"),
        ({"max_length": 1}, "greater than 1"),
        ({"template_kwargs": {"tools": []}}, "template_kwargs cannot set ['tools']"),
        ({"regenerate": {"prompts": "a.txt"}}, "must end in .jsonl or .parquet"),
        ({"regenerate": {"output": "a.parquet"}}, "must end in .jsonl"),
        ({"regenerate": {"prompts": "a.jsonl", "output": "a.jsonl"}}, "the same file"),
    ],
)
def test_bad_settings_are_named(change, message):
    source = {"path": "a.jsonl", "name": "a"}
    good = {"train": [source], "eval": [source], "max_length": 8}
    DataConfig(**good)
    with pytest.raises(ValidationError) as caught:
        DataConfig(**{**good, **change})
    assert message in str(caught.value)
