"""Feature stores made without a target: every stored value says whose it is."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.data.errors import StoreError
from drafttrain.data.files import file_checksum, read_json, write_json
from drafttrain.data.samples import Sample, make_sample
from drafttrain.data.shard_states import ShardStates, checksum_rows
from drafttrain.data.store_format import (
    HEAD_NAME,
    FileRecord,
    Shard,
    ShardRecord,
    StoreMeta,
    plan_shards,
    read_meta,
    write_meta,
)
from drafttrain.data.store_gate import columns
from drafttrain.data.store_parity import ColumnParity, ParityRecord, write_parity
from drafttrain.data.store_writer import ShardBuffer

HIDDEN, VOCAB = 8, 32
TAPS = [1, 3]
LENGTHS = [5, 3, 9, 2, 20, 4, 4, 7]
SHARD_TOKENS = 16


def states_of(sample: int, length: int) -> tuple[Tensor, Tensor]:
    """Taps [n, 2, 8] and final [n, 8]: small integers that name sample, token and layer.

    All are below 256, so they are exact in bfloat16 too.
    """
    token = torch.arange(length, dtype=torch.float32)[:, None, None].expand(length, 2, HIDDEN)
    taps = token.clone()
    taps[..., 0] = sample + 1
    taps[:, :, 1] = torch.tensor(TAPS, dtype=torch.float32)
    final = taps[:, 0].clone()
    final[:, 1] = 99
    return taps, final


def make_samples(lengths: list[int] = LENGTHS) -> list[Sample]:
    """Samples of these lengths with distinct ids."""
    rng = np.random.default_rng(0)
    return [
        make_sample(
            rng.integers(0, VOCAB, n),
            np.arange(n) >= n // 2,
            source=f"set{i % 2}",
            mode="no_think",
            greedy=i % 3 == 0,
        )
        for i, n in enumerate(lengths)
    ]


@dataclass
class MadeStore:
    folder: Path
    meta: StoreMeta
    samples: list[Sample]
    shards: list[Shard]


def make_meta(folder: Path, lengths: list[int] = LENGTHS, **changes) -> StoreMeta:
    """Write a head and return settings that name it."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {"embedding": torch.ones(VOCAB, HIDDEN), "norm": torch.ones(HIDDEN)}
    save_file(head, folder / HEAD_NAME)
    values = {
        "target": "models/tiny",
        "target_revision": None,
        "target_dtype": "float32",
        "target_fingerprint": "f" * 32,
        "tokenizer_hash": "t" * 16,
        "template_hash": "c" * 16,
        "stop_ids": [2],
        "rope_theta": 10000.0,
        "max_positions": 64,
        "taps": TAPS,
        "num_target_layers": 6,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "final_hidden": True,
        "codec": "fp32",
        "table_hash": "a" * 32,
        "shard_tokens": SHARD_TOKENS,
        "num_samples": len(lengths),
        "num_tokens": sum(lengths),
        "num_shards": len(plan_shards(lengths, SHARD_TOKENS)),
        "head_checksum": file_checksum(folder / HEAD_NAME),
    }
    return StoreMeta(**(values | changes))


def fill(meta: StoreMeta, shard: Shard, samples: list[Sample], backwards: bool = False):
    """A buffer with the states of one shard."""
    buffer = ShardBuffer(meta, shard, samples[shard.first : shard.stop])
    order = range(shard.first, shard.stop)
    for i in reversed(order) if backwards else order:
        taps, final = states_of(i, len(samples[i].input_ids))
        buffer.add(i - shard.first, taps, final if meta.final_hidden else None)
    return buffer


def make_store(folder: Path, lengths: list[int] = LENGTHS, **changes) -> MadeStore:
    """A finished store of ``states_of`` values."""
    samples = make_samples(lengths)
    meta = make_meta(folder, lengths, **changes)
    shards = plan_shards(lengths, meta.shard_tokens)
    write_meta(folder, meta)
    for shard in shards:
        fill(meta, shard, samples).seal(folder)
    return MadeStore(folder, meta, samples, shards)


def prove(folder: Path, meta: StoreMeta, cosine: float = 1.0, error: float = 0.0) -> None:
    """Lay down a second engine's proof with these figures in its last column."""
    good, last = (
        ColumnParity(min_cosine=c, mean_cosine=1.0, max_error=e)
        for c, e in ((1.0, 0.0), (cosine, error))
    )
    found = dict.fromkeys(columns(meta), good) | {columns(meta)[-1]: last}
    write_parity(
        folder,
        ParityRecord(engine="vllm", store=meta.identity(), samples={"s": 3}, columns=found),
    )


def sample_checksums(states: ShardStates, record: ShardRecord) -> dict[str, list[str]]:
    """What the present states should have."""
    parts = {name: tensor.split(record.lengths) for name, tensor in states.tensors.items()}
    return {
        field: [
            checksum_rows(parts[name][row] for name in sorted(parts) if name.startswith(field))
            for row in range(record.num_samples)
        ]
        for field in record.sample_checksums
    }


def change_record(folder: Path, stem: str, **changes) -> None:
    """Rewrite a record so that it fits the present files, with changes, under a valid seal."""
    value = read_json(folder / f"{stem}.json", AssertionError, "")  # type: ignore[arg-type]
    files = {
        name: FileRecord(
            bytes=(folder / name).stat().st_size, xxh3_128=file_checksum(folder / name)
        ).model_dump()
        for name in value["files"]
    }
    record = ShardRecord.model_validate({**value, "files": files})
    try:
        states = ShardStates(folder, read_meta(folder), record)
    except StoreError:  # damaged on purpose
        sums = record.sample_checksums
    else:
        sums = sample_checksums(states, record)
    value |= {"files": files, "sample_checksums": sums, **changes}
    record = ShardRecord.model_validate(value)
    write_json(folder / f"{stem}.json", record.sealed().model_dump())


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
