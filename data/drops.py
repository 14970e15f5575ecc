"""Why rows do not become samples: one exception, one log, and every reason in one list.

A row that cannot be used is dropped and counted, never fatal and never silent. The reasons below
are the keys of ``drops`` in a manifest.
"""

from collections import Counter

# reason -> what it means; a reason that is not listed here cannot be raised.
REASONS = {
    # reading
    "unfinished_last_line": "the file's last line stops in the middle (a writer was interrupted)",
    "invalid_json": "the line is not valid JSON",
    "not_utf8": "the line is not valid UTF-8",
    "not_an_object": "the line is JSON but not an object",
    "no_messages": "the row has neither messages, nor conversations, nor prompt_ids/response_ids",
    "discarded_response": "regeneration recorded that this prompt gave no usable response",
    # messages
    "messages_not_a_list": "messages is not a list",
    "empty_conversation": "the conversation has no messages",
    "message_not_an_object": "a message is not an object",
    "missing_role": "a message has no role",
    "unknown_role": "a message has a role that no chat template knows",
    "content_not_text": "a message's content is neither text nor a list of parts",
    "non_text_part": "a message has an image, audio or other part that is not text",
    "empty_assistant_turn": "an assistant message has no content, reasoning or tool call",
    "unbalanced_think_tags": "an assistant message's <think> tags do not pair up",
    "invalid_tool_calls": "tool_calls is not a list of {function: {name, arguments}}",
    "invalid_tool_arguments": "a tool call's arguments are not a JSON object",
    "invalid_tools": "tools is not a list of objects, or not the JSON of one",
    "no_assistant_turn": "no assistant message follows a prompt",
    # token records
    "ids_not_integers": "prompt_ids or response_ids is not a list of integers >= 0",
    "empty_prompt": "prompt_ids is empty",
    "empty_response": "response_ids is empty",
    # chat template
    "template_raised": "the chat template refused the conversation",
    "prompt_not_prefix": "the rendered conversation does not start with the rendered prompt",
    "content_lost": "the chat template does not render all of the assistant's text",
    "reasoning_lost": "the chat template does not render the assistant's reasoning",
    "no_generation_prompt": "the template has no prompt that ends with the assistant header",
    "no_end_token": "the rendered turn holds none of the target's stop tokens",
    "stop_token_inside_turn": "the assistant's text holds a stop token: decoding would end there",
    "boundary_inside_token": "prompt and response cannot be tokenised apart",
    # sample table
    "too_few_supervised_tokens": "no two supervised tokens in a row: an anchor and its next token",
    "nothing_left_after_truncation": "truncation to max_length left no two supervised tokens",
    "duplicate": "the same ids and mask occurred before",
    "prompt_in_eval": "the prompt also occurs in an eval source",
}

# If these are all that a source of conversations yields, its template is at fault, not its rows.
TEMPLATE_REASONS = frozenset(
    {
        "template_raised",
        "prompt_not_prefix",
        "content_lost",
        "reasoning_lost",
        "no_generation_prompt",
        "no_end_token",
        "boundary_inside_token",
    }
)

_EXAMPLES = 3
_DETAIL = 300  # characters


class RowDropped(Exception):
    """A row cannot become a sample.

    Attributes:
        reason: a key of ``REASONS``.
        detail: what was found, for the log; may be empty.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, f"unlisted drop reason {reason!r}"
        # One line, whatever a template or a parser said.
        self.detail = " ".join(detail.split())[:_DETAIL]
        super().__init__(f"{reason}: {self.detail}" if detail else reason)
        self.reason = reason


class DropLog:
    """Counts of dropped rows by reason, with the first few places of each.

    Attributes:
        counts: reason -> rows.
        examples: reason -> up to three ``where (detail)`` strings.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, dropped: RowDropped, where: str) -> None:
        """Count one row; ``where`` names it (file and line or row)."""
        self.counts[dropped.reason] += 1
        places = self.examples.setdefault(dropped.reason, [])
        if len(places) < _EXAMPLES:
            places.append(f"{where} ({dropped.detail})" if dropped.detail else where)

    @property
    def total(self) -> int:
        """Rows dropped for any reason."""
        return self.counts.total()

    def describe(self) -> str:
        """One line: ``3 unknown_role (first: a.jsonl line 7), 1 invalid_json (…)``."""
        return ", ".join(
            f"{count} {reason} (first: {self.examples[reason][0]})"
            for reason, count in self.counts.most_common()
        )
