"""What the ``drafttrain store`` verbs do: look at a store, check it, repair it, merge its parts."""

import functools
import logging
from pathlib import Path

from rich import box
from rich.table import Table

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import name_shards, verify_store
from drafttrain.data.store_info import summarise_store
from drafttrain.data.store_merge import merge_stores

from .messages import quiet_libraries, report_console, set_up_logging
from .recipe import Recipe
from .run_lock import hold_run
from .store_view import show_summary

log = logging.getLogger(__name__)


def info(folder: Path) -> None:
    """``drafttrain store info``: what a store holds, finished or not."""
    report_console.print(show_summary(summarise_store(folder)))


def verify(folder: Path, recipe: Recipe | None, tokens: int, seed: int) -> None:
    """``drafttrain store verify``: every byte, and with a target some states anew.

    Args:
        folder: the store.
        recipe: names the target; None leaves the target out.
        tokens: random tokens to compute again.
        seed: which ones.
    """
    set_up_logging()
    check = verify_store(folder)
    meta, whole = check.meta, check.whole.values()
    log.info(
        "%s: %d samples, %d tokens, %s",
        folder,
        sum(record.num_samples for record in whole),
        sum(record.num_tokens for record in whole),
        "all shards whole"
        if meta.order_seed is None
        else f"all {len(whole)} shards whole that are there now (rolling)",
    )
    if recipe is None:
        return
    from drafttrain.data.store_reader import FeatureStore
    from drafttrain.extract.recheck import COSINE, check_states
    from drafttrain.extract.target import load_target

    quiet_libraries()
    states = check_states(load_target(recipe.target), FeatureStore(folder), tokens, seed)
    table = Table(
        "state",
        "lowest cosine",
        "largest relative error",
        box=box.SIMPLE_HEAD,
        title=f"{states.tokens} tokens computed again ({meta.target_dtype} target, {meta.codec}"
        f" store: at least {COSINE}, at most {states.tolerance:g})",
    )
    for name, cosine in states.cosine.items():
        table.add_row(name, f"{cosine:.6f}", f"{states.error[name]:.2e}")
    report_console.print(table)
    if states.bad:
        raise StoreError("\n".join(states.bad.values()))


def repair(recipe: Recipe, tokens: int) -> None:
    """``drafttrain store repair``: extract again exactly what is bad, in every whole store."""
    from drafttrain.extract.repair import repair as repair_store
    from drafttrain.extract.target import load_target

    quiet_libraries()
    load = functools.cache(lambda: load_target(recipe.target))
    for split in recipe.stored_splits:
        if not recipe.store(split).is_dir():
            raise StoreError(f"{recipe.store(split)} does not exist: run `drafttrain extract`")
    with hold_run(recipe.output, "repairing"):
        for split in recipe.stored_splits:
            folder = recipe.store(split)
            found = repair_store(load, recipe.extract, recipe.table(split), folder, tokens)
            log.info("%s: %s", folder, f"{len(found)} faults repaired" if found else "whole")


def merge(out: Path, sources: tuple[Path, ...]) -> None:
    """``drafttrain store merge``: the parts of one extraction become one store."""
    set_up_logging()
    with hold_run(out, "merging"):
        found = merge_stores(out, sources)
    log.info(
        "%s: %d of %d shards, %d of them taken now",
        out,
        len(found.kept) + len(found.taken),
        found.meta.num_shards,
        len(found.taken),
    )
    if found.missing:
        log.warning("still missing: %s", name_shards(found.missing))
    if found.bad:
        raise StoreError("\n".join(found.bad))
