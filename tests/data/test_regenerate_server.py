"""Regeneration through a real local HTTP server: resume, discards, retries, clear failures."""

import json

import pytest

from drafttrain.data import generate_server
from drafttrain.data.chat import ChatTemplate
from drafttrain.data.config import DataConfig, RegenerateConfig
from drafttrain.data.errors import DataError
from drafttrain.data.prepare import prepare
from drafttrain.data.regenerate import regenerate
from drafttrain.data.samples import read_table

from .chat_factory import MASK_ID, REWRITING, STOP_IDS, VOCAB_ROWS, assistant, make_tokenizer, user
from .chat_factory import write_jsonl as write
from .chat_server import ChatServer

TOKENIZER = make_tokenizer()


def text_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def echo(body) -> tuple[int, dict]:
    """Answers "Q" with "Q!", as vLLM writes it."""
    prompt = ChatTemplate(TOKENIZER, {}).prompt_ids(body["messages"])
    ids = text_ids(f"{body['messages'][-1]['content']}!<|im_end|>")
    return 200, {
        "prompt_token_ids": prompt,
        "choices": [{"finish_reason": "stop", "token_ids": ids}],
    }


def rejecting(body) -> tuple[int, dict]:
    """Refuses three of ten prompts, and has nothing to say to another."""
    number = int(body["messages"][-1]["content"][1:])
    if number % 10 in (1, 4, 7):
        return 400, {"error": "prompt too long"}
    if number % 10 == 9:
        status, reply = echo(body)
        reply["choices"][0]["token_ids"] = list(STOP_IDS)
        return status, reply
    return echo(body)


def prompts(tmp_path, count):
    rows = [{"id": f"p{i}", "messages": [user(f"q{i}")]} for i in range(count)]
    return write(tmp_path / "prompts.jsonl", rows)


def run(tmp_path, server, tokenizer=TOKENIZER, template_kwargs=None, **fields):
    config = RegenerateConfig(
        **{
            "prompts": tmp_path / "prompts.jsonl",
            "output": tmp_path / "responses.jsonl",
            "engine": "server",
            "server_url": server.url,
            "server_model": "toy",
            "concurrency": 8,
            "max_new_tokens": 20,
            **fields,
        }
    )
    return regenerate(
        config,
        tokenizer,
        template_kwargs=template_kwargs or {},
        stop_ids=STOP_IDS,
        target_name="toy",
    )


def output(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(generate_server, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(generate_server, "_ATTEMPTS", 3)


def test_record_holds_prompt_answer_and_how_it_was_sampled(tmp_path):
    prompts(tmp_path, 1)
    with ChatServer(echo) as server:
        counts = run(tmp_path, server)
    assert output(tmp_path) == [
        {
            "id": "p0",
            "messages": [user("q0"), assistant("q0!")],
            "prompt_ids": text_ids("<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"),
            "response_ids": text_ids("q0!<|im_end|>"),
            "finish": "stop",
            "sampling": "greedy",
        }
    ]
    assert dict(counts) == {"kept": 0, "responses": 1, "tokens": 4, "other_prompt_ids": 0}
    assert server.bodies[0]["return_token_ids"] is True
    assert server.bodies[0]["temperature"] == 0.0 and server.bodies[0]["max_tokens"] == 20


def test_killed_midway_and_resumed_answers_each_prompt_exactly_once(tmp_path):
    """Answers arrive out of order; the last line is cut off as by a kill (fault kind 16)"""
    prompts(tmp_path, 100)
    with (
        ChatServer(echo, latency=0.02, die_after=50) as dying,
        pytest.raises(DataError, match=r"does not answer.*run the same command again"),
    ):
        run(tmp_path, dying)
    first = output(tmp_path)
    assert {r["messages"][0]["content"] for r in first} == set(dying.calls), "no answer is lost"
    assert len(first) == 50
    path = tmp_path / "responses.jsonl"
    path.write_bytes(b"\n" + path.read_bytes()[:-15])
    with ChatServer(echo, latency=0.02) as server:
        counts = run(tmp_path, server)
    assert counts["kept"] == 49 and counts["responses"] == 51
    assert set(server.calls.values()) == {1}
    records = [json.loads(line) for line in path.read_text().split("\n") if line]
    assert sorted(r["id"] for r in records) == sorted(f"p{i}" for i in range(100))
    assert [r["id"] for r in records] != [f"p{i}" for i in range(100)], "out of order"
    with ChatServer(echo) as server:
        assert run(tmp_path, server)["kept"] == 100
    assert not server.calls


def test_requests_are_in_flight_together_but_no_more_than_asked(tmp_path):
    prompts(tmp_path, 40)
    with ChatServer(echo, latency=0.05) as server:
        run(tmp_path, server, concurrency=4)
    assert server.most_at_once == 4


def test_discarded_prompts_leave_tombstones_and_cost_nothing_again(tmp_path):
    """(fault kind 17)"""
    prompts(tmp_path, 40)
    with ChatServer(rejecting) as server:
        counts = run(tmp_path, server)
    assert (counts["responses"], counts["discarded"]) == (24, 16)
    reasons = [r["discarded"].split(":")[0] for r in output(tmp_path) if "discarded" in r]
    assert sorted(reasons) == ["empty_response"] * 4 + ["rejected_by_server"] * 12
    with ChatServer(rejecting) as server:
        counts = run(tmp_path, server)
    assert not server.calls and counts["kept"] == 40
    config = DataConfig(
        train=[{"path": tmp_path / "responses.jsonl", "name": "t"}],
        eval=[
            {"path": write(tmp_path / "e.jsonl", [{"messages": [user("x"), assistant("y")]}])}
            | {"name": "e"}
        ],
        max_length=99,
    )
    prepare(
        config,
        TOKENIZER,
        vocab_rows=VOCAB_ROWS,
        mask_token_id=MASK_ID,
        stop_ids=STOP_IDS,
        out_dir=tmp_path / "samples",
    )
    table = read_table(tmp_path / "samples" / "train.parquet")
    assert len(table) == 24 and all(sample.greedy for sample in table)
    assert table.manifest["drops"] == {"discarded_response": 16}


def test_refusal_of_every_prompt_is_an_error_and_no_tombstone(tmp_path):
    """A wrong set-up must not mark the whole job as done (fault kind 17)"""
    prompts(tmp_path, 20)
    with (
        ChatServer(lambda body: (400, {"error": "unknown field"})) as server,
        pytest.raises(DataError, match=r"none of 20 prompts was answered.*unknown field"),
    ):
        run(tmp_path, server)
    assert output(tmp_path) == []
    with ChatServer(echo) as server:
        assert run(tmp_path, server)["responses"] == 20


def test_busy_server_is_asked_again(tmp_path):
    prompts(tmp_path, 5)
    tries = {}

    def busy_once(body):
        text = body["messages"][-1]["content"]
        tries[text] = tries.get(text, 0) + 1
        return echo(body) if tries[text] > 1 else (503, {"error": "busy"})

    with ChatServer(busy_once) as server:
        assert run(tmp_path, server)["responses"] == 5
    assert set(server.calls.values()) == {2}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: (401, {"error": "key"}), "status 401.*check server_url and server_model"),
        (lambda body: (200, {"choices": [{"message": {}}]}), "returned no token ids"),
        (lambda body: (200, {"choices": []}), "returned no token ids"),
        (lambda body: (200, [1]), "returned no token ids"),
        (lambda body: (500, {"error": "crash"}), "does not answer.*status 500"),
    ],
)
def test_wrong_setup_stops_with_one_sentence(tmp_path, answer, message):
    prompts(tmp_path, 3)
    with ChatServer(answer) as server, pytest.raises(DataError, match=message):
        run(tmp_path, server)
    assert output(tmp_path) == []


