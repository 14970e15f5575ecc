"""What the generation engines are given and what they return: plain values, no behaviour."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .chat import Tools
from .messages import Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for the target's answer.

    Attributes:
        prompt_id: unique within a prompts file.
        messages: canonical messages, the last of them not the assistant's.
        tools: function schemas.
        prompt_ids: the rendered prompt [p], ending with the generation prompt.
    """

    prompt_id: str
    messages: list[Message]
    tools: Tools
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """An engine's answer: the ids it was given and produced, or why there are none."""

    prompt: Prompt
    prompt_ids: list[int]
    response_ids: list[int]
    discarded: str | None = None


Engine = Callable[[Iterable[Prompt]], Iterator[Generation]]


def discard(prompt: Prompt, reason: str) -> Generation:
    """A prompt that cannot be answered, and why."""
    return Generation(prompt, prompt.prompt_ids, [], reason)
