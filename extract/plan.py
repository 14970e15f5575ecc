"""What a feature store will be, before the target is loaded.

    the target's configuration + ``extract:`` -> layout (taps, width, codec), bytes of the head
    sample table + store folder               -> what is sealed there and what is left

Guarantee: bytes of states come from ``StoreMeta.bytes_per_token``, as in the check that extraction
itself makes before its first forward. Cost: the configuration file and the records on disk.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from drafttrain.data.errors import StoreError, TargetError
from drafttrain.data.samples import SampleTable
from drafttrain.data.store_format import (
    HEAD_NAME,
    META_NAME,
    StoreMeta,
    changed_settings,
    plan_shards,
    read_meta,
)
from drafttrain.data.store_writer import sealed_record

from .config import ExtractConfig, TargetConfig
from .taps import resolve_taps
from .target_path import resolve_folder

_FILES_PER_SHARD = 3
_SETTINGS = (
    "taps", "final_hidden", "codec", "shard_tokens", "table_hash", "hidden_size", "vocab_size",
    "num_target_layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What sizes depend on: width, decoder layers, embedding rows, positions, head.

    Attributes:
        tied: embedding and LM head are one matrix, stored once.
        itemsize: bytes per weight.
    """

    hidden_size: int
    num_layers: int
    vocab_rows: int
    max_positions: int
    tied: bool
    itemsize: int

    def head_bytes(self) -> int:
        """Size of ``head.safetensors``: embedding, LM head and final norm."""
        matrices = 1 if self.tied else 2
        return (matrices * self.vocab_rows + 1) * self.hidden_size * self.itemsize


def read_shape(config: TargetConfig) -> TargetShape:
    """Read a target's shape from its configuration, without its weights.

    Raises:
        TargetError: it is missing or its configuration cannot be read.
    """
    folder, _ = resolve_folder(config)
    try:
        found = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = found.get_text_config()
        return TargetShape(
            hidden_size=int(text.hidden_size),
            num_layers=int(text.num_hidden_layers),
            vocab_rows=int(text.vocab_size),
            max_positions=int(text.max_position_embeddings),
            tied=bool(found.tie_word_embeddings and text.tie_word_embeddings),
            itemsize=getattr(torch, config.dtype).itemsize,
        )
    except Exception as exc:  # Transformers raises many kinds for a configuration it cannot use
        reason = " ".join(str(exc).split())[:400]
        raise TargetError(
            f"target '{config.path}': its configuration cannot be read"
            f" ({type(exc).__name__}: {reason})"
        ) from exc


def store_layout(shape: TargetShape, config: ExtractConfig, table: SampleTable) -> StoreMeta:
    """The settings of a store to come, as far as its size and the drafter's depend on them.

    It is good for sizes alone and never written: what only a loaded target tells (fingerprint,
    stop tokens, rotary base) is absent or empty.
    """
    return StoreMeta.model_construct(
        taps=resolve_taps(config.taps, shape.num_layers),
        num_target_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_rows,
        max_positions=shape.max_positions,
        stop_ids=[],
        rope_theta=math.nan,
        final_hidden=config.final_hidden,
        codec=config.codec,
        table_hash=table.table_hash,
        shard_tokens=config.shard_tokens,
    )


def store_bytes(meta: StoreMeta, tokens: int) -> int:
    """Forecast of the bytes that so many tokens take in a store, its head not included."""
    return math.ceil(tokens * meta.bytes_per_token())


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One store: the whole, and what of it lies sealed on the disk.

    Attributes:
        tokens: of the whole store; ``tokens_done`` of sealed shards.
        bytes_left: forecast for what is missing, head included; ``bytes_done`` as on disk.
        files: of the finished store.
    """

    tokens: int
    tokens_done: int
    bytes_done: int
    bytes_left: int
    files: int


def plan_store(
    shape: TargetShape, config: ExtractConfig, table: SampleTable, folder: Path
) -> StorePlan:
    """Compare a table with what its store already holds.

    Raises:
        StoreError: the folder holds a store of other settings, or a damaged record.
    """
    layout = store_layout(shape, config, table)
    shards = plan_shards(table.lengths, config.shard_tokens)
    tokens_done = bytes_done = 0
    if (folder / META_NAME).exists():
        begun = read_meta(folder)
        _check_same(begun, layout, folder)
        for shard in shards:
            record = sealed_record(folder, shard, begun)
            if record is not None:
                tokens_done += shard.tokens
                bytes_done += sum(file.bytes for file in record.files.values())
    head, head_left = folder / HEAD_NAME, shape.head_bytes()
    if head.exists():
        bytes_done, head_left = bytes_done + head.stat().st_size, 0
    tokens = int(table.lengths.sum())
    return StorePlan(
        tokens=tokens,
        tokens_done=tokens_done,
        bytes_done=bytes_done,
        bytes_left=store_bytes(layout, tokens - tokens_done) + head_left,
        files=_FILES_PER_SHARD * len(shards) + len((META_NAME, HEAD_NAME)),
    )


def _check_same(begun: StoreMeta, layout: StoreMeta, folder: Path) -> None:
    changed = changed_settings(begun, layout, _SETTINGS)
    if changed:
        raise StoreError(
            f"{folder} holds a store of other settings ({'; '.join(changed)}): extraction would"
            " refuse it; give another output folder, restore the settings, or move the store away"
        )
