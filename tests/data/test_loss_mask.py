"""What is supervised, for templates of every kind, against text worked out by hand."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttrain.data.chat import ChatTemplate
from drafttrain.data.drops import RowDropped
from drafttrain.data.errors import TemplateError
from drafttrain.data.loss_mask import LossMarker, Marked
from drafttrain.data.messages import normalise_messages

from . import chat_factory as toy
from .chat_factory import STOP_IDS, assistant, make_tokenizer, runs, user

SYSTEM = {"role": "system", "content": "S"}


def mark(tokenizer, messages, tools=None, **kwargs) -> list[Marked]:
    """Messages as a source would give them, to samples."""
    marker = LossMarker(ChatTemplate(tokenizer, kwargs), STOP_IDS)
    return marker.mark(normalise_messages(messages), tools)


def reason_of(tokenizer, messages, **kwargs) -> str:
    with pytest.raises(RowDropped) as caught:
        mark(tokenizer, messages, **kwargs)
    return caught.value.reason


def test_untagged_template_supervises_exactly_answer_and_end_token():
    """(fault kinds 1, 7)"""
    tokenizer = make_tokenizer(toy.CHATML)
    (marked,) = mark(tokenizer, [SYSTEM, user("Q"), assistant("Hi!")])
    assert runs(tokenizer, marked) == [
        (
            False,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (True, "Hi!<|im_end|>"),
    ]
    assert sum(marked.loss_mask) == 4
    # start, "system\n", "S", end, "\n", start, "user\n", "Q", end, "\n", start, "assistant\n"
    assert (
        marked.loss_mask == [False] * (1 + 7 + 1 + 1 + 1 + 1 + 5 + 1 + 1 + 1 + 1 + 10) + [True] * 4
    )


def test_tagged_and_untagged_templates_of_equal_text_give_equal_masks():
    """The tokenizer's own mask is all zero without tags (fault kinds 1, 2)"""
    messages = [user("Q"), assistant("A"), user("R"), assistant("B")]
    plain, tagged = make_tokenizer(toy.CHATML), make_tokenizer(toy.TAGGED)
    own = plain.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert sum(own["assistant_masks"]) == 0, "the situation that must not reach a table"
    assert mark(plain, messages) == mark(tagged, messages)
    own = tagged.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (marked,) = mark(tagged, messages)
    # The last newline follows the last end token: the target does not produce it.
    assert marked.input_ids == own["input_ids"][:-1]
    assert [int(bit) for bit in marked.loss_mask] == own["assistant_masks"][:-1]


def test_appending_template_gives_one_sample_with_every_turn_supervised():
    tokenizer = make_tokenizer(toy.CHATML)
    messages = [user("Q"), assistant("A"), user("R"), assistant("B"), user("ignored")]
    (marked,) = mark(tokenizer, messages)
    assert runs(tokenizer, marked) == [
        (False, "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"),
        (True, "A<|im_end|>"),
        (False, "\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"),
        (True, "B<|im_end|>"),
    ]


