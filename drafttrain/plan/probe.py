"""Rates measured on this machine: a short real extraction and a few real optimizer steps.

Everything is written to ``<output>/probe``, on the disk that the run will use, and removed again.
Extraction is measured on one device; training on as many of this machine's as the plan has, under
the launcher that ``drafttrain train`` uses, from the store that was just extracted.
"""

import gc
import shutil
from pathlib import Path

import torch

from drafttrain.data.errors import DraftTrainError
from drafttrain.data.files import read_json
from drafttrain.data.samples import SampleTable
from drafttrain.extract.probe import probe_extraction
from drafttrain.extract.target import load_target
from drafttrain.launch import RATE_FILE, launch_training
from drafttrain.recipe import Recipe, load_recipe
from drafttrain.run_lock import hold_run

from .stage_plan import Rate


def measure_rates(
    recipe: Recipe,
    given: tuple[Path, tuple[str, ...]],
    table: SampleTable,
    seconds: float,
    devices: int,
) -> dict[str, Rate]:
    """Measure extraction and training for about ``seconds`` each.

    Args:
        recipe: of the run.
        given: the same recipe as file and overrides, for the training processes.
        table: the training samples.
        seconds: how long to measure; preparations come on top.
        devices: that the plan is made for.

    Returns:
        The rates of one device, ``extract`` and ``train``.

    Raises:
        DraftTrainError: another probe runs here, or training did not start.
    """
    folder = recipe.output / "probe"
    with hold_run(recipe.output, "probing"):
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed probe
        try:
            whole = recipe.extract.model_copy(update={"features": "stored", "store": None})
            small = recipe.model_copy(update={"output": folder, "extract": whole})
            target = load_target(recipe.target)
            extracted = probe_extraction(
                target,
                small.extract,
                table,
                (small.table("train").parent, small.store("train")),
                seconds,
            )
            del target
            gc.collect()
            torch.cuda.empty_cache()
            trained = _training_rate(recipe, given, folder, seconds, devices)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {"extract": Rate(extracted, "probe"), "train": Rate(trained, "probe")}


def _training_rate(
    recipe: Recipe, given: tuple[Path, tuple[str, ...]], folder: Path, seconds: float, devices: int
) -> float:
    """Tokens per second of one device; each does as many micro-batches a step as in the run."""
    ranks = max(1, min(devices, torch.cuda.device_count()))
    micro = recipe.train.micro_batch
    share = max(1, recipe.train.global_batch // (devices * micro)) * micro
    path, overrides = given
    overrides = (
        *overrides,
        f"output={folder}",
        # The probe reads a whole little store, wherever the run's own states come from.
        "extract.features=stored",
        "extract.budget=null",
        "extract.store=null",
        "extract.consumers=1",
        f"train.global_batch={share * ranks}",
        f"train.epochs={share * ranks}",  # so that the few samples make a step
    )
    code = launch_training(load_recipe(path, overrides), path, overrides, ranks, measure_s=seconds)
    if code:
        raise DraftTrainError(
            f"the training probe ended with exit code {code}, see above: mend that, or give"
            " --extract-rate and --train-rate instead of --probe"
        )
    rate = read_json(folder / RATE_FILE, DraftTrainError, "give --train-rate instead of --probe")
    return float(rate["tokens_per_s"]) / ranks
