"""Live evaluation at the Qwen3.6-27B geometry: time and memory of every method on one GPU.

    python -m tests.benchmarks.live_geometry [--layers 64] [--context 1024] [--tokens 24]

A bf16 target with random weights, a random drafter of recipes/qwen3.6-27b.yaml and an extracted
store of two prompts go through ``evaluate_live``, the code behind ``drafttrain eval``. Random
models agree on nothing, so acceptance is 1 and says nothing; stage times, memory and the fate of
near-ties are real. Cost: about two minutes on one H200 with its kernels' first use.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from drafttrain.acceptance.config import EvalConfig
from drafttrain.acceptance.live import evaluate_live
from drafttrain.acceptance.live_blocks import live_blocks
from drafttrain.acceptance.summary import live_sections
from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.samples import make_sample, write_table
from drafttrain.data.store_reader import FeatureStore
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.resolve import resolve_config
from drafttrain.extract.config import ExtractConfig
from drafttrain.extract.head import load_head
from drafttrain.extract.target import Target
from drafttrain.extract.worker import extract
from drafttrain.recipe import load_recipe

from .geometry import TAPS, make_target, sample_ids

_RECIPE = Path("recipes/qwen3.6-27b.yaml")
_console = Console(width=150)


def make_store(target: Target, context: int, folder: Path) -> FeatureStore:
    """Two prompts of ``context`` tokens with a short response each."""
    samples = [
        make_sample(
            ids, np.arange(len(ids)) >= context, source="random", mode="no_think", greedy=False
        )
        for ids in sample_ids([context + 32] * 2)
    ]
    manifest = {"tokenizer_hash": tokenizer_hash(target.tokenizer), "template_hash": None}
    write_table(folder / "table.parquet", samples, manifest)
    config = ExtractConfig(taps=TAPS, batch_tokens=4096)
    return extract(target, config, folder / "table.parquet", folder / "store")


def main() -> None:
    """Build, decode, print the report's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    target = make_target(arguments.layers, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(target, arguments.context, Path(folder))
        config = resolve_config(load_recipe(_RECIPE).drafter, store.meta)
        drafter = Drafter(config).init_weights(0).to("cuda", torch.bfloat16).eval()
        head = load_head(store).to(torch.device("cuda"), torch.bfloat16)
        evaluation = EvalConfig(
            tree_budgets=[8, 32, 64, 256, 512], live_prompts=2, max_new_tokens=arguments.tokens
        )
        result = evaluate_live(target, drafter, head, store, evaluation)
    for block in live_blocks(live_sections(result, evaluation)[0]):
        table = Table(*block.head, title=block.title)
        for row in block.rows:
            table.add_row(*row)
        _console.print(table)
        _console.print(block.note)


if __name__ == "__main__":
    main()
