"""Source files: formats, filters, limits, places."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafttrain.data.config import SourceConfig
from drafttrain.data.drops import DropLog
from drafttrain.data.errors import DataError
from drafttrain.data.sources import Conversation, TokenRecord, read_source

from .chat_factory import assistant, user, write_jsonl

ROW = {"messages": [user("Q"), assistant("A")]}


def read(path, **fields):
    drops = DropLog()
    return list(read_source(SourceConfig(path=path, name="s", **fields), drops)), drops


def test_messages_and_conversations_become_equal_conversations(tmp_path):
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    path = write_jsonl(
        tmp_path / "a.jsonl", [{**ROW, "id": 7}, {"conversations": turns, "system": "S"}]
    )
    (first, second), drops = read(path)
    assert first == Conversation(ROW["messages"], None, f"{path} line 1", "7")
    assert second.messages == [{"role": "system", "content": "S"}, *ROW["messages"]]
    assert drops.total == 0


def test_blank_lines_are_skipped_and_a_half_written_last_line_is_counted(tmp_path):
    """(fault kind 16)"""
    path = tmp_path / "a.jsonl"
    line = json.dumps(ROW)
    path.write_text(f"\ufeff{line}\n\n   \n{line}\n{line[:-9]}", encoding="utf-8")
    records, drops = read(path)
    assert [record.row_ref for record in records] == [f"{path} line 1", f"{path} line 4"]
    assert dict(drops.counts) == {"unfinished_last_line": 1}
    assert drops.examples["unfinished_last_line"][0].startswith(f"{path} line 5")


def test_complete_last_line_without_newline_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW))
    assert len(read(path)[0]) == 1


def test_where_and_limit_choose_rows(tmp_path):
    rows = [{**ROW, "split": "test" if i % 3 == 0 else "train", "i": i} for i in range(9)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    records, _ = read(path, where={"split": "test"})
    assert [r.row_ref.split()[-1] for r in records] == ["1", "4", "7"]
    records, _ = read(path, where={"split": "test"}, limit=2)
    assert [r.row_ref.split()[-1] for r in records] == ["1", "4"]


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [
        ("greedy", True),
        ({"temperature": 0.0}, True),
        ("t1", False),
        ({"temperature": 0.7}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_token_records_are_taken_as_they_are(tmp_path, sampling, greedy, suffix):
    row = {"prompt_ids": [5, 6], "response_ids": [7], "sampling": sampling, "logprobs": [0.5]}
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, [row])
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    (record,), _ = read(path)
    assert isinstance(record, TokenRecord)
    assert record.prompt_ids.tolist() == [5, 6] and record.response_ids.tolist() == [7]
    assert record.prompt_ids.dtype == np.int64
    assert record.greedy is greedy


def test_parquet_reads_every_row_group_and_names_rows(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"prompt_ids": [i], "response_ids": [i, i], "part": i % 2} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    records, _ = read(path, where={"part": 1})
    assert [int(r.prompt_ids[0]) for r in records] == list(range(1, 3000, 2))
    assert records[-1].row_ref == f"{path} row 2999"


def test_parquet_nulls_inside_messages_mean_absent_keys(tmp_path):
    """A struct column gives every message the keys of all messages (fault kind 11)"""
    calls = [{"function": {"name": "get", "arguments": {"city": "Rome"}}}]
    others = [{"function": {"name": "now", "arguments": {"zone": "UTC"}}}]
    rows = [
        {"messages": [user("Q"), assistant("", tool_calls=calls)]},
        {"messages": [user("Q"), assistant("", tool_calls=others)]},
        {"messages": [user("Q"), assistant("A", reasoning_content="why")]},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    (first, second, third), _ = read(path)
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}
    assert third.messages == rows[2]["messages"]


def test_tombstones_never_become_records(tmp_path):
    """(fault kind 17)"""
    path = write_jsonl(tmp_path / "a.jsonl", [ROW, {"id": "1", "discarded": "empty_response"}])
    records, drops = read(path)
    assert len(records) == 1
    assert dict(drops.counts) == {"discarded_response": 1}


def test_filter_on_a_column_that_parquet_lacks_names_the_columns(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt_ids": [1], "response_ids": [1]}]), path)
    with pytest.raises(DataError, match=r"\['prompt_ids', 'response_ids'\], where .*'split'"):
        read(path, where={"split": "test"})
