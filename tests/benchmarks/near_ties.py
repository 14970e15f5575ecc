"""How far rounding moves a trained target's best token: the measurement behind the near-tie bound.

    python -m tests.benchmarks.near_ties --recipe R [--prompts 16] [--tokens 256] [KEY=VALUE ...]

Needs the recipe's evaluation samples. Each prompt is continued greedily, token by token, in the
target's own dtype. The same tokens are then run as chains of ``drafter.block_size`` through tree
verification and, as a control without any code of this project, in one plain forward. Prints for
both: how often the best token differs, and how far the gap between the single-token forward's two
best tokens moved, in steps of ``eps x |best logit|`` (the unit of ``near_tie_bound``).
Cost: prompts x tokens forwards of the target.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from drafttrain.acceptance.lossless import NEAR_TIE_STEPS
from drafttrain.acceptance.replay import spans_of
from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tree import EMPTY_TREE, DraftTree
from drafttrain.data.samples import read_table
from drafttrain.extract.taps import resolve_taps
from drafttrain.extract.target import Target, load_target
from drafttrain.recipe import Recipe, load_recipe

_console = Console(width=140)


def prompts_of(recipe: Recipe, count: int) -> Iterator[Tensor]:
    """The first prompts of the evaluation table, int64 [n] each."""
    for sample in list(read_table(recipe.table("eval")))[:count]:
        spans = spans_of(torch.from_numpy(sample.loss_mask))
        if spans:
            yield torch.from_numpy(sample.input_ids[: spans[0][0]].astype(np.int64))


def continue_greedily(session: TargetSession, prompt: Tensor, tokens: int) -> tuple[list, Tensor]:
    """Greedy ids and the logits [tokens, V] they were taken from, one forward a token."""
    logits = [session.prefill(prompt).logits[0]]
    ids = [int(logits[0].argmax())]
    while len(ids) < tokens:
        logits.append(session.verify(ids[-1], EMPTY_TREE).logits[0])
        session.commit([0])
        ids.append(int(logits[-1].argmax()))
    return ids, torch.stack(logits)


def in_chains(session: TargetSession, prompt: Tensor, ids: list[int], block: int) -> Tensor:
    """Logits [tokens, V] before each of the ids, which are verified as chains of ``block``."""
    found = [session.prefill(prompt).logits]
    for start in range(0, len(ids) - 1, block):
        part = np.array(ids[start : min(start + block, len(ids) - 1)])
        steps = np.arange(len(part) - 1)
        found.append(session.verify(int(part[0]), DraftTree(part[1:], steps, steps + 1)).logits)
        session.commit(list(range(len(part))))
    return torch.cat(found)


@torch.inference_mode()
def in_one_forward(target: Target, prompt: Tensor, ids: list[int]) -> Tensor:
    """Logits [tokens, V] of the same ids from one plain forward of Transformers."""
    whole = torch.cat([prompt, torch.tensor(ids[:-1], dtype=torch.int64)]).to(target.device)
    return target.model(whole[None], use_cache=False, logits_to_keep=len(ids)).logits[0].float()


def shifts(alone: Tensor, other: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: did the best token change, its margin, and how far the margin moved, in steps."""
    best = alone.topk(2, dim=-1)
    step = eps * best.values[:, 0].abs()
    margin = best.values[:, 0] - best.values[:, 1]
    # The rival is whichever token wins in the other forward, else the second best.
    winner = other.argmax(-1)
    flipped = winner != best.indices[:, 0]
    rival = torch.where(flipped, winner, best.indices[:, 1])[:, None]
    gap = best.values[:, 0] - alone.gather(1, rival)[:, 0]
    moved = other.gather(1, best.indices[:, :1])[:, 0] - other.gather(1, rival)[:, 0] - gap
    return flipped, margin / step, moved.abs() / step


def main() -> None:
    """Decode, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, tuple(arguments.overrides))
    target = load_target(recipe.target)
    session = TargetSession(target, resolve_taps(recipe.extract.taps, target.num_layers))
    eps, block = torch.finfo(target.dtype).eps, recipe.drafter.block_size
    results: dict[str, list] = {f"chains of {block}": [], "one plain forward": []}
    for prompt in prompts_of(recipe, arguments.prompts):
        ids, alone = continue_greedily(session, prompt, arguments.tokens)
        others = (in_chains(session, prompt, ids, block), in_one_forward(target, prompt, ids))
        for found, other in zip(results.values(), others, strict=True):
            found.append(shifts(alone, other, eps))
    columns = ["against token by token", "tokens", "best differs", "largest margin"]
    columns += ["moved, median", "99 %", "99.9 %", "largest", f"beyond {NEAR_TIE_STEPS}"]
    table = Table(*columns)
    for name, parts in results.items():
        flipped, margin, moved = (torch.cat(column) for column in zip(*parts, strict=True))
        quantiles = [f"{float(moved.quantile(q)):.2f}" for q in (0.5, 0.99, 0.999, 1)]
        worst = float(margin[flipped].max()) if flipped.any() else 0.0
        beyond = int((margin[flipped] >= NEAR_TIE_STEPS).sum())
        table.add_row(name, str(len(moved)), str(int(flipped.sum())), f"{worst:.2f}", *quantiles,
                      str(beyond))  # fmt: skip
    _console.print(f"{target.name}, {target.dtype}; margins in steps of eps x |best logit|")
    _console.print(table)


if __name__ == "__main__":
    main()
