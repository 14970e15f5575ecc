"""Spellings of the same conversation become equal messages."""

import pytest

from drafttrain.data.messages import normalise_messages, normalise_tools, split_reasoning

CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize(
    "turns",
    [
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "A"},
        ],
        [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "A"},
        ],
        [
            {"role": "developer", "content": [{"type": "text", "text": "S"}]},
            {"role": "user", "content": [{"type": "text", "text": "Q"}], "weight": 0},
            {"role": "assistant", "content": ["A"], "tool_calls": None, "reasoning_content": ""},
        ],
    ],
)
def test_conventions_give_the_same_messages(turns):
    assert normalise_messages(turns) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "get", "arguments": '{"city": "Rome"}'}}],
        },
        {
            "role": "assistant",
            "content": "",
            "function_call": {"name": "get", "arguments": '{"city": "Rome"}'},
        },
        {"from": "function_call", "value": '{"name": "get", "arguments": {"city": "Rome"}}'},
    ],
)
def test_tool_calls_of_every_convention_have_mappings_as_arguments(message):
    """(fault kind 11)"""
    assert normalise_messages([message]) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]}
    ]


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_call_without_arguments_has_an_empty_mapping(arguments):
    calls = [{"id": "7", "function": {"name": "now", "arguments": arguments}}]
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": calls}])
    assert message["tool_calls"] == [
        {"id": "7", "type": "function", "function": {"name": "now", "arguments": {}}}
    ]


def test_tool_answers_keep_their_name_and_call_id():
    turn = {"role": "tool", "content": "42", "name": "now", "tool_call_id": "7"}
    assert normalise_messages([turn]) == [turn]
    assert normalise_messages([{"from": "observation", "value": "42"}]) == [
        {"role": "tool", "content": "42"}
    ]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("A", (None, "A")),
        ("<think>\nwhy\n</think>\n\nA", ("why", "A")),
        ("why\n</think>\n\nA", ("why", "A")),
        ("why</think>A", ("why", "A")),
        ("<think>\n\n</think>\n\nA", (None, "A")),
        ("</think>A", (None, "A")),
        ("  <think>why</think>", ("why", "")),
    ],
)
def test_reasoning_is_split_with_or_without_its_opening_tag(content, parts):
    """(fault kinds 4, 5)"""
    assert split_reasoning(content) == parts


def test_tools_come_as_a_list_as_text_or_not_at_all():
    tools = [{"type": "function", "function": {"name": "get"}}]
    assert normalise_tools(tools) == normalise_tools(str(tools).replace("'", '"')) == tools
    assert normalise_tools(None) is normalise_tools("") is normalise_tools([]) is None