def test_rewriting_template_gives_one_sample_per_turn_with_the_context_decoding_has():
    """(fault kinds 3, 7)"""
    tokenizer = make_tokenizer(toy.REWRITING)
    first, second = mark(
        tokenizer,
        [
            user("Q"),
            assistant("A", reasoning_content="why"),
            user("R"),
            assistant("B", reasoning_content="because"),
        ],
    )
    assert runs(tokenizer, first) == [
        (False, "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (True, "why\n</think>\n\nA<|im_end|>"),
    ]
    assert runs(tokenizer, second) == [
        (
            False,
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (True, "because\n</think>\n\nB<|im_end|>"),
    ]
    assert first.mode == second.mode == "think"


def test_generation_prompt_is_context_in_both_thinking_modes():
    """The first supervised token is the first sampled one (fault kind 8)"""
    tokenizer = make_tokenizer(toy.REWRITING)
    template = ChatTemplate(tokenizer, {})
    for turn, kwargs, mode in [
        (assistant("A", reasoning_content="why"), {}, "think"),
        (assistant("A"), {"enable_thinking": False}, "no_think"),
    ]:
        (marked,) = mark(tokenizer, [user("Q"), turn])
        prompt = ChatTemplate(tokenizer, kwargs).prompt_ids([user("Q")])
        assert marked.input_ids[: len(prompt)] == prompt
        assert marked.loss_mask.index(True) == len(prompt)
        assert marked.mode == mode
    assert template.prompt_ids([user("Q")]) != prompt


@pytest.mark.parametrize(
    "content", ["why\n</think>\n\nA", "<think>\nwhy\n</think>\n\nA", "why</think>A"]
)
@pytest.mark.parametrize("template", [toy.REWRITING, toy.CHATML])
def test_reasoning_inline_and_in_its_own_field_give_the_same_ids(template, content):
    """(fault kinds 3, 4)"""
    tokenizer = make_tokenizer(template)
    inline = mark(tokenizer, [user("Q"), assistant(content)])
    field = mark(tokenizer, [user("Q"), assistant("A", reasoning_content="why")])
    assert inline == field
    assert "why\n</think>\n\nA<|im_end|>" in runs(tokenizer, field[0])[-1][1]


def test_ids_are_those_of_the_whole_conversation_render():
    """(fault kind 3)"""
    tokenizer = make_tokenizer(toy.REWRITING)
    messages = [SYSTEM, user("Q"), assistant("A", reasoning_content="why")]
    (marked,) = mark(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert marked.input_ids == whole[: len(marked.input_ids)]
    assert tokenizer.decode(whole[len(marked.input_ids) :]) == "\n"


@pytest.mark.parametrize("thinking", [True, False])
def test_generated_ids_survive_the_round_trip_through_messages(thinking):
    """ids -> text -> messages -> ids is the identity (fault kinds 4, 5)"""
    tokenizer = make_tokenizer(toy.REWRITING)
    prompt = ChatTemplate(tokenizer, {"enable_thinking": thinking}).prompt_ids([user("Q")])
    text = "why\n</think>\n\nA" if thinking else "A"
    generated = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    (marked,) = mark(tokenizer, [user("Q"), assistant(tokenizer.decode(generated[:-1]))])
    assert marked.input_ids == prompt + generated
    assert marked.loss_mask == [False] * len(prompt) + [True] * len(generated)


def test_fixed_thinking_switch_is_obeyed_and_contradicting_rows_are_dropped():
    """(fault kind 5)"""
    tokenizer = make_tokenizer(toy.REWRITING)
    thinks = [user("Q"), assistant("A", reasoning_content="why")]
    assert reason_of(tokenizer, thinks, enable_thinking=False) == "prompt_not_prefix"
    (marked,) = mark(tokenizer, [user("Q"), assistant("A")], enable_thinking=True)
    assert runs(tokenizer, marked)[-1] == (True, "\n</think>\n\nA<|im_end|>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (toy.UNSTABLE, "prompt_not_prefix"),
        (toy.REASONING_EATER, "prompt_not_prefix"),
        (toy.NO_GENERATION_PROMPT, "no_generation_prompt"),
        (toy.NO_END, "no_end_token"),
        (toy.CHATML.replace("m.content", "m.content | replace('Answer', '')"), "content_lost"),
    ],
)
def test_template_that_cannot_be_trusted_gives_a_named_reason_and_no_row(template, reason):
    """(fault kind 7)"""
    tokenizer = make_tokenizer(template)
    assert reason_of(tokenizer, [user("Q"), assistant("<think>why</think>Answer")]) == reason


def test_template_that_prints_only_the_field_of_other_turns_loses_reasoning():
    """(fault kind 3)"""
    template = toy.CHATML.replace("m.content", "(m.content.split('</think>\n\n')[-1])")
    messages = [user("Q"), assistant("A", reasoning_content="why")]
    assert reason_of(make_tokenizer(template), messages) == "reasoning_lost"


def test_text_that_holds_a_stop_token_is_dropped():
    tokenizer = make_tokenizer()
    messages = [user("Q"), assistant("A<|im_end|>B")]
    assert reason_of(tokenizer, messages) == "stop_token_inside_turn"


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, assistant("A")],
        [SYSTEM, {"role": "tool", "content": "42"}, assistant("A")],
    ],
)
def test_conversation_without_user_turn_is_dropped_where_the_template_refuses_it(messages):
    """(fault kind 12)"""
    assert reason_of(make_tokenizer(toy.REWRITING), messages) == "template_raised"
    assert len(mark(make_tokenizer(toy.CHATML), messages)) == 1


