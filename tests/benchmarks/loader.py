"""The loader against the disk: raw reading, the trainer's batches in random order, memory.

    python -m tests.benchmarks.loader --folder DIR [--shards 50] [--codec bf16]

Writes a store of random states (50 shards of 42 MB in bf16, five taps of width 1024), then reads it
cold: its files one after another in large pieces, and by ``make_batch`` in the order of a training
epoch, which checks every shard's checksum at first use. A second epoch finds the shards checked and
in memory. Prints GB/s of both, their ratio, and resident memory (without mapped files) on the way.
Dropping the page cache needs root; without it everything is warm, and the table says so. Cost: the
store once written and twice read.
"""

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from drafttrain.batches import make_batch
from drafttrain.data.order import sample_at
from drafttrain.data.samples import make_sample
from drafttrain.data.store_format import plan_shards, write_meta
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.store_writer import ShardBuffer
from tests.data.store_factory import make_meta

_WIDTH, _TAPS, _LENGTH, _PER_SHARD, _BATCH = 1024, [1, 3, 5, 7, 9], 512, 8, 8
_PIECE = 16 << 20
_console = Console(width=120)


def write_store(folder: Path, shards: int, codec: str) -> None:
    """A store of ``shards`` shards of random states."""
    rng = np.random.default_rng(0)
    samples = [
        make_sample(
            rng.integers(0, 32, _LENGTH), np.arange(_LENGTH) >= 128,
            source="random", mode="no_think", greedy=False,
        )
        for _ in range(shards * _PER_SHARD)
    ]  # fmt: skip
    lengths = [_LENGTH] * len(samples)
    meta = make_meta(
        folder, lengths, hidden_size=_WIDTH, taps=_TAPS, num_target_layers=12, codec=codec,
        final_hidden=False, shard_tokens=_LENGTH * _PER_SHARD, num_shards=shards,
    )  # fmt: skip
    write_meta(folder, meta)
    generator = torch.Generator().manual_seed(0)
    for shard in plan_shards(lengths, meta.shard_tokens):
        chosen = samples[shard.first : shard.stop]
        buffer = ShardBuffer(meta, shard, chosen)
        for position in range(len(chosen)):
            states = torch.randn(_LENGTH, len(_TAPS), _WIDTH, generator=generator)
            buffer.add(position, states, None)
        buffer.seal(folder)


def drop_cache() -> bool:
    """Forget what the system has read; False where that is not allowed."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def read_raw(folder: Path) -> tuple[float, int]:
    """Seconds and bytes of reading every shard's states in large pieces."""
    total, begin = 0, time.perf_counter()
    piece = bytearray(_PIECE)
    for path in sorted(folder.glob("shard-*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                total += count
    return time.perf_counter() - begin, total


def resident() -> float:
    """Anonymous resident memory of this process, MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1000
    return 0.0


def read_epoch(store: FeatureStore, epoch: int, memory: list[float]) -> float:
    """Seconds of one epoch of micro-batches in training order."""
    steps = len(store) // _BATCH
    begin = time.perf_counter()
    for step in range(epoch * steps, (epoch + 1) * steps):
        drawn = [sample_at(len(store), 0, p) for p in range(step * _BATCH, (step + 1) * _BATCH)]
        samples = [(epoch, store.sample(index)) for epoch, index in drawn]
        make_batch(samples, seed=0, anchors=64, block_size=16, packing=False)
        if step % max(1, steps // 5) == 0:
            memory.append(resident())
    return time.perf_counter() - begin


def main() -> None:
    """Write, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=50)
    parser.add_argument("--codec", default="bf16")
    arguments = parser.parse_args()
    folder = arguments.folder / "loader-benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    write_store(folder, arguments.shards, arguments.codec)
    cold = drop_cache()
    raw, size = read_raw(folder)
    drop_cache()
    store, memory = FeatureStore(folder), [resident()]
    first = read_epoch(store, 0, memory)
    second = read_epoch(store, 1, memory)
    table = Table("reading", "GB/s", "of raw")
    for name, seconds in (
        (f"raw, {'cold' if cold else 'warm'}", raw),
        (f"batches, first epoch, {'cold' if cold else 'warm'}, checksums included", first),
        ("batches, second epoch", second),
    ):
        table.add_row(name, f"{size / seconds / 1e9:.2f}", f"{raw / seconds:.2f}")
    _console.print(f"{arguments.shards} shards, {size / 1e9:.2f} GB, {arguments.codec}")
    _console.print(table)
    _console.print("anonymous memory on the way, MB:", ", ".join(f"{m:.0f}" for m in memory))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
