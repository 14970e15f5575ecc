"""Extraction: a sample table and a target -> a finished feature store, shard by shard.

Rerunning the same command continues: what is done is read from the sealed records on disk each
time, and only missing shards are computed. Guarantee: the finished store has the same bytes however
often the work was interrupted; a store of other settings is refused, never overwritten; one process
writes a store at a time. Cost: one target forward per token, one shard in memory.
"""

import errno
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from drafttrain.data.errors import StoreError
from drafttrain.data.files import file_checksum, leftovers, try_lock
from drafttrain.data.samples import SampleTable, read_table
from drafttrain.data.store_format import (
    HEAD_NAME,
    META_NAME,
    Shard,
    StoreMeta,
    changed_settings,
    plan_shards,
    read_meta,
    write_meta,
)
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.store_writer import is_sealed

from .config import ExtractConfig
from .engine import Engine
from .head import capture_head
from .pipeline import ShardWriter
from .progress import extraction_progress, human_bytes
from .settings import store_settings
from .taps import resolve_taps
from .target import Target

_LOCK_NAME = ".lock"
_LOGGER = logging.getLogger(__name__)


def extract(target: Target, config: ExtractConfig, table_path: Path, out_dir: Path) -> FeatureStore:
    """Extract a sample table into a feature store, or finish one that was begun.

    Args:
        target: the frozen target.
        config: what to take and how to store it.
        table_path: a finished sample table.
        out_dir: the store's folder; made if absent.

    Returns:
        The finished store.

    Raises:
        StoreError: table and target do not fit, the folder holds another store, another process is
            writing it, the disk is too small, or the target gave unusable states. Sealed shards
            stay as they are.
        TargetError: the taps do not fit, or the head does not reproduce the target's logits.
        DataError: the table is missing or damaged.
    """
    table = read_table(table_path)
    resolve_taps(config.taps, target.num_layers)
    _check_samples(table, target, table_path)
    shards = plan_shards(table.lengths, config.shard_tokens)
    out_dir.mkdir(parents=True, exist_ok=True)
    with _only_writer(out_dir):
        _remove_leftovers(out_dir)
        meta = _prepare(target, config, table, out_dir)
        todo = [shard for shard in shards if not is_sealed(out_dir, shard, meta)]
        _forecast(meta, todo, len(shards), out_dir)
        _run(target, config, table, meta, todo, out_dir)
    return FeatureStore(out_dir, table.table_hash)


def _check_samples(table: SampleTable, target: Target, table_path: Path) -> None:
    """Everything about the table that would fail after hours of work."""
    made_with = table.manifest.get("tokenizer_hash")
    if made_with != target.tokenizer_hash:
        raise StoreError(
            f"{table_path} was made with tokenizer {made_with}, target {target.name} has"
            f" {target.tokenizer_hash}: prepare the samples with this target's tokenizer"
        )
    if len(table) == 0:
        raise StoreError(f"{table_path} has no samples: nothing to extract; see its manifest")
    for sample in table:
        length = len(sample.input_ids)
        if not 0 < length <= target.max_positions:
            raise StoreError(
                f"{table_path}: sample {sample.sample_id} has {length} tokens, target"
                f" {target.name} takes 1 to {target.max_positions}; lower data.max_length"
            )
        outside = (sample.input_ids < 0) | (sample.input_ids >= target.vocab_rows)
        if outside.any():
            place = int(np.flatnonzero(outside)[0])
            raise StoreError(
                f"{table_path}: sample {sample.sample_id} has token id"
                f" {sample.input_ids[place]} at position {place}, target {target.name} has"
                f" embedding rows 0 to {target.vocab_rows - 1}; prepare the samples for this target"
            )


@contextmanager
def _only_writer(out_dir: Path) -> Iterator[None]:
    """Hold the store's lock; the system drops it when the process ends, however it ends."""
    with (out_dir / _LOCK_NAME).open("w") as file:
        if not try_lock(file):
            raise StoreError(
                f"{out_dir}: another process is extracting into this store; wait for it or stop it"
            )
        yield


