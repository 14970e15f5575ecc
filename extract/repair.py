"""Repair a store: the shards that verification refuses are extracted again, no others.

Guarantee: a repaired store has the bytes of one that was never damaged; a recipe that is not the
store's is refused before anything is touched, and a whole shard of another store is never
overwritten. It may be killed at any moment and run again: a bad shard loses its record first, and
without a record it does not exist. Cost: one pass over the store, and the target's forwards for
the bad shards; the target is not loaded when nothing is wrong.
"""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from drafttrain.data.errors import StoreError
from drafttrain.data.files import file_checksum, fsync_path, read_json
from drafttrain.data.samples import SampleTable, read_table
from drafttrain.data.store_check import check_store
from drafttrain.data.store_format import (
    FORMAT_VERSION,
    HEAD_NAME,
    META_NAME,
    Shard,
    ShardRecord,
    StoreMeta,
    changed_settings,
    read_meta,
    write_meta,
)
from drafttrain.data.store_reader import FeatureStore

from .config import ExtractConfig
from .head import capture_head
from .owners import new_owner
from .recheck import check_states
from .settings import store_settings
from .target import Target
from .worker import extract

_LOGGER = logging.getLogger(__name__)


def repair(
    load: Callable[[], Target],
    config: ExtractConfig,
    table_path: Path,
    folder: Path,
    tokens: int = 0,
) -> list[str]:
    """Extract again what is damaged or missing in a store.

    Args:
        load: gives the target; called only where it is needed.
        config: what the store was made with.
        table_path: the sample table it was made from.
        folder: the store.
        tokens: of a store whose files are whole, also compute the states of so many random tokens
            again, and repair the shards whose states are others.

    Returns:
        What was wrong, one line each; empty if nothing was.

    Raises:
        StoreError: the store is not of this recipe (nothing was changed), or its shards are bad
            again after they were extracted again.
        DataError: the table is missing or damaged.
    """
    table = read_table(table_path)
    problems = _mend_settings(load, config, table, folder)
    check = check_store(folder)
    if tokens and not check.problems():
        check.bad = check_states(load(), FeatureStore(folder), tokens).bad
    problems += check.problems()
    if not check.problems():
        return problems
    for problem in problems:
        _LOGGER.warning("%s", problem)
    if check.plan is not None:
        raise StoreError(check.plan)
    target, meta = load(), check.meta
    changed = changed_settings(meta, store_settings(target, config, table, meta.head_checksum))
    if changed:
        raise StoreError(
            f"{folder} was made with other settings than this recipe's ({'; '.join(changed)});"
            " nothing was changed: repair it with its own recipe.yaml; if store.json itself was"
            " edited, delete it and repair again"
        )
    _refuse_foreign(folder, meta, check.bad)
    if check.head is not None:
        (folder / HEAD_NAME).unlink(missing_ok=True)
    for index in check.bad:
        (folder / Shard.named(index).record).unlink(missing_ok=True)
    fsync_path(folder)
    extract(target, config, table_path, folder)
    remaining = check_store(folder, trusted=check.whole).problems()
    if remaining:
        raise StoreError(
            "\n".join([*remaining, f"{folder}: extracted again, and refused again: see above"])
        )
    return problems


def _owner(path: Path) -> str | None:
    """Which store an undamaged record belongs to; None for a damaged one."""
    try:
        record = ShardRecord.model_validate(read_json(path, StoreError, ""))
    except (StoreError, ValidationError):
        return None
    return record.store if record.sealed().seal == record.seal else None


def _refuse_foreign(folder: Path, meta: StoreMeta, bad: Iterable[int]) -> None:
    names = [Shard.named(index).record for index in bad]
    foreign = [name for name in names if _owner(folder / name) not in (None, meta.identity())]
    if foreign:
        raise StoreError(
            f"{folder}: {', '.join(foreign)} belong to another store; nothing was changed: move"
            " those shards away and repair again"
        )


def _mend_settings(
    load: Callable[[], Target], config: ExtractConfig, table: SampleTable, folder: Path
) -> list[str]:
    """Make ``store.json`` anew if it is damaged and the sealed shards are of this recipe."""
    try:
        read_meta(folder)
        return []
    except StoreError as exc:
        if not folder.is_dir() or _other_version(folder / META_NAME):
            raise
        problem = str(exc)
    target = load()
    owner = new_owner()  # without it, every worker that opens the folder would sweep it away
    head = folder / f"{HEAD_NAME}.anew.{owner}.tmp"
    capture_head(target).save(head, owner)
    meta = store_settings(target, config, table, file_checksum(head))
    owners = {_owner(path) for path in folder.glob("shard-*.json")} - {None}
    if owners and meta.identity() not in owners:
        head.unlink()
        raise StoreError(
            f"{problem}\n{folder}: its sealed shards were made with other settings than this"
            " recipe's; nothing was changed: repair it with the recipe it was made with"
        )
    os.replace(head, folder / HEAD_NAME)
    write_meta(folder, meta)
    return [problem]


def _other_version(path: Path) -> bool:
    """Whether ``store.json`` is not damaged, but of another version of this format."""
    try:
        return read_json(path, StoreError, "").get("format_version", FORMAT_VERSION) != (
            FORMAT_VERSION
        )
    except StoreError:
        return False