def test_wrong_setup_is_noticed_without_asking_for_every_prompt(tmp_path):
    prompts(tmp_path, 60)
    with (
        ChatServer(lambda body: (401, {"error": "key"}), latency=0.01) as server,
        pytest.raises(DataError, match="status 401"),
    ):
        run(tmp_path, server, concurrency=4)
    assert len(server.calls) <= 2 * 4


def test_wrong_address_stops_with_one_sentence(tmp_path):
    prompts(tmp_path, 3)
    with ChatServer(echo) as server:
        url = server.url
        with pytest.raises(DataError, match="status 404"):
            run(tmp_path, server, server_url=f"{url}/v1")
    with pytest.raises(DataError, match="does not answer"):
        run(tmp_path, server)


def test_sampled_rows_keep_their_temperature_and_template_variables_travel(tmp_path):
    prompts(tmp_path, 1)
    with ChatServer(echo) as server:
        run(
            tmp_path,
            server,
            make_tokenizer(REWRITING),
            {"enable_thinking": False},
            temperature=0.7,
        )
    (record,) = output(tmp_path)
    assert record["sampling"] == {"temperature": 0.7}
    (body,) = server.bodies
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["top_p"], body["top_k"]) == (1.0, -1)


def test_prompts_the_server_renders_differently_are_reported(tmp_path, caplog):
    """(fault kind 79)"""
    prompts(tmp_path, 1)
    with ChatServer(echo) as server:
        counts = run(tmp_path, server, make_tokenizer(REWRITING))
    assert counts["other_prompt_ids"] == 1
    assert "1 prompts have other ids at the server" in caplog.text
    served = text_ids("<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n")
    assert output(tmp_path)[0]["prompt_ids"] == served


def test_tool_calls_travel_in_the_form_of_the_api(tmp_path):
    calls = [{"function": {"name": "get", "arguments": {"city": "Rome"}}}]
    turns = [user("Q"), assistant("", tool_calls=calls), {"role": "tool", "content": "4"}]
    tools = [{"type": "function", "function": {"name": "get"}}]
    write(tmp_path / "prompts.jsonl", [{"messages": turns, "tools": tools}])

    def answer(body):
        return 200, {"prompt_token_ids": [9], "choices": [{"token_ids": text_ids("A<|im_end|>")}]}

    with ChatServer(answer) as server:
        run(tmp_path, server, make_tokenizer(REWRITING))
    (body,) = server.bodies
    assert body["tools"] == tools
    assert body["messages"][1]["tool_calls"] == [
        {
            "id": "call-0",
            "type": "function",
            "function": {"name": "get", "arguments": '{"city": "Rome"}'},
        }
    ]
    (record,) = output(tmp_path)
    assert record["tools"] == tools and record["prompt_ids"] == [9]