def _remove_leftovers(out_dir: Path) -> None:
    for path in leftovers(out_dir):
        _LOGGER.info("removing %s, left by an interrupted run", path)
        path.unlink()


def _prepare(target: Target, config: ExtractConfig, table: SampleTable, out_dir: Path) -> StoreMeta:
    """Make head and ``store.json``, or check that those here are of the same settings."""
    begun = read_meta(out_dir) if (out_dir / META_NAME).exists() else None
    head_path = out_dir / HEAD_NAME
    if begun is None or not head_path.exists():
        capture_head(target).save(head_path)
    meta = store_settings(target, config, table, file_checksum(head_path))
    if begun is None:
        write_meta(out_dir, meta)
        return meta
    changed = changed_settings(begun, meta)
    if changed:
        raise StoreError(
            f"{out_dir} holds a store of other settings ({'; '.join(changed)}); nothing was"
            " changed: give another output folder, restore the settings, or move the old store away"
        )
    return begun


def _forecast(meta: StoreMeta, todo: list[Shard], planned: int, out_dir: Path) -> None:
    """Say how much will be written, and refuse what does not fit."""
    tokens = sum(shard.tokens for shard in todo)
    needed = int(tokens * meta.bytes_per_token())
    free = shutil.disk_usage(out_dir).free
    _LOGGER.info(
        "%s: %d of %d shards done; %s tokens to extract need %s (%s a token), %s are free",
        out_dir,
        planned - len(todo),
        planned,
        f"{tokens:,}",
        human_bytes(needed),
        human_bytes(meta.bytes_per_token()),
        human_bytes(free),
    )
    if needed > free:
        raise StoreError(
            f"{out_dir}: {human_bytes(needed)} needed for {tokens:,} tokens, {human_bytes(free)}"
            " free: free space, choose another folder, or extract fewer taps or samples"
        )


def _run(
    target: Target,
    config: ExtractConfig,
    table: SampleTable,
    meta: StoreMeta,
    todo: list[Shard],
    out_dir: Path,
) -> None:
    tokens = sum(shard.tokens for shard in todo)
    done: list[Shard] = []

    def report(shard: Shard) -> None:
        done.append(shard)
        _LOGGER.info("%s sealed, %d of %d to go", shard.stem, len(todo) - len(done), len(todo))

    with (
        extraction_progress() as progress,
        Engine(target, meta.taps, meta.codec, meta.final_hidden) as engine,
    ):
        task = progress.add_task(f"extract {out_dir.name}", total=tokens)
        started = time.monotonic()
        try:
            with ShardWriter(meta, out_dir, report) as writer:
                groups = _begun(todo, table, out_dir, writer)
                for group, number, taps, final in engine.features(groups, config.batch_tokens):
                    writer.put(todo[group].index, number, taps, final)
                    progress.advance(task, len(taps))
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _remove_leftovers(out_dir)
            raise StoreError(
                f"{out_dir}: the disk is full; the {len(done)} shards sealed in this run are kept:"
                " free space and rerun the same command"
            ) from exc
    seconds = time.monotonic() - started
    _LOGGER.info(
        "%s: %d shards, %s tokens in %.0f s (%.0f tokens/s)",
        out_dir,
        len(todo),
        f"{tokens:,}",
        seconds,
        tokens / seconds if tokens else 0,
    )


def _begun(
    todo: list[Shard], table: SampleTable, out_dir: Path, writer: ShardWriter
) -> Iterator[list[npt.NDArray[np.int32]]]:
    """Token ids of every shard to do, each announced to the writer when it is asked for."""
    for shard in todo:
        (out_dir / shard.record).unlink(missing_ok=True)  # of a shard whose files were cut short
        samples = [table[i] for i in range(shard.first, shard.stop)]
        writer.begin(shard, samples)
        yield [sample.input_ids for sample in samples]