def test_tool_calls_with_text_and_mapping_arguments_give_equal_ids():
    """(fault kind 11)"""
    tokenizer = make_tokenizer(toy.REWRITING)

    def call(arguments, content=""):
        calls = [{"type": "function", "function": {"name": "get", "arguments": arguments}}]
        return [user("Q"), assistant(content, tool_calls=calls)]

    as_text, as_mapping = call(json.dumps({"city": "Rome"})), call({"city": "Rome"}, content=None)
    with pytest.raises(TypeError):
        tokenizer.apply_chat_template(as_text, tokenize=False)
    assert mark(tokenizer, as_text) == mark(tokenizer, as_mapping)
    (marked,) = mark(tokenizer, as_text)
    assert runs(tokenizer, marked)[-1] == (
        True,
        "<tool_call>get city=Rome</tool_call><|im_end|>",
    )
    assert marked.mode == "tool"


def test_rendered_bos_is_not_doubled_by_a_tokenizer_that_adds_one():
    """(fault kind 13)"""
    tokenizer = make_tokenizer(toy.BOS, add_bos=True)
    bos = tokenizer.bos_token_id
    template = ChatTemplate(tokenizer, {})
    text = template.render([user("Q")], prompt=True)
    assert tokenizer(text)["input_ids"][:2] == [bos, bos], "the situation to be avoided"
    (marked,) = mark(tokenizer, [user("Q"), assistant("A")])
    for ids in (marked.input_ids, template.prompt_ids([user("Q")])):
        assert ids[0] == bos and ids.count(bos) == 1


def test_token_across_the_boundary_is_split_as_in_decoding():
    newline = "\u010a"  # how byte-level vocabularies write "\n"
    tokenizer = make_tokenizer(toy.CHATML, merges=[(newline, newline)])
    (marked,) = mark(tokenizer, [user("Q"), assistant("\nA")])
    prompt = ChatTemplate(tokenizer, {}).prompt_ids([user("Q")])
    joint = tokenizer.encode(
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n\nA", add_special_tokens=False
    )
    assert joint[: len(prompt)] != prompt, "the two newlines are one token in joint text"
    assert marked.input_ids[: len(prompt)] == prompt
    assert runs(tokenizer, marked)[-1] == (True, "\nA<|im_end|>")


def test_tokenizer_that_changes_text_when_split_at_the_boundary_drops_the_row():
    # A space is put in front of whatever is encoded, and "]A" is one token.
    vocabulary = {t: i for i, t in enumerate(["?", "<end>", "\u2581", "[", "]", "A", "Q", "]A"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("]", "A")], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}"
        "{{ m.content + '<end>' }}{% endif %}{% endfor %}"
    )
    marker = LossMarker(ChatTemplate(fast, {}), [fast.eos_token_id])
    with pytest.raises(RowDropped, match="boundary_inside_token"):
        marker.mark([user("Q"), assistant("A")])
    (marked,) = marker.mark([user("Q"), assistant("Q")])
    assert fast.decode(marked.input_ids) == "[Q]Q<end>"


def test_opening_assistant_turn_is_context():
    tokenizer = make_tokenizer()
    (marked,) = mark(tokenizer, [assistant("Hello"), user("Q"), assistant("A")])
    assert [text for bit, text in runs(tokenizer, marked) if bit] == ["A<|im_end|>"]
    assert reason_of(tokenizer, [assistant("Hello"), user("Q")]) == "no_assistant_turn"


def test_missing_chat_template_is_an_error_with_a_way_out():
    with pytest.raises(TemplateError, match=r"no chat template.*prompt_ids and response_ids"):
        mark(make_tokenizer(None), [user("Q"), assistant("A")])


TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="<>"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT.filter(str.strip)), min_size=1, max_size=4))
def test_every_turn_of_any_text_is_supervised_exactly(turns):
    """(fault kinds 1, 2, 7)"""
    tokenizer = make_tokenizer()
    messages = [m for q, a in turns for m in (user(q), assistant(a))]
    (marked,) = mark(tokenizer, messages)
    assert [text for bit, text in runs(tokenizer, marked) if bit] == [
        f"{answer}<|im_end|>" for _, answer in turns
    ]
    assert not marked.loss_mask[0] and len(marked.loss_mask) == len(marked.input_ids)
