"""Messages to text and ids through the target's chat template: the one render function.

Every stage that turns messages into ids does it here, and rendered text is always encoded without
extra special tokens, so a template that writes BOS gives one BOS in training and in evaluation.

In: canonical messages (``messages.py``). Out: rendered text, or ids [n]. Guarantee: equal messages
give equal ids in every stage; a template that refuses a conversation raises ``RowDropped`` with
the template's own words. Cost: one Jinja render and one tokenizer call.
"""

import json
from functools import cached_property
from typing import Any

from .drops import RowDropped
from .errors import TemplateError
from .files import content_hash
from .messages import THINK_CLOSE, THINK_OPEN, Message

Tools = list[dict[str, Any]] | None
Kwargs = dict[str, Any]


class ChatTemplate:
    """A tokenizer's chat template together with the variables it is rendered with.

    Args:
        tokenizer: a Transformers tokenizer.
        kwargs: variables for the template, e.g. ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, kwargs: Kwargs) -> None:
        self.tokenizer = tokenizer
        self.kwargs = kwargs

    @cached_property
    def hash(self) -> str:
        """Hash of everything that decides how messages are rendered."""
        special = {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()}
        return content_hash([self.tokenizer.chat_template, self.kwargs, special])

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; never adds special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def prompt_ids(self, messages: list[Message], tools: Tools = None) -> list[int]:
        """Ids of a prompt that ends with the generation prompt, ready for decoding.

        Raises:
            RowDropped: the template refuses the conversation.
            TemplateError: the tokenizer has no chat template.
        """
        return self.encode(self.render(messages, tools, prompt=True))

    def render(
        self,
        messages: list[Message],
        tools: Tools = None,
        *,
        prompt: bool,
        kwargs: Kwargs | None = None,
    ) -> str:
        """Rendered text.

        Args:
            messages: canonical messages.
            tools: function schemas.
            prompt: end with the generation prompt.
            kwargs: template variables in place of the usual ones.

        Raises:
            RowDropped: the template refuses the conversation.
            TemplateError: the tokenizer has no chat template.
        """
        if any("reasoning_content" in message for message in messages) and self._reasoning_inline:
            messages = [_inline(message) for message in messages]
        return self._apply(messages, tools, prompt, self.kwargs if kwargs is None else kwargs)

    def render_prompt_for(
        self, turn: Message, context: list[Message], tools: Tools
    ) -> tuple[str, Kwargs]:
        """The prompt to which the target answered with ``turn``, and its template variables.

        A turn without reasoning was not produced after an opened think block, nor one with
        reasoning after a closed one. Where the template's own choice says otherwise, its
        ``enable_thinking`` is set to fit the turn, unless the user has fixed it.
        """
        prompt = self.render(context, tools, prompt=True)
        thinks = "reasoning_content" in turn
        unfitting = THINK_CLOSE if thinks else THINK_OPEN
        if "enable_thinking" in self.kwargs or not prompt.rstrip().endswith(unfitting):
            return prompt, self.kwargs
        kwargs = {**self.kwargs, "enable_thinking": thinks}
        return self.render(context, tools, prompt=True, kwargs=kwargs), kwargs

    @cached_property
    def _reasoning_inline(self) -> bool:
        """Whether the template ignores the reasoning field, so that it belongs in the content."""
        probe: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "answer", "reasoning_content": "thoughtprobe"},
        ]
        try:
            return "thoughtprobe" not in self._apply(probe, None, False, self.kwargs)
        except RowDropped:
            return False

    def _apply(self, messages: list[Message], tools: Tools, prompt: bool, kwargs: Kwargs) -> str:
        if self.tokenizer.chat_template is None:
            raise TemplateError(
                "the target's tokenizer has no chat template, so conversations cannot be rendered: "
                "use an instruction-tuned target, or sources with prompt_ids and response_ids"
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **kwargs
            )
        # The template is a program of the model's authors: it can raise anything.
        except Exception as exc:
            raise RowDropped("template_raised", f"{type(exc).__name__}: {exc}") from exc


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of everything that decides how text becomes ids (vocabulary, merges, added tokens)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return content_hash([tokenizer.get_vocab(), sorted(tokenizer.get_added_vocab())])
    state = json.loads(backend.to_str())
    # Calls with padding or truncation leave their settings here; they do not change the ids.
    return content_hash({**state, "padding": None, "truncation": None})


def _inline(message: Message) -> Message:
    """Move the reasoning into the content, for templates that know no reasoning field."""
    if "reasoning_content" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    text = f"{THINK_OPEN}\n{message['reasoning_content']}\n{THINK_CLOSE}\n\n{message['content']}"
    return {**rest, "content": text}
