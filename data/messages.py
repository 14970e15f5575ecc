"""One canonical form for chat messages, whatever convention the source uses.

In: a list of OpenAI messages (``role``/``content``/``reasoning_content``/``tool_calls``) or of
``from``/``value`` turns. Out: a list of dicts with

    role               system | user | assistant | tool
    content            text ("" where there is none)
    reasoning_content  text, only where an assistant reasoned
    tool_calls         [{"type": "function", "function": {"name": text, "arguments": mapping}}]
    name, tool_call_id text, only where given

Guarantee: two spellings of the same conversation (reasoning inline or in its own field, arguments
as JSON text or as a mapping) give equal messages, hence equal token ids; what cannot be understood
raises ``RowDropped`` with a listed reason. Cost: linear in the text.
"""

import json
from typing import Any

from .drops import RowDropped

Message = dict[str, Any]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}


def normalise_messages(value: Any) -> list[Message]:
    """Bring a conversation into the canonical form.

    Args:
        value: what the source has under ``messages`` or ``conversations``.

    Raises:
        RowDropped: the conversation cannot be understood.
    """
    if not isinstance(value, list):
        raise RowDropped("messages_not_a_list", f"found {type(value).__name__}")
    if not value:
        raise RowDropped("empty_conversation")
    return [_message(raw, index) for index, raw in enumerate(value)]


def normalise_tools(value: Any) -> list[dict[str, Any]] | None:
    """Bring a ``tools`` column (a list of objects or the JSON text of one) into a list or None.

    Raises:
        RowDropped: it is something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as exc:
            raise RowDropped("invalid_tools", str(exc)) from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowDropped("invalid_tools", f"found {type(value).__name__}")
    return value


def split_reasoning(content: str) -> tuple[str | None, str]:
    """Split ``reason</think>answer`` (with or without its opening tag) into reasoning and answer.

    The opening tag is often part of the generation prompt, so captured text holds only the closing
    one. Text without tags has no reasoning (None); an empty block counts as none.

    Raises:
        RowDropped: the tags do not pair up.
    """
    opened, closed = content.count(THINK_OPEN), content.count(THINK_CLOSE)
    if not opened and not closed:
        return None, content
    head, _, answer = content.partition(THINK_CLOSE)
    before, tag, reasoning = head.partition(THINK_OPEN)
    if closed != 1 or opened > 1 or (opened and (not tag or before.strip())):
        raise RowDropped("unbalanced_think_tags", f"{opened} opening, {closed} closing")
    return (reasoning if tag else head).strip() or None, answer.lstrip("\n")


def _message(raw: Any, index: int) -> Message:
    if not isinstance(raw, dict):
        raise RowDropped("message_not_an_object", f"message {index} is {type(raw).__name__}")
    spoken = raw.get("role") if raw.get("role") is not None else raw.get("from")
    if not isinstance(spoken, str) or not spoken:
        raise RowDropped("missing_role", f"message {index} has keys {sorted(raw)}")
    role = _ROLES.get(spoken)
    if role is None:
        raise RowDropped("unknown_role", f"message {index} has role {spoken!r}")
    content = _text(raw.get("content") if "content" in raw else raw.get("value"), index)
    message: Message = {"role": role, "content": content}
    if spoken == "function_call":
        message |= {"content": "", "tool_calls": _tool_calls([_parse_call(content, index)], index)}
    elif role == "assistant":
        message |= _assistant_fields(raw, content, index)
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    return message


def _assistant_fields(raw: dict[str, Any], content: str, index: int) -> Message:
    """Content, reasoning and tool calls of an assistant message."""
    field = raw.get("reasoning_content") or raw.get("reasoning")
    if field is not None and not isinstance(field, str):
        raise RowDropped(
            "content_not_text", f"message {index} has {type(field).__name__} reasoning"
        )
    inline, answer = split_reasoning(content)
    if field and field.strip():
        if THINK_OPEN in field or THINK_CLOSE in field or inline:
            raise RowDropped("unbalanced_think_tags", f"message {index}: tags beside the field")
        inline = field.strip()
    fields: Message = {"content": answer}
    if inline:
        fields["reasoning_content"] = inline
    calls = raw.get("tool_calls")
    if not calls and raw.get("function_call"):
        calls = [raw["function_call"]]
    if calls:
        fields["tool_calls"] = _tool_calls(calls, index)
    if not calls and not inline and not answer.strip():
        raise RowDropped("empty_assistant_turn", f"message {index}")
    return fields


def _text(value: Any, index: int) -> str:
    """Content as text; a list of text parts is joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowDropped("content_not_text", f"message {index} has {type(value).__name__}")
    parts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, str):
            parts.append(part)
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            raise RowDropped("non_text_part", f"message {index} has a part of type {kind!r}")
    return "".join(parts)


def _tool_calls(value: Any, index: int) -> list[dict[str, Any]]:
    """Tool calls with their arguments as mappings: templates iterate over them."""
    if not isinstance(value, list):
        raise RowDropped("invalid_tool_calls", f"message {index} has {type(value).__name__}")
    calls = []
    for raw in value:
        function = raw.get("function", raw) if isinstance(raw, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowDropped("invalid_tool_calls", f"message {index}: a call without a name")
        call = {
            "type": "function",
            "function": {
                "name": function["name"],
                "arguments": _arguments(function.get("arguments"), index),
            },
        }
        if isinstance(raw.get("id"), str):
            call = {"id": raw["id"], **call}
        calls.append(call)
    return calls


def _arguments(value: Any, index: int) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as exc:
            raise RowDropped("invalid_tool_arguments", f"message {index}: {exc}") from None
    if not isinstance(value, dict):
        raise RowDropped("invalid_tool_arguments", f"message {index}: {type(value).__name__}")
    return value


def _parse_call(text: str, index: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise RowDropped("invalid_tool_calls", f"message {index}: {exc}") from None
