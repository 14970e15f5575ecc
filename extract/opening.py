"""Open a store for writing: a table that fits, head and ``store.json`` there once, and enough disk.

Guarantee: of many workers that begin together one makes head and settings; the others wait for it
and compare, and so does every later run: a store of other settings is refused, never overwritten.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from drafttrain.data.errors import StoreError
from drafttrain.data.files import file_checksum
from drafttrain.data.samples import SampleTable
from drafttrain.data.sizes import human_bytes
from drafttrain.data.store_format import (
    HEAD_NAME,
    META_NAME,
    Shard,
    StoreMeta,
    changed_settings,
    read_meta,
    write_meta,
)
from drafttrain.data.stream import Stream

from .claims import Claim, ClaimLost, Claims
from .config import ExtractConfig
from .head import capture_head
from .plan import store_bytes
from .settings import store_settings
from .target import Target

STORE_UNIT = "store"  # the claim on head and settings
_LOGGER = logging.getLogger(__name__)


def check_samples(table: SampleTable, target: Target, table_path: Path) -> None:
    """Refuse everything about a table that would fail after hours of work.

    Raises:
        StoreError: another tokenizer's, empty, or a sample that the target cannot take.
    """
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


def open_store(
    target: Target,
    config: ExtractConfig,
    table: SampleTable | Stream,
    claims: Claims,
    out_dir: Path,
    waiting: Callable[[dict[str, Claim]], None],
) -> StoreMeta:
    """Make head and ``store.json``, or check that those here are of the same settings.

    Args:
        target: the frozen target.
        config: what to take and how to store it.
        table: the samples.
        claims: of this worker.
        out_dir: the store's folder.
        waiting: called between attempts, with the worker that is at it; returns after a while.

    Raises:
        StoreError: the folder holds a store of other settings.
        TargetError: the head does not reproduce the target's logits.
    """
    head_path, meta_path = out_dir / HEAD_NAME, out_dir / META_NAME
    while True:
        made = meta_path.exists() and head_path.exists()
        if made or claims.take(STORE_UNIT):
            try:
                with claims.writing(STORE_UNIT):
                    return _make_or_compare(target, config, table, claims, out_dir)
            except ClaimLost:
                _LOGGER.warning("%s was written by another worker meanwhile", meta_path)
            finally:
                if not made:
                    claims.release(STORE_UNIT)
        holder = claims.holder(STORE_UNIT)
        waiting({STORE_UNIT: holder} if holder is not None else {})


def _make_or_compare(
    target: Target,
    config: ExtractConfig,
    table: SampleTable | Stream,
    claims: Claims,
    out_dir: Path,
) -> StoreMeta:
    begun = read_meta(out_dir) if (out_dir / META_NAME).exists() else None
    head_path = out_dir / HEAD_NAME

    def confirm() -> None:
        claims.confirm(STORE_UNIT)

    if begun is None or not head_path.exists():
        capture_head(target).save(head_path, claims.owner, confirm)
    meta = store_settings(target, config, table, file_checksum(head_path))
    if begun is None:
        write_meta(out_dir, meta, claims.owner, confirm)
        return meta
    changed = changed_settings(begun, meta)
    if changed:
        raise StoreError(
            f"{out_dir} holds a store of other settings ({'; '.join(changed)}); nothing was"
            " changed: give another output folder, restore the settings, or move the old store away"
        )
    return begun


def forecast(meta: StoreMeta, todo: list[Shard], planned: int, out_dir: Path) -> None:
    """Say how much will be written.

    Args:
        meta: the store's settings.
        todo: shards that are not sealed, whoever writes them.
        planned: how many shards the store has.
        out_dir: its folder.

    Raises:
        StoreError: it does not fit.
    """
    tokens = sum(shard.tokens for shard in todo)
    needed = store_bytes(meta, tokens)
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
