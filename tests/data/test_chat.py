"""The one render function, and the hashes by which artifacts name tokenizer and template."""

import pytest

from drafttrain.data.chat import ChatTemplate, tokenizer_hash
from drafttrain.data.drops import RowDropped

from .chat_factory import CHATML, REWRITING, assistant, make_tokenizer, user


def test_prompt_ids_are_those_of_the_tokenizers_own_template_call():
    """(fault kinds 3, 79)"""
    tokenizer = make_tokenizer(REWRITING)
    tools = [{"type": "function", "function": {"name": "get"}}]
    messages = [user("Q"), assistant("A", reasoning_content="why"), user("R")]
    for kwargs in ({}, {"enable_thinking": False}):
        wanted = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert ChatTemplate(tokenizer, kwargs).prompt_ids(messages, tools) == wanted


def test_refusal_carries_the_templates_own_words_in_one_line():
    """(fault kind 12)"""
    with pytest.raises(RowDropped, match=r"template_raised: .*No user query found"):
        ChatTemplate(make_tokenizer(REWRITING), {}).prompt_ids([assistant("A")])
    broken = ChatTemplate(make_tokenizer("{{ messages[0].absent.field }}"), {})
    with pytest.raises(RowDropped) as caught:
        broken.prompt_ids([user("Q")])
    assert caught.value.reason == "template_raised" and "\n" not in str(caught.value)


def test_template_hash_depends_on_template_and_variables():
    hashes = [
        ChatTemplate(make_tokenizer(CHATML), {}).hash,
        ChatTemplate(make_tokenizer(REWRITING), {}).hash,
        ChatTemplate(make_tokenizer(REWRITING), {"enable_thinking": False}).hash,
    ]
    assert len(set(hashes)) == 3
    assert ChatTemplate(make_tokenizer(CHATML), {}).hash == hashes[0]


def test_tokenizer_hash_depends_on_what_changes_ids_and_not_on_earlier_calls():
    tokenizer = make_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before == tokenizer_hash(make_tokenizer())
    assert tokenizer_hash(make_tokenizer(merges=[("a", "b")])) != before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != before
