"""A whole run in miniature: a random target with a word tokenizer, conversations, a recipe."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.drafttrain.acceptance.hybrids import ROPE

WORDS = [f"w{i}" for i in range(50)]
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<mask>", "system", "user", "assistant", "\n"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
MASK_ID = SPECIAL.index("<mask>")


# Four of six layers are recurrent, as Qwen3.6's are three of four.
HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": ROPE,
}


def make_target(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A random 6-layer target (hidden 32) with its tokenizer, saved for Transformers."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        bos_token_id=None,
        pad_token_id=0,
        **changes,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def make_conversations(path: Path, count: int, seed: int) -> Path:
    """One- and two-turn conversations of random words."""
    rng = random.Random(seed)

    def turn(role: str, longest: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(4, longest)))}

    with path.open("w") as file:
        for number in range(count):
            messages = [turn("user", 8), turn("assistant", 30)]
            if number % 4 == 0:
                messages += [turn("user", 8), turn("assistant", 12)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_greedy_records(path: Path, target: Path, count: int, seed: int) -> Path:
    """Token records with the target's own greedy responses, as regeneration writes them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            message = {"role": "user", "content": " ".join(rng.choices(WORDS, k=6))}
            prompt = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, return_dict=False
            )
            ids = torch.tensor([prompt])
            out = model.generate(ids, max_new_tokens=12 + number, do_sample=False)
            record = {
                "id": f"greedy-{number}",
                "prompt_ids": prompt,
                "response_ids": out[0, len(prompt) :].tolist(),
                "sampling": "greedy",
            }
            file.write(json.dumps(record) + "\n")
    return path


def make_recipe(folder: Path, target: Path, **sections: dict[str, Any]) -> Path:
    """A recipe for the tiny target; ``sections`` update its sections."""
    recipe: dict[str, Any] = {
        "output": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32"},
        "data": {
            "train": [
                {"path": str(make_conversations(folder / "train.jsonl", 48, 1)), "name": "words"}
            ],
            "eval": [
                {
                    "path": str(make_greedy_records(folder / "eval.jsonl", target, 6, 2)),
                    "name": "greedy",
                }
            ],
            "max_length": 64,
        },
        "extract": {"taps": [1, 3], "codec": "fp32", "shard_tokens": 400, "batch_tokens": 256},
        "drafter": {
            "block_size": 4,
            "mask_token_id": MASK_ID,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
        },
        "train": {
            "epochs": 2.0,
            "global_batch": 4,
            "micro_batch": 2,
            "anchors": 6,
            "gamma": 2.0,
            "precision": "fp32",
            "checkpoint_every": 6,
        },
        "eval": {"tree_budgets": [4]},
    }
    for name, values in sections.items():
        recipe[name].update(values)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
