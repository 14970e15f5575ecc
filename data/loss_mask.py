"""Conversations to ids with the mask of what the target produced, by render boundaries.

For the assistant turn t,

    prompt = template(messages[:t], generation prompt)      encode(prompt)         mask False
    full   = template(messages[:t+1])                       what full adds to it   mask True

up to and including the turn's stop token; what the template writes after that is not produced by
the target. The generation prompt (with its opening think tag, where the template has one) is
context; reasoning, closing tag and answer are supervised. No markers are searched for in text.

Guarantee: a turn's ids are those of decoding (the prompt's ids are fixed, then the response
follows), or the row is dropped with a reason; a mask is never all True nor all False. A template
that only appends gives one sample [n] with every turn supervised, one that rewrites history gives
one sample per assistant turn. Cost: per assistant turn, two renders and two encodings of
everything up to it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from .chat import ChatTemplate, Tools
from .drops import RowDropped
from .messages import THINK_CLOSE, THINK_OPEN, Message
from .sources import TokenRecord


@dataclass(frozen=True, slots=True)
class Marked:
    """Ids and loss mask, both [n], and the mode (think, no_think, tool) of one sample."""

    input_ids: list[int]
    loss_mask: list[bool]
    mode: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """One assistant turn: what decoding is given, and what it produces (ends with a stop id)."""

    prompt_ids: list[int]
    response_ids: list[int]
    mode: str


class LossMarker:
    """Marks what the target produced, for one chat template and set of stop ids.

    Args:
        template: the target's chat template.
        stop_ids: the ids at which the target stops; every assistant turn must end with one.
    """

    def __init__(self, template: ChatTemplate, stop_ids: Iterable[int]) -> None:
        self._template = template
        self._stop_ids = frozenset(stop_ids)
        texts = map(template.tokenizer.convert_ids_to_tokens, sorted(self._stop_ids))
        self._stop_texts = [text for text in texts if text]

    def mark(self, messages: list[Message], tools: Tools = None) -> list[Marked]:
        """Turn a conversation into samples.

        Args:
            messages: canonical messages (``messages.normalise_messages``).
            tools: function schemas for the template.

        Returns:
            One sample where the template only appends, else one per assistant turn.

        Raises:
            RowDropped: no assistant turn, or one whose boundary cannot be trusted.
            TemplateError: the tokenizer has no chat template.
        """
        # A turn that opens the conversation answers no prompt: it is context, not a response.
        turns = [
            self._turn(messages, index, tools)
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and index
        ]
        if not turns:
            raise RowDropped("no_assistant_turn")
        for turn, following in pairwise(turns):
            ids = turn.prompt_ids + turn.response_ids
            if following.prompt_ids[: len(ids)] != ids:
                return [_merge([turn]) for turn in turns]
        return [_merge(turns)]

    def record_mode(self, record: TokenRecord) -> str:
        """The mode of a token record, from its messages where it has them and from its text."""
        if record.tools or _uses_tools(record.messages or []):
            return "tool"
        prompt = self._template.decode(record.prompt_ids.tolist())
        response = self._template.decode(record.response_ids.tolist())
        if record.messages is None and ("<tool_call>" in response or "<tool_response>" in prompt):
            return "tool"
        opened = prompt.rstrip().endswith(THINK_OPEN) or response.lstrip().startswith(THINK_OPEN)
        reasoning = response.partition(THINK_CLOSE)[0].replace(THINK_OPEN, "")
        return "think" if opened and reasoning.strip() else "no_think"

    def _turn(self, messages: list[Message], index: int, tools: Tools) -> _Turn:
        """The boundaries of ``messages[index]``, checked."""
        turn, context = messages[index], messages[:index]
        prompt, kwargs = self._template.render_prompt_for(turn, context, tools)
        full = self._template.render(messages[: index + 1], tools, prompt=False, kwargs=kwargs)
        if not full.startswith(prompt):
            raise RowDropped("prompt_not_prefix", f"message {index}: {_difference(prompt, full)}")
        response = full[len(prompt) :]
        self._check_text(turn, response, index)
        lead = _lead(turn, response)
        if lead and prompt == self._template.render(context, tools, prompt=False, kwargs=kwargs):
            # The template has no generation prompt: what precedes the text is the role header.
            raise RowDropped("no_generation_prompt", f"message {index} begins with {lead[:30]!r}")
        prompt_ids, response_ids = self._encode_turn(prompt, response)
        end = next((i for i, x in enumerate(response_ids) if x in self._stop_ids), None)
        if end is None:
            raise RowDropped("no_end_token", f"message {index} ends with {response[-20:]!r}")
        mode = "think" if "reasoning_content" in turn else "no_think"
        mode = "tool" if tools or _uses_tools(messages[: index + 1]) else mode
        return _Turn(prompt_ids, response_ids[: end + 1], mode)

    def _check_text(self, turn: Message, response: str, index: int) -> None:
        """The response must hold the turn's text, and no stop token inside that text."""
        reasoning = turn.get("reasoning_content", "")
        if reasoning not in response:
            raise RowDropped("reasoning_lost", f"message {index}")
        if turn["content"].strip() not in response:
            raise RowDropped("content_lost", f"message {index}")
        calls = json.dumps(turn.get("tool_calls", []), ensure_ascii=False)
        for text in self._stop_texts:
            if text in reasoning or text in turn["content"] or text in calls:
                raise RowDropped("stop_token_inside_turn", f"message {index} holds {text!r}")

    def _encode_turn(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """Ids of prompt and response, split exactly between them."""
        prompt_ids = self._template.encode(prompt)
        if not prompt_ids:
            raise RowDropped("empty_prompt", "the template renders nothing before the turn")
        joint = self._template.encode(prompt + response)
        if joint[: len(prompt_ids)] == prompt_ids:
            return prompt_ids, joint[len(prompt_ids) :]
        # A token of the joint text would straddle the boundary. Decoding cannot produce it: the
        # prompt's ids are fixed before the first response token. So encode the parts apart, and
        # make sure that they still spell the same text (some tokenizers prepend a space).
        response_ids = self._template.encode(response)
        if self._template.decode(prompt_ids + response_ids) != self._template.decode(joint):
            raise RowDropped("boundary_inside_token", f"response begins {response[:20]!r}")
        return prompt_ids, response_ids


def _merge(turns: list[_Turn]) -> Marked:
    """Lay consecutive turns into one sample; each prompt starts with all that went before."""
    ids: list[int] = []
    mask: list[bool] = []
    for turn in turns:
        context = turn.prompt_ids[len(ids) :]
        ids += context + turn.response_ids
        mask += [False] * len(context) + [True] * len(turn.response_ids)
    modes = {turn.mode for turn in turns}
    return Marked(ids, mask, next(mode for mode in ("tool", "think", "no_think") if mode in modes))


def _uses_tools(messages: list[Message]) -> bool:
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _lead(turn: Message, response: str) -> str:
    """What the response has before the turn's own text, other than an opening think tag."""
    begin = (turn.get("reasoning_content") or turn["content"]).strip()
    lead = response.partition(begin)[0].strip() if begin else ""
    return "" if lead == THINK_OPEN else lead


def _difference(prompt: str, full: str) -> str:
    """Where the prompt stops being a prefix of the full render."""
    at = next(
        (i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b),
        min(len(prompt), len(full)),
    )
    found, wanted = full[at : at + 20], prompt[at : at + 20]
    return f"the prompt has {wanted!r} where the conversation has {found!r}"
