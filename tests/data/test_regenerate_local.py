"""Regeneration with a loaded model: batched generation equals one-by-one generation."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.data.chat import ChatTemplate
from drafttrain.data.config import RegenerateConfig
from drafttrain.data.errors import DataError
from drafttrain.data.regenerate import regenerate

from .chat_factory import (
    REWRITING,
    STOP_IDS,
    VOCAB_ROWS,
    assistant,
    make_tokenizer,
    user,
    write_jsonl,
)

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_ROWS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=STOP_IDS[0],
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    # What published generation configs hold, and must not change the target's own text.
    model.generation_config.update(
        do_sample=True, temperature=0.3, top_p=0.5, top_k=3, repetition_penalty=1.8
    )
    return model


def greedy(model, prompt: list[int], limit: int, stops: list[int]) -> list[int]:
    """Plain argmax decoding, one forward per token."""
    ids = list(prompt)
    for _ in range(limit):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def run(tmp_path, model, rows, stops=STOP_IDS, tokenizer=TOKENIZER, **fields):
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    config = RegenerateConfig(
        **{
            "prompts": tmp_path / "prompts.jsonl",
            "output": tmp_path / "responses.jsonl",
            "batch_size": 3,
            "max_new_tokens": 12,
            **fields,
        }
    )
    return regenerate(
        config,
        tokenizer,
        template_kwargs={},
        stop_ids=stops,
        target_name="tiny",
        model=model,
    )


def output(tmp_path) -> dict[str, dict]:
    lines = (tmp_path / "responses.jsonl").read_text().splitlines()
    return {record["id"]: record for record in map(json.loads, lines)}


ROWS = [{"id": i, "messages": [user("q" * (1 + 3 * i))]} for i in range(7)]


def test_batches_give_the_targets_own_greedy_text(tmp_path, model):
    template = ChatTemplate(TOKENIZER, {})
    texts = [greedy(model, template.prompt_ids(r["messages"]), 12, STOP_IDS) for r in ROWS]
    # A second stop id that really occurs, but begins no response.
    begins = {text[0] for text in texts}
    stops = [*STOP_IDS, next(t for text in texts for t in text if t not in begins)]
    counts = run(tmp_path, model, ROWS, stops)
    records = output(tmp_path)
    assert sorted(records) == [str(i) for i in range(7)]
    finishes = set()
    for row in ROWS:
        record = records[str(row["id"])]
        assert record["prompt_ids"] == template.prompt_ids(row["messages"])
        wanted = greedy(model, record["prompt_ids"], 12, stops)
        assert record["response_ids"] == wanted
        assert record["finish"] == ("stop" if wanted[-1] in stops else "length")
        assert record["sampling"] == "greedy"
        finishes.add(record["finish"])
    assert finishes == {"stop", "length"}
    assert counts["tokens"] == sum(len(r["response_ids"]) for r in records.values())


@pytest.mark.parametrize("memory", [100_000, 1])
def test_a_spread_model_answers_as_the_whole_one(tmp_path, model, memory):
    """Its embedding in memory or on disk, its last layer on disk."""
    model.save_pretrained(tmp_path / "model")
    spread = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": memory}
    )
    assert spread.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert (spread.device.type == "meta") == (memory == 1)
    texts = []
    for each in (model, spread):
        run(tmp_path, each, ROWS)
        texts.append(output(tmp_path))
        (tmp_path / "responses.jsonl").unlink()
    assert texts[0] == texts[1]


def test_only_what_is_missing_is_generated_on_resume(tmp_path, model, monkeypatch):
    """(fault kind 16)"""
    run(tmp_path, model, ROWS)
    path = tmp_path / "responses.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[4], lines[6][:20]]))
    before = set(output_ids := [json.loads(line)["id"] for line in (lines[1], lines[4])])
    generated = []
    plain = model.generate
    monkeypatch.setattr(
        model, "generate", lambda **kw: generated.append(len(kw["input_ids"])) or plain(**kw)
    )
    counts = run(tmp_path, model, ROWS)
    assert sum(generated) == 5 and counts["kept"] == len(output_ids) == len(before)
    assert sorted(output(tmp_path)) == [str(i) for i in range(7)]
    generated.clear()
    run(tmp_path, model, ROWS)
    assert not generated


def test_sampling_follows_the_target_and_keeps_the_temperature(tmp_path, model):
    rows = [{"id": i, "messages": [user("q")]} for i in range(400)]
    torch.manual_seed(0)
    run(tmp_path, model, rows, temperature=0.8, batch_size=400, max_new_tokens=2)
    records = output(tmp_path)
    prompt = ChatTemplate(TOKENIZER, {}).prompt_ids([user("q")])
    with torch.inference_mode():
        wanted = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 0.8, -1)
    found = torch.zeros(VOCAB_ROWS)
    for record in records.values():
        assert record.get("sampling", {"temperature": 0.8}) == {"temperature": 0.8}
        found[record["response_ids"][0] if "response_ids" in record else STOP_IDS[0]] += 1
    # Total variation of 400 draws; with the model's own top_k = 3 it would be near 1 - mass(3).
    noise = torch.sqrt(wanted * (1 - wanted) / 400).sum() / 2
    assert (found / 400 - wanted).abs().sum() / 2 < 1.5 * noise
    assert 1 - wanted.topk(3).values.sum() > 1.5 * noise, "the test can tell"


def test_prompt_beyond_the_models_positions_leaves_a_tombstone(tmp_path, model):
    """(fault kind 17)"""
    rows = [*ROWS[:2], {"id": "long", "messages": [user("q" * 120)]}]
    counts = run(tmp_path, model, rows)
    assert counts["discarded"] == 1
    assert output(tmp_path)["long"]["discarded"].startswith("prompt_too_long")
    assert run(tmp_path, model, rows)["kept"] == 3


def test_final_assistant_turn_is_cut_off_and_answered_anew(tmp_path, model):
    row = {"id": "a", "messages": [*ROWS[1]["messages"], assistant("not the target's")]}
    run(tmp_path, model, [row])
    plain = ChatTemplate(TOKENIZER, {}).prompt_ids(ROWS[1]["messages"])
    assert output(tmp_path)["a"]["prompt_ids"] == plain


def test_prompts_without_id_are_named_by_content_and_done_once(tmp_path, model):
    rows = [{"messages": [user("same")]}, {"messages": [user("same")]}, {"messages": [user("x")]}]
    run(tmp_path, model, rows)
    assert len(output(tmp_path)) == 2


def test_prompts_the_template_refuses_are_dropped(tmp_path, model):
    """(fault kind 12)"""
    rows = [{"messages": [{"role": "system", "content": "S"}]}, *ROWS[:2]]
    counts = run(tmp_path, model, rows, tokenizer=make_tokenizer(REWRITING))
    assert counts["responses"] == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"id": 1, "messages": [user("a")]}, {"id": 1, "messages": [user("b")]}],
            "line 2 has the",
        ),
        ([{"prompt_ids": [1], "response_ids": [2, 3]}], "line 1 holds token ids"),
        ([{"messages": [assistant("a")]}], "no usable prompt.*1 empty_prompt"),
        ([], "the file is empty"),
    ],
)
def test_bad_prompt_files_are_one_clear_sentence(tmp_path, model, rows, message):
    with pytest.raises(DataError, match=message):
        run(tmp_path, model, rows)


def test_other_target_or_sampling_does_not_mix_into_a_finished_file(tmp_path, model):
    run(tmp_path, model, ROWS[:1])
    with pytest.raises(DataError, match=r"made with max_new_tokens = 12, now it is 13"):
        run(tmp_path, model, ROWS[:1], max_new_tokens=13)
