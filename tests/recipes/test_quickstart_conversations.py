"""The conversation files of the quickstart are what their README says."""

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "recipes" / "quickstart" / "conversations"
STOP_ID = 2  # <|im_end|>
FILES = ("train", "eval")


def _rows(name: str) -> list[dict[str, Any]]:
    text = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _loops(ids: list[int]) -> bool:
    tail = ids[-64:]
    periods = range(1, 17)
    return len(tail) == 64 and any(tail[p:] == tail[:-p] for p in periods)


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_a_finished_greedy_token_record(name: str) -> None:
    for row in _rows(name):
        assert set(row) >= {"id", "messages", "prompt_ids", "response_ids", "finish", "sampling"}
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert (row["finish"], row["sampling"]) == ("stop", "greedy")
        assert row["prompt_ids"] and 24 <= len(row["response_ids"]) <= 256
        assert row["response_ids"].index(STOP_ID) == len(row["response_ids"]) - 1
        assert not _loops(row["response_ids"]) and not _loops(row["response_ids"][:-1])


def test_no_prompt_occurs_twice_or_in_both_files() -> None:
    prompts = [tuple(row["prompt_ids"]) for name in FILES for row in _rows(name)]
    assert len(set(prompts)) == len(prompts)


def test_the_files_stay_small() -> None:
    assert sum((FOLDER / f"{name}.jsonl").stat().st_size for name in FILES) < 1_500_000
