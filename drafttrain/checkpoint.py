"""Checkpoints: DeepSpeed state for exact resume, and a plain exported drafter beside it.

    checkpoints/step-000200/
        deepspeed/     weights, moments, schedule (all ranks), and the moving average
                       (``ema.safetensors``) of ``train.ema``       removed when old, see ``prune``
        drafter/       config.json + model.safetensors: the weights, or with ``train.ema`` their
                       moving average, in the computing dtype       kept
        recipe.yaml    the resolved recipe
        COMPLETE.json  written last: step, ranks, every file's size

A folder is written under a temporary name and renamed when every file is on the disk, so a kill at
any moment leaves the previous checkpoint as the newest. Resume takes the newest folder whose
COMPLETE.json agrees with the files; a damaged one is skipped with a message, never chosen.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file

from drafttrain.data.errors import CheckpointError
from drafttrain.data.files import fsync_path, read_json, write_json

from .drafter.config import DrafterConfig
from .ema import EMA_FILE, WeightAverage
from .engine import masters
from .export import save_drafter
from .recipe import Recipe
from .train_config import TrainConfig

log = logging.getLogger(__name__)

MARKER = "COMPLETE.json"
STATE = "deepspeed"
DRAFTER = "drafter"
# Keys that may change between a checkpoint and its resumption.
_FREE_KEYS = (
    "output",
    "eval",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.activation_checkpointing",
    "train.stop_after_skipped",
    "train.loggers",
    # Where states come from and lie changes them by rounding at most.
    "extract.features",
    "extract.store",
    "extract.budget",
    "extract.consumers",
)


def step_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` optimizer steps."""
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder, from its marker."""
    marker = read_json(folder / MARKER, CheckpointError, "name a complete checkpoint")
    return int(marker["step"])


def save_checkpoint(
    engine: Any,
    config: DrafterConfig,
    recipe: Recipe,
    step: int,
    average: WeightAverage | None = None,
) -> Path:
    """Write a complete checkpoint; every rank calls this at the same step."""
    final = step_folder(recipe.checkpoints, step)
    tmp = final.with_name(final.name + ".tmp")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        _set_aside(final)
        tmp.mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(tmp), tag=STATE, client_state={"step": step}, save_latest=False)
    weights = full_weights(engine) if average is None else average.full()
    dist.barrier()
    if rank == 0:
        if average is not None:
            save_file(weights, tmp / STATE / EMA_FILE)
            dtype = next(engine.module.parameters()).dtype
            weights = {name: weight.to(dtype) for name, weight in weights.items()}
        save_drafter(config, weights, tmp / DRAFTER)
        (tmp / "recipe.yaml").write_text(recipe.to_yaml())
        files = sorted(p for p in tmp.rglob("*") if p.is_file())
        for path in files:
            fsync_path(path)
        sizes = {str(p.relative_to(tmp)): p.stat().st_size for p in files}
        write_json(tmp / MARKER, {"step": step, "ranks": world, "resumable": True, "files": sizes})
        os.replace(tmp, final)
        fsync_path(final.parent)
    dist.barrier()
    return final


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """The drafter's unpartitioned weights in compute dtype (a collective under ZeRO 3)."""
    module = engine.module
    if engine.zero_optimization_stage() < 3:
        return dict(module.state_dict())
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def state_bytes(parameters: int, train: TrainConfig) -> int:
    """Forecast of ``deepspeed/``: fp32 masters, two fp32 moments and, beside masters, weights.

    Args:
        parameters: of the drafter.
        train: stage 0 has no masters beside its fp32 weights, stage 3 no weights beside masters;
            a moving average is another fp32 copy.
    """
    weights = 2 if train.precision == "bf16" else 4
    average = 0 if train.ema is None else 4
    return parameters * (average + (12 if train.zero_stage in (0, 3) else 12 + weights))


