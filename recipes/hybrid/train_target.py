"""Train a small Gated DeltaNet hybrid on the quickstart's conversations, a target for trials.

    python recipes/hybrid/train_target.py --out models/hybrid [--steps 800] [--text FILE ...]

Conversations (JSONL with ``messages``) -> a byte-level BPE of 4,096 entries and a Qwen3.5-type
model (8 layers, every fourth attends, hidden 256; rotary base and M-RoPE sections in Qwen3.6's
manner) that has learnt these texts well enough to be sure of its next token. Like Qwen3.6 it has
more embedding rows than tokens and two end tokens. Cost: minutes on a GPU, hours on two CPU cores
(use fewer steps). flash-linear-attention refuses to train on Hopper GPUs with Triton 3.4 to 3.7.0:
uninstall it for this script, or use a newer Triton.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

_FOLDER = Path("recipes/quickstart/conversations")
_ENTRIES, _ROWS = 4096, 4224  # the rows between are never produced; one of them is the mask
_END_OF_TEXT, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LENGTH, _BATCH = 384, 32
_log = logging.getLogger(__name__)


def read_conversations(paths: list[Path]) -> list[list[dict[str, str]]]:
    """The ``messages`` of every row."""
    rows = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(row)["messages"] for row in rows if row.strip()]


def write_prompts(conversations: list[list[dict[str, str]]], path: Path) -> None:
    """The first question of each conversation, as ``drafttrain data regenerate`` reads prompts."""
    rows = [json.dumps({"messages": turns[:1]}) + "\n" for turns in conversations]
    path.write_text("".join(rows), encoding="utf-8")


def train_tokenizer(conversations: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the chat markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_ENTRIES,
        special_tokens=[_END_OF_TEXT, _START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for messages in conversations for message in messages)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END_OF_TEXT
    )
    fast.chat_template = _TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int) -> Qwen3_5ForCausalLM:
    """The random model; ``hidden`` is a multiple of 64."""
    end_of_text, end = tokenizer.convert_tokens_to_ids([_END_OF_TEXT, _END])
    config = Qwen3_5TextConfig(
        vocab_size=_ROWS,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128 or 1,
        head_dim=64,
        linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config.eos_token_id = [end, end_of_text]
    return model


def batches(tokens: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Windows [batch, length] at random places of the text."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - _LENGTH, (_BATCH, 1), generator=generator)
        yield tokens[starts + torch.arange(_LENGTH)]


def train(model: Qwen3_5ForCausalLM, tokens: torch.Tensor, steps: int, seed: int) -> float:
    """Next-token training; returns the mean loss of the last tenth of the steps."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.05)
    losses = []
    model.train()
    for batch in track(batches(tokens, steps, seed), "train target", total=steps):
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) % 250 == 0:
            _log.info("step %d: loss %.3f", len(losses), float(losses[-1]))
    return float(torch.stack(losses[-max(1, steps // 10) :]).mean())


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=[_FOLDER / "train.jsonl"])
    parser.add_argument(
        "--held-out",
        type=Path,
        default=_FOLDER / "eval.jsonl",
        help="conversations whose questions are kept for evaluation; not trained on",
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--hidden", type=int, default=256, help="width, a multiple of 64")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if missing := [
        str(path) for path in [*arguments.text, arguments.held_out] if not path.exists()
    ]:
        parser.error(f"no such text: {', '.join(missing)}; start from the repository's folder")
    conversations = read_conversations(arguments.text)
    tokenizer = train_tokenizer(conversations)
    rendered = [tokenizer.apply_chat_template(c, return_dict=False) for c in conversations]
    order = torch.randperm(
        len(rendered), generator=torch.Generator().manual_seed(arguments.seed)
    ).tolist()
    tokens = torch.cat([torch.tensor(rendered[i]) for i in order])
    torch.manual_seed(arguments.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(tokenizer, arguments.hidden).to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    _log.info("%d conversations, %d tokens, %d parameters", len(rendered), len(tokens), size)
    _log.info("last loss %.3f", train(model, tokens, arguments.steps, arguments.seed))
    model.eval().save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    write_prompts(conversations, arguments.out / "prompts-train.jsonl")
    write_prompts(read_conversations([arguments.held_out]), arguments.out / "prompts-eval.jsonl")
    _log.info("saved to %s", arguments.out)


if __name__ == "__main__":
    main()
