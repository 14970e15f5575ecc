"""A real target decoded with drafters of every kind: is the text its own, do replay and live agree?

    python -m tests.benchmarks.real_target_exactness --recipe R [--drafter FOLDER] [--prompts 64]

Reads the evaluation store of a recipe whose tables and stores are finished. Decodes the same
prompts greedily in float32 without a drafter, with chain and with the recipe's tree budgets, for an
oracle (proposes the text itself), an always-wrong, a random and, where given, a trained drafter.
Prints one line per drafter and method; exit code 1 where text differs from the target's own, where
the oracle does not fill every block but the last, or where replay and live differ by over 2 %.
Cost: one target forward per round; minutes to an hour on two cores.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from drafttrain.acceptance.evaluate import Drafting, drafting_of
from drafttrain.acceptance.live import decode_store
from drafttrain.acceptance.records import LiveResult
from drafttrain.acceptance.summary import live_sections
from drafttrain.acceptance.tree import AUTOREGRESSIVE
from drafttrain.data.store_reader import FeatureStore
from drafttrain.export import load_drafter
from drafttrain.extract.head import load_head
from drafttrain.extract.target import Target, load_target
from drafttrain.messages import quiet_libraries, set_up_logging
from drafttrain.recipe import Recipe, load_recipe
from tests.drafttrain.acceptance.proposers import drafting

_AGREEMENT = 0.02


def draftings(recipe: Recipe, store: FeatureStore, folder: Path | None) -> dict[str, Drafting]:
    """The drafters to try, by name."""
    size, vocab = recipe.drafter.block_size, store.meta.vocab_size
    found = {kind: drafting(kind, size, vocab) for kind in ("oracle", "wrong", "random")}
    if folder is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        drafter = load_drafter(folder, device, torch.float32)
        found["trained"] = drafting_of(drafter, load_head(store).to(device, torch.float32))
    return found


def spread(store: FeatureStore, count: int) -> list[int]:
    """``count`` samples, evenly over the store."""
    return [i * len(store) // count for i in range(min(count, len(store)))]


def report(name: str, size: int, result: LiveResult, recipe: Recipe, table: Table) -> bool:
    """Add a drafter's lines to the table; True if everything holds."""
    (section,) = live_sections(result, recipe.eval)
    fine = True
    for method in section.per_prompt:
        row = section.overall(method)
        different = [o for o in result.outputs if o.method == method and o.position is not None]
        gap = next((g for g in section.gaps if g.method == method), None)
        fine &= not different and (gap is None or abs(gap.gap) <= _AGREEMENT)
        if name == "oracle" and method != AUTOREGRESSIVE.label:
            # Only a prompt's last round, cut at the end of the text, may emit fewer than B.
            records = [r for r in result.records if r.method == method]
            full, rounds = (
                sum(r.emitted[size] for r in records),
                sum(sum(r.emitted) for r in records),
            )
            fine &= full >= rounds - len({r.sample_id for r in records})
        if row is not None:
            total = len({o.sample_id for o in result.outputs}) or row.prompts
            shown = "" if gap is None else f"{gap.replay:.4f}"
            same = f"{total - len(different)}/{total}"
            table.add_row(name, method, f"{row.tau:.4f}", shown, str(row.rounds), same)
    return fine


def main() -> int:
    """Decode, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--only", nargs="*", help="kinds of drafters")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    set_up_logging()
    quiet_libraries()
    recipe = load_recipe(arguments.recipe, tuple(arguments.overrides))
    store = FeatureStore(recipe.store("eval"))
    target: Target = load_target(recipe.target)
    indices = spread(store, arguments.prompts)
    fine = True
    for name, kind in draftings(recipe, store, arguments.drafter).items():
        if arguments.only and name not in arguments.only:
            continue
        result = decode_store(target, kind, store, recipe.eval, indices)
        table = Table("drafter", "method", "live tau", "replay tau", "rounds", "text is target's")
        fine &= report(name, kind.block_size, result, recipe, table)
        Console(width=100).print(table)
    print("everything holds" if fine else "NOT everything holds")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
