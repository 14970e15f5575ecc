"""Evaluate one checkpoint of a run and publish its report.

``replay_checkpoint`` runs on every training rank after each checkpoint: each replays its share of
the evaluation samples from the exported drafter (which also proves that the export loads), rank 0
merges and writes. ``evaluate_checkpoint`` adds live decoding with the target.
"""

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from drafttrain.checkpoint import DRAFTER
from drafttrain.data.store_reader import FeatureStore
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.resolve import check_fits
from drafttrain.export import load_drafter
from drafttrain.extract.head import Head, load_head
from drafttrain.recipe import Recipe

from .evaluate import evaluate_replay
from .live import evaluate_live
from .publish import build_report, publish_report
from .records import LiveResult, ReplayResult, merge
from .report import Report
from .session import TargetSession
from .settings import EvalSettings, settings_of

log = logging.getLogger(__name__)


def replay_checkpoint(
    recipe: Recipe, folder: Path, step: int, device: torch.device
) -> dict[str, float]:
    """Replay a finished checkpoint, shared among the ranks of a training run.

    Args:
        recipe: of the run.
        folder: the checkpoint.
        step: its optimizer step.
        device: of this rank.

    Returns:
        Numbers for the training log (rank 0; empty elsewhere).
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = FeatureStore(recipe.store("eval"), final=False)
    drafter, head = _load(folder / DRAFTER, store, device)
    mine = range(rank, len(store), world)
    part = evaluate_replay(drafter, head, store, recipe.eval, mine, progress=rank == 0)
    parts: list[ReplayResult | None] = [None] * world
    dist.all_gather_object(parts, part)
    if rank != 0:
        return {}
    whole = merge([p for p in parts if p is not None])
    assert isinstance(whole, ReplayResult)
    if not whole.records:
        log.warning("no replay: %s holds no greedy responses", recipe.store("eval"))
        return {}
    settings = _settings(recipe, store)
    report = build_report(step, settings, drafter.config, recipe.eval, whole)
    report = publish_report(recipe.reports, report)
    numbers = replay_numbers(report)
    shown = "  ".join(f"{name.removeprefix('replay_tau/')} {t:.3f}" for name, t in numbers.items())
    log.info("step %d, replay tau (bonus token included): %s", step, shown)
    return numbers


def evaluate_checkpoint(recipe: Recipe, drafter_folder: Path, step: int, reports: Path) -> Report:
    """Replay and, where the recipe asks for it, live decoding; publishes and returns the report.

    Args:
        recipe: of the run.
        drafter_folder: an exported drafter.
        step: what to call the report.
        reports: where to write it.
    """
    from drafttrain.extract.target import load_target

    store = FeatureStore(recipe.store("eval"), final=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter, head = _load(drafter_folder, store, device)
    target = load_target(recipe.target) if recipe.eval.live_prompts else None
    if target is not None:
        # Refuses a target that cannot be decoded exactly, before the replay is spent on it.
        TargetSession(target, store.meta.taps)
    replay = evaluate_replay(drafter, head, store, recipe.eval)
    live: LiveResult | None = None
    if target is not None:
        live = evaluate_live(target, drafter, head, store, recipe.eval)
    settings = _settings(recipe, store)
    report = build_report(step, settings, drafter.config, recipe.eval, replay, live)
    return publish_report(reports, report)


def replay_numbers(report: Report) -> dict[str, float]:
    """Overall replay tau per method, named for the training log."""
    section = report.replay
    if section is None:
        return {}
    rows = {name: section.overall(name) for name in section.per_prompt}
    return {f"replay_tau/{name}": row.tau for name, row in rows.items() if row is not None}


def _load(folder: Path, store: FeatureStore, device: torch.device) -> tuple[Drafter, Head]:
    """Drafter and head in the same dtype on the same device, checked against the store."""
    drafter = load_drafter(folder, device)
    check_fits(drafter.config, store.meta, folder)
    return drafter, load_head(store).to(device, drafter.fc.weight.dtype)


def _settings(recipe: Recipe, store: FeatureStore) -> EvalSettings:
    return settings_of(store.meta, recipe.eval, recipe.data.template_kwargs, recipe.hash)
