"""Merge the parts of one extraction, written in several folders, into one store.

A shard is checked to the last byte before it is taken (``check_shard``), and comes over as a hard
link where the file system allows, else as a copy whose checksum is compared; its record last. A
second engine's proof comes with its shards; without one in its folder they are not taken.
Guarantee: the sources are only read; parts with other settings are refused before anything is
written; killed at any moment, the same command continues; run again, it changes nothing. Cost: one
pass over what is taken, and where links are impossible a copy of it.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import StoreError
from .files import file_checksum, no_space_explained, publish, write_text
from .progress import tracked
from .store_check import check_shard
from .store_format import (
    HEAD_NAME,
    META_NAME,
    Shard,
    ShardRecord,
    StoreMeta,
    changed_settings,
    read_meta,
    write_meta,
)
from .store_parity import parity_path, proved
from .store_shard import checked_head, read_checked_record

_LOGGER = logging.getLogger(__name__)
_RECIPE_NAME = "recipe.yaml"  # lies beside every artifact


@dataclass(slots=True)
class Merge:
    """What a merge did.

    Attributes:
        meta: settings of all parts.
        kept: shards that were there already.
        taken: shards that came over now.
        missing: shards that no part has whole.
        bad: one line for each damaged shard or head that was found and not replaced.
    """

    meta: StoreMeta
    kept: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def merge_stores(out: Path, sources: Sequence[Path]) -> Merge:
    """Bring the sealed shards of several folders together.

    Args:
        out: the merged store; made if absent.
        sources: folders of the same extraction; not changed.

    Raises:
        StoreError: the folders' settings differ (says in what), one is no store, or the disk is
            full.
    """
    sources = [source for source in sources if source.resolve() != out.resolve()]
    begun = [out] if (out / META_NAME).exists() else []
    metas = {folder: read_meta(folder) for folder in [*begun, *sources]}
    first, meta = next(iter(metas.items()))
    for folder, other in metas.items():
        changed = changed_settings(meta, other)
        if changed:
            raise StoreError(
                f"{folder} is not of the same extraction as {first} ({'; '.join(changed)}); nothing"
                " was merged: merge only folders that one recipe wrote"
            )
    if meta.order_seed is not None:
        raise StoreError(f"{first} is a rolling store, whose shards come and go: nothing to merge")
    out.mkdir(parents=True, exist_ok=True)
    merge = Merge(meta)
    with no_space_explained(out, lambda: f"the {len(merge.kept) + len(merge.taken)} shards there"):
        if not begun:
            write_meta(out, meta)
        _take_head(out, sources, merge)
        recipes = [folder / _RECIPE_NAME for folder in (out, *sources)]
        for recipe in [path for path in recipes if path.is_file()][:1]:
            _place(recipe, out / _RECIPE_NAME, file_checksum(recipe))
        for engine in sorted({engine for folder in sources for engine in proved(folder, meta)}):
            _take_parity(out, sources, engine, meta)
        shards = [Shard.named(index) for index in range(meta.num_shards)]
        for shard in tracked(shards, f"merge {out.name}"):
            _take_shard(out, sources, shard, merge)
    return merge


def _take_head(out: Path, sources: Sequence[Path], merge: Merge) -> None:
    problems = []
    for folder in (out, *sources):
        if not (folder / HEAD_NAME).is_file():
            continue
        try:
            path = checked_head(folder, merge.meta)
        except StoreError as exc:
            problems.append(str(exc))
            continue
        _place(path, out / HEAD_NAME, merge.meta.head_checksum)
        return
    merge.bad += problems or [f"{out}: no part has {HEAD_NAME}"]


def _take_parity(out: Path, sources: Sequence[Path], engine: str, meta: StoreMeta) -> None:
    """Bring an engine's proof over before its shards, unless one is there."""
    if engine in proved(out, meta):
        return
    source = next(folder for folder in sources if engine in proved(folder, meta))
    path = parity_path(source, engine)
    _place(path, parity_path(out, engine), file_checksum(path))


def _take_shard(out: Path, sources: Sequence[Path], shard: Shard, merge: Merge) -> None:
    """Keep the shard that is there, or take the first whole one."""
    problems = []
    if (out / shard.record).exists():
        try:
            read_checked_record(out, shard, merge.meta)
        except StoreError as exc:
            problems.append(str(exc))
        else:
            merge.kept.append(shard.index)
            return
    for source in sources:
        if not (source / shard.record).exists():
            continue
        try:
            record = check_shard(source, merge.meta, shard.index)
        except StoreError as exc:
            problems.append(str(exc))
            continue
        _place_shard(source, out, shard, record)
        merge.taken.append(shard.index)
        for problem in problems:
            _LOGGER.warning("%s; taken from %s instead", problem, source)
        return
    merge.bad += problems
    merge.missing.append(shard.index)


def _place_shard(source: Path, out: Path, shard: Shard, record: ShardRecord) -> None:
    (out / shard.record).unlink(missing_ok=True)  # of a shard that is damaged here
    for name, file in record.files.items():
        _place(source / name, out / name, file.xxh3_128)
    write_text(out / shard.record, (source / shard.record).read_text(encoding="utf-8"))


def _place(source: Path, target: Path, checksum: str) -> None:
    """Make ``target`` the same file as ``source``, atomically."""
    # Renaming one link of a file over another does nothing, and would leave both names.
    if target.exists() and source.samefile(target):
        return
    publish(target, lambda tmp: _link_or_copy(source, tmp, checksum))


def _link_or_copy(source: Path, tmp: Path, checksum: str) -> None:
    tmp.unlink(missing_ok=True)
    try:
        os.link(source, tmp)
        return
    except OSError:  # another file system, or one without links
        pass
    try:
        shutil.copyfile(source, tmp)
        if file_checksum(tmp) != checksum:
            raise StoreError(f"{source}: its copy {tmp} has another checksum: check the disks")
    except (OSError, StoreError):
        tmp.unlink(missing_ok=True)
        raise
