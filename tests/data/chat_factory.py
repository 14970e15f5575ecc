"""Toy tokenizers (one token per byte, plus special tokens) and chat templates of every kind."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drafttrain.data.loss_mask import Marked

SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<pad>", "<mask>"]

# Only appends; has no markers for what the assistant produced.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same text, with the markers that the tokenizer's own assistant mask needs.
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinks by default, forgets the reasoning of earlier turns, needs a user turn, calls tools.
REWRITING = """
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- if ns.query < 0 %}{{ raise_exception('No user query found.') }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if loop.index0 > ns.query %}{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments | items %}{{ ' ' + key + '=' + (value | string) }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- else %}{{- m.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- else %}{{ '<think>\n' }}{% endif %}
{%- endif %}"""
# Writes how many messages there are into the header: no prompt is a prefix of what follows it.
UNSTABLE = "{{ messages | length }}" + CHATML
# Renders only the end of an assistant message that reasons, and a prompt that opens a think block.
REASONING_EATER = CHATML.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"
)
# Ignores add_generation_prompt.
NO_GENERATION_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]
NO_END = CHATML.replace("<|im_end|>", "")
BOS = "{{ bos_token }}" + CHATML


def make_tokenizer(
    template: str | None = CHATML, *, merges: Iterable[tuple[str, str]] = (), add_bos: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: one token per byte, except for the merges given."""
    merges = list(merges)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*SPECIAL, *alphabet, *(a + b for a, b in merges)]
    bpe = models.BPE({token: i for i, token in enumerate(vocabulary)}, merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = template
    return fast


STOP_IDS = [SPECIAL.index("<|im_end|>")]
MASK_ID = SPECIAL.index("<mask>")
VOCAB_ROWS = len(make_tokenizer()) + 5


def user(content: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"role": "assistant", "content": content, **fields}


def runs(tokenizer: PreTrainedTokenizerFast, marked: Marked) -> list[tuple[bool, str]]:
    """A marked text as stretches of equal mask: ``[(False, prompt), (True, response), ...]``."""
    stretches: list[tuple[bool, list[int]]] = []
    for token, bit in zip(marked.input_ids, marked.loss_mask, strict=True):
        if not stretches or stretches[-1][0] != bit:
            stretches.append((bit, []))
        stretches[-1][1].append(token)
    return [(bit, tokenizer.decode(ids)) for bit, ids in stretches]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
