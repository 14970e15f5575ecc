"""What a codec costs: error of the taps, bytes per token, and acceptance length, against bf16.

    python -m tests.benchmarks.codec_effect --recipe R [--drafter FOLDER] [--train SEEDS]

Extracts the sample tables of a recipe (made by ``drafttrain data prepare``) once per codec into
``<output>/codecs/<codec>``, or uses what an earlier call finished there. Prints, on the evaluation
store, the relative error of every tap and the bytes per token; with ``--drafter`` replay tau of
that one drafter on either store; with ``--train N`` trains a drafter from every store for each of N
seeds with ``drafttrain train``, which replays each on its own store. Changes come with the paired
95 % interval over prompts; seeds show how much two trainings differ for no reason. Cost: one target
forward per token and codec, then N trainings of the recipe per codec.
"""

import argparse
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from drafttrain.acceptance.evaluate import evaluate_replay
from drafttrain.acceptance.report import Section, read_report, report_path, report_steps
from drafttrain.acceptance.stats import paired_interval
from drafttrain.acceptance.summary import replay_section
from drafttrain.acceptance.tree import AUTOREGRESSIVE
from drafttrain.data.store_reader import FeatureStore
from drafttrain.export import load_drafter
from drafttrain.extract.head import load_head
from drafttrain.messages import quiet_libraries, set_up_logging
from drafttrain.recipe import SPLITS, Recipe, load_recipe

_REFERENCE, _CODEC = "bf16", "fp8"
_OUTLIERS = 8  # largest dimensions of a tap, left out of the last column
_VERB = "from drafttrain.cli import main; main()"
console = Console(width=110)


def drafttrain(verb: str, recipe: Path, overrides: list[str]) -> None:
    """Run the command line as a user does."""
    subprocess.run([sys.executable, "-c", _VERB, verb, "-r", str(recipe), *overrides], check=True)


def link(name: str, there: Path, here: Path) -> None:
    """Use an artifact of another run in this one."""
    here.mkdir(parents=True, exist_ok=True)
    if not (here / name).exists():
        (here / name).symlink_to((there / name).resolve())


def errors(reference: FeatureStore, store: FeatureStore) -> Table:
    """Per tap: relative error of a token's state (L2) and of the whole, decoded against decoded."""
    names = ("tap", "mean of tokens", "worst token", "all tokens", f"mean without {_OUTLIERS} dims")
    table = Table(*names, title=f"relative L2 error of {store.meta.codec} on the evaluation store")
    samples = range(len(store))
    for i, layer in enumerate(store.meta.taps):
        wanted = torch.cat([reference.sample(s).taps[:, i].float() for s in samples])
        wrong = torch.cat([store.sample(s).taps[:, i].float() for s in samples]) - wanted
        rows = wrong.norm(dim=1) / wanted.norm(dim=1)
        small = wanted.abs().mean(0).argsort()[:-_OUTLIERS]
        rest = wrong[:, small].norm(dim=1) / wanted[:, small].norm(dim=1)
        figures = (rows.mean(), rows.max(), wrong.norm() / wanted.norm(), rest.mean())
        table.add_row(str(layer), *(f"{figure:.4f}" for figure in figures))
    return table


def replay(folder: Path, store: FeatureStore, recipe: Recipe) -> Section:
    """Replay a drafter in float32 on a store."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter = load_drafter(folder, device, torch.float32)
    head = load_head(store).to(device, torch.float32)
    return replay_section(evaluate_replay(drafter, head, store, recipe.eval), recipe.eval)


def compare(title: str, sections: dict[str, list[Section]], recipe: Recipe) -> Table:
    """Tau per method and codec, prompts pooled over seeds, and the change with its interval."""
    table = Table("method", _REFERENCE, _CODEC, "change", "95 %", "each drafter", title=title)
    for method in sections[_CODEC][0].per_prompt:
        if method == AUTOREGRESSIVE.label:
            continue
        sides, each = {}, {}
        for codec, runs in sections.items():
            names = sorted(runs[0].per_prompt[method])
            columns = [[run.per_prompt[method][name] for name in names] for run in runs]
            sides[codec] = np.array(columns).sum(0).T  # [tokens and rounds, prompts]
            each[codec] = " ".join(f"{t / r:.3f}" for t, r in np.array(columns).sum(1))
        old, new = sides[_REFERENCE], sides[_CODEC]
        tau = old[0].sum() / old[1].sum()
        change = paired_interval(
            (new[0], new[1]), (old[0], old[1]), recipe.eval.bootstrap_resamples
        )
        assert change.low is not None and change.high is not None
        table.add_row(
            method,
            f"{tau:.4f}",
            f"{tau + change.value:.4f}",
            f"{change.value / tau:+.2%}",
            f"{change.low / tau:+.2%} to {change.high / tau:+.2%}",
            f"{each[_REFERENCE]} | {each[_CODEC]}",
        )
    return table


def train(recipe: Path, output: Path, seed: int, overrides: list[str]) -> Section:
    """Train a drafter from the stores of ``output`` (or find it trained) and read its replay."""
    folder = output / f"seed-{seed}"
    for name in ("samples", "store"):
        link(name, output, folder)
    drafttrain("train", recipe, [*overrides, f"output={folder}", f"seed={seed}"])
    replayed = read_report(report_path(folder / "reports", max(report_steps(folder / "reports"))))
    assert replayed.replay is not None, "the evaluation samples have no greedy response"
    return replayed.replay


def main() -> int:
    """Extract, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, help="a trained drafter with the recipe's taps")
    parser.add_argument("--train", type=int, default=0, metavar="SEEDS")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    set_up_logging()
    quiet_libraries()
    recipe = load_recipe(arguments.recipe, tuple(arguments.overrides))
    outputs = {codec: recipe.output / "codecs" / codec for codec in (_REFERENCE, _CODEC)}
    settings = {
        codec: [*arguments.overrides, f"output={output}", f"extract.codec={codec}"]
        for codec, output in outputs.items()
    }
    for codec, output in outputs.items():
        link("samples", recipe.output, output)
        if not all((output / "store" / split / "recipe.yaml").exists() for split in SPLITS):
            drafttrain("extract", arguments.recipe, settings[codec])
    stores = {codec: FeatureStore(out / "store" / "eval") for codec, out in outputs.items()}
    console.print(errors(stores[_REFERENCE], stores[_CODEC]))
    for codec, store in stores.items():
        print(f"{codec}: {store.meta.bytes_per_token():,} bytes a token, {store.num_tokens} tokens")
    if arguments.drafter:
        one = {codec: [replay(arguments.drafter, s, recipe)] for codec, s in stores.items()}
        console.print(compare("replay tau of one drafter on either store", one, recipe))
    if arguments.train:
        trained: dict[str, list[Section]] = {codec: [] for codec in outputs}
        for seed, (codec, output) in product(range(arguments.train), outputs.items()):
            trained[codec].append(train(arguments.recipe, output, seed, settings[codec]))
        console.print(compare("replay tau of drafters trained on each store", trained, recipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
