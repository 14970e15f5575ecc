"""What each verb of the command line does: read the finished artifact before it, write its own."""

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.data.errors import CheckpointError, DataError, RecipeError
from drafttrain.data.files import write_text

from .messages import quiet_libraries, report_console
from .recipe import SPLITS, Recipe
from .run_lock import hold_run

if TYPE_CHECKING:
    from drafttrain.extract.rolling import RollingWorker
    from drafttrain.extract.target import Target

log = logging.getLogger(__name__)


def keep_recipe(recipe: Recipe, folder: Path, owner: str = "") -> None:
    """Store the resolved recipe with an artifact; ``owner`` tells apart those who write one."""
    write_text(folder / "recipe.yaml", recipe.to_yaml(), owner)


def prepare(recipe: Recipe) -> None:
    """``drafttrain data prepare``: sources -> sample tables."""
    from drafttrain.data.prepare import prepare as prepare_tables
    from drafttrain.extract.vocabulary import load_vocabulary

    vocabulary = load_vocabulary(recipe.target)
    with hold_run(recipe.output, "preparing"):
        prepare_tables(
            recipe.data,
            vocabulary.tokenizer,
            vocab_rows=vocabulary.rows,
            mask_token_id=recipe.drafter.mask_token_id,
            stop_ids=vocabulary.stop_ids,
            out_dir=recipe.output / "samples",
        )
        keep_recipe(recipe, recipe.output / "samples")


def regenerate(recipe: Recipe) -> None:
    """``drafttrain data regenerate``: prompts -> the target's own responses."""
    from drafttrain.data.regenerate import regenerate as answer
    from drafttrain.extract.target import load_target
    from drafttrain.extract.vocabulary import load_vocabulary

    config = recipe.data.regenerate
    if config.prompts is None or config.output is None:
        raise RecipeError("data.regenerate.prompts and data.regenerate.output are required here")
    quiet_libraries()
    vocabulary = load_vocabulary(recipe.target)
    answer(
        config,
        vocabulary.tokenizer,
        template_kwargs=recipe.data.template_kwargs,
        stop_ids=vocabulary.stop_ids,
        target_name=recipe.target.path,
        model=load_target(recipe.target).model if config.engine == "local" else None,
    )


def extract(recipe: Recipe, share: tuple[int, int] | None = None) -> None:
    """``drafttrain extract``: sample tables -> feature stores, target loaded once.

    Args:
        recipe: names the run.
        share: this worker's number and how many there are, in a static split.
    """
    from drafttrain.extract.owners import new_owner
    from drafttrain.extract.target import load_target
    from drafttrain.extract.worker import Share, extract_share
    from drafttrain.extract.worker import extract as extract_table

    for split in SPLITS:
        if not recipe.table(split).exists():
            raise DataError(
                f"{recipe.table(split)} does not exist: run `drafttrain data prepare` first"
            )
    features = recipe.extract.features
    if share is not None and features != "stored":
        raise RecipeError(
            f"--worker splits a whole store, extract.features is {features}: start the same command"
            " without it, as many workers as you like"
        )
    quiet_libraries()
    target = load_target(recipe.target)
    rolling = _rolling_worker(recipe, target) if features == "rolling" else None
    for split in recipe.stored_splits:
        what = (target, recipe.extract, recipe.table(split), recipe.store(split))
        if share is None:
            extract_table(*what)
        else:
            extract_share(*what, Share(*share))
        keep_recipe(recipe, recipe.store(split), new_owner())
    if rolling is not None:
        keep_recipe(recipe, recipe.store("train"), new_owner())
        rolling.roll()


def _rolling_worker(recipe: Recipe, target: "Target") -> "RollingWorker":
    """Fills the training store ahead of training, until training is done."""
    from drafttrain.data.samples import read_table
    from drafttrain.extract.rolling import rolling_worker

    from .features import training_steps

    table, step = recipe.table("train"), recipe.train.global_batch
    return rolling_worker(
        target,
        recipe.extract,
        table,
        recipe.store("train"),
        seed=recipe.seed,
        positions=training_steps(recipe, len(read_table(table))) * step,
        step=step,
    )