def find_complete(root: Path, *, resumable: bool) -> Path | None:
    """The newest complete checkpoint, or None when there is none.

    Args:
        root: the run's checkpoint folder.
        resumable: only those that still hold optimizer state.
    """
    for folder in reversed(_step_folders(root)):
        problem = _problem(folder, resumable)
        if problem is None:
            return folder
        log.warning("skipping checkpoint %s: %s", folder, problem)
    return None


def load_state(
    engine: Any, folder: Path, recipe: Recipe, average: WeightAverage | None = None
) -> int:
    """Restore the engine from a complete checkpoint; returns the steps already done.

    Raises:
        CheckpointError: the checkpoint was made by another recipe or number of ranks.
    """
    marker = read_json(folder / MARKER, CheckpointError, "choose another checkpoint")
    check_same_run(folder, recipe)
    world = dist.get_world_size()
    if marker["ranks"] != world and recipe.train.zero_stage > 0:
        raise CheckpointError(
            f"{folder} was written by {marker['ranks']} ranks and ZeRO stage "
            f"{recipe.train.zero_stage} splits the optimizer by rank: resume with "
            f"--ranks {marker['ranks']} instead of {world}"
        )
    loaded, state = engine.load_checkpoint(str(folder), tag=STATE)
    if loaded is None or state["step"] != marker["step"]:
        raise CheckpointError(f"{folder}/{STATE} does not hold the state of step {marker['step']}")
    assert all(m.dtype == torch.float32 for m in masters(engine)), "masters are not float32"
    if average is not None:
        average.load(folder / STATE)
    return int(marker["step"])


def check_same_run(folder: Path, recipe: Recipe) -> None:
    """Refuse to continue a checkpoint under settings that would change the result."""
    path = folder / "recipe.yaml"
    try:
        saved = _flatten(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, AttributeError) as exc:
        raise CheckpointError(f"{path} cannot be read ({exc}): choose another checkpoint") from None
    now = _flatten(recipe.resolved())
    for key in sorted(set(saved) | set(now)):
        free = any(key == f or key.startswith(f + ".") for f in _FREE_KEYS)
        if not free and saved.get(key) != now.get(key):
            raise CheckpointError(
                f"{folder} was trained with {key} = {saved.get(key)!r}, the recipe says "
                f"{now.get(key)!r}: change it back or choose another output folder"
            )


def prune(root: Path, keep: int) -> None:
    """Drop the optimizer state of all but the newest ``keep`` checkpoints; drafters stay."""
    resumable = [f for f in _step_folders(root) if _problem(f, resumable=True) is None]
    for folder in resumable[:-keep]:
        marker = read_json(folder / MARKER, CheckpointError, "remove the folder")
        files = {k: v for k, v in marker["files"].items() if not k.startswith(STATE + "/")}
        write_json(folder / MARKER, marker | {"resumable": False, "files": files})
        shutil.rmtree(folder / STATE)


def _step_folders(root: Path) -> list[Path]:
    """Checkpoints under their final name, oldest first: none that is temporary or set aside."""
    return [f for f in sorted(root.glob("step-*")) if f.is_dir() and not f.suffix]


def _problem(folder: Path, resumable: bool) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        marker = read_json(folder / MARKER, CheckpointError, "")
        files, can_resume = dict(marker["files"]), bool(marker["resumable"])
    except CheckpointError:
        return f"{MARKER} is missing or unreadable, so it was never finished"
    except (KeyError, TypeError, ValueError):
        return f"{MARKER} has no list of files"
    if resumable and not can_resume:
        return "its optimizer state was pruned"
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or not {size} bytes long"
    return None


def _set_aside(folder: Path) -> None:
    """Move what stands under a checkpoint's name out of the way; nothing is deleted."""
    number = 1
    while folder.exists():
        aside = folder.with_name(f"{folder.name}.aside-{number}")
        if not aside.exists():
            log.warning("%s exists already; moved to %s", folder, aside.name)
            folder.rename(aside)
        number += 1


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    out: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        out.update(_flatten(item, name + ".") if isinstance(item, dict) else {name: item})
    return out