def evaluate(recipe: Recipe, checkpoint: Path | None) -> bool:
    """``drafttrain eval``: a checkpoint -> its acceptance report, printed at the end.

    Returns:
        Whether live decoding gave the target's own output wherever it must.
    """
    from .acceptance.checkpoints import evaluate_checkpoint
    from .acceptance.render import to_terminal

    quiet_libraries()
    folder, step = drafter_folder(recipe, checkpoint)
    # A drafter from outside the run gets a report of its own, beside no curve of the run's.
    reports = recipe.reports if step is not None else recipe.reports / folder.resolve().name
    log.info("evaluating %s", folder)
    report = evaluate_checkpoint(recipe, folder, step or 0, reports)
    report_console.print(to_terminal(report))
    log.info("report written to %s", reports)
    if not report.lossless:
        log.error(
            "live decoding did not give the target's own output (see Losslessness in the report): "
            "do not trust its numbers; this is a defect of the decoding, not of the drafter"
        )
    return report.lossless


def show_report(file: Path, svg: Path | None) -> None:
    """``drafttrain report``: a finished report on the screen, and as a picture."""
    import io
    import re

    from rich.console import Console

    from .acceptance.render import to_terminal
    from .acceptance.report import read_report

    shown = to_terminal(read_report(file))
    report_console.print(shown)
    if svg is not None:
        console = Console(record=True, width=112, file=io.StringIO())
        console.print(shown)
        picture = console.export_svg(title=f"drafttrain report {file.name}")
        # Without the web fonts that rich links to: a picture must not load anything.
        write_text(svg, re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


def drafter_folder(recipe: Recipe, checkpoint: Path | None) -> tuple[Path, int | None]:
    """The drafter to use and its step (None for a folder outside the run).

    Args:
        recipe: names the run.
        checkpoint: a checkpoint or exported drafter; None means the newest checkpoint.
    """
    from .checkpoint import DRAFTER, find_complete, step_of

    if checkpoint is None:
        checkpoint = find_complete(recipe.checkpoints, resumable=False)
        if checkpoint is None:
            raise CheckpointError(
                f"{recipe.checkpoints} holds no complete checkpoint: run `drafttrain train` first"
            )
    inner = checkpoint / DRAFTER
    if inner.is_dir():
        return inner, step_of(checkpoint)
    if not (checkpoint / "config.json").exists():
        raise CheckpointError(
            f"{checkpoint} is neither a checkpoint nor a drafter folder (no config.json in it)"
        )
    return checkpoint, None


def export(recipe: Recipe, checkpoint: Path | None, out: Path) -> None:
    """``drafttrain export``: a checked copy of a drafter, with the settings engines need."""
    import torch

    from .export import CONFIG_FILE, WEIGHTS_FILE, load_drafter
    from .serving import serving_notes

    folder, _ = drafter_folder(recipe, checkpoint)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} exists and is not empty: choose another --out")
    config = load_drafter(folder, torch.device("cpu")).config
    out.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(folder / name, out / name)
    write_text(out / "README.md", serving_notes(config, recipe.target.path))
    keep_recipe(recipe, out)
    log.info("exported %s to %s", folder, out)


def plan(
    recipe: Recipe,
    given: tuple[Path, tuple[str, ...]],
    *,
    probe: float | None,
    gpus: int,
    space: int | None,
    file: Path | None,
    **rates: float | None,
) -> None:
    """``drafttrain plan``: the cost of a run, printed and, as JSON, written; refused if too large.

    Args:
        recipe: of the run.
        given: the same as file and overrides.
        probe: seconds to measure, or None.
        gpus: that extract and train.
        space: bytes that the run's folder may hold, or None.
        file: where the JSON goes, or None.
        rates: ``<stage>_rate``: tokens per second of one GPU, or None; they win over the probe.
    """
    from .plan.plan import finished_tables, make_plan
    from .plan.probe import measure_rates
    from .plan.render import to_terminal
    from .plan.stage_plan import Rate

    quiet_libraries()
    known = {
        name.removesuffix("_rate"): Rate(value, "given") for name, value in rates.items() if value
    }
    made = make_plan(recipe, known, gpus, space)
    if probe is not None and made.fits:
        table = finished_tables(recipe)["train"]
        known = measure_rates(recipe, given, table, probe, gpus) | known
        made = make_plan(recipe, known, gpus, space)
    report_console.print(to_terminal(made))
    if file is not None:
        made.write(file)
    made.refuse_if_too_large()
