"""The loader against the disk: raw reading, the trainer's batches in random order, memory.

    python -m tests.benchmarks.loader --folder DIR [--geometry small] [--codec bf16] [--rounds 3]

Writes a store of random states (``small``: 50 shards of 50 MB in bf16, samples of 512 tokens, five
taps of width 1024; ``27b``: 12 shards of about 440 MB, samples of 600 to 1,200 tokens, width 5120;
both with the final state). Each round reads it cold: all files one after another in large pieces,
the same by several threads, and by ``FeatureStore`` and ``make_batch`` in the order of a training
epoch, as the trainer does, with every checksum; then a second epoch from memory. Prints the medians
of the rounds in GB/s and tokens/s, the ratios to raw reading within a round, how many H200s they
would feed, and resident memory (without mapped files) on the way. Dropping the page cache needs
root; without it everything is warm, and the table says so. Cost: the store once written and, a
round, four times read.
"""

import argparse
import mmap
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

# A training step on one H200 takes 225 ms for 2,048 tokens.
_H200_TOKENS_PER_S = 2048 / 0.225
_PIECE, _READERS = 16 << 20, 8
_console = Console(width=140)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a store holds: samples of ``shortest .. longest`` tokens, ``per_shard`` a shard."""

    width: int
    shortest: int
    longest: int
    per_shard: int
    shards: int
    batch: int


_GEOMETRIES = {
    "small": Geometry(1024, 512, 512, 8, 50, 8),
    "27b": Geometry(5120, 600, 1200, 8, 12, 4),
}
_TAPS = [1, 3, 5, 7, 9]


def write_store(folder: Path, geometry: Geometry, codec: str) -> None:
    """A store of random states, cut at random places out of one block."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    longest, count = geometry.longest, geometry.shards * geometry.per_shard
    block = torch.randn(2 * longest, len(_TAPS) + 1, geometry.width, generator=generator)
    lengths = rng.integers(geometry.shortest, longest + 1, count).tolist()
    samples = [
        make_sample(
            rng.integers(0, 32, n), np.arange(n) >= n // 4,
            source="random", mode="no_think", greedy=False,
        )
        for n in lengths
    ]  # fmt: skip
    shard_tokens = geometry.per_shard * (geometry.shortest + longest) // 2
    shards = plan_shards(lengths, shard_tokens)
    meta = make_meta(
        folder, lengths, hidden_size=geometry.width, taps=_TAPS, num_target_layers=12, codec=codec,
        shard_tokens=shard_tokens, num_shards=len(shards),
    )  # fmt: skip
    write_meta(folder, meta)
    for shard in shards:
        buffer = ShardBuffer(meta, shard, samples[shard.first : shard.stop])
        for position, n in enumerate(lengths[shard.first : shard.stop]):
            start = int(rng.integers(0, longest))
            states = block[start : start + n]
            buffer.add(position, states[:, :-1], states[:, -1])
        buffer.seal(folder)


def drop_cache() -> bool:
    """Forget what the system has read; False where that is not allowed."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def read_raw(folder: Path, threads: int) -> float:
    """Bytes a second of reading every shard's states in large pieces, file after file."""

    def read(path: Path) -> int:
        total, piece = 0, mmap.mmap(-1, _PIECE)  # goes back to the system
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                total += count
        return total

    drop_cache()
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, sorted(folder.glob("shard-*.safetensors"))))
    return total / (time.perf_counter() - begin)


def resident() -> float:
    """Anonymous resident memory of this process, MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1000
    return 0.0


def read_epoch(store: FeatureStore, batch: int, epoch: int, memory: list[float]) -> float:
    """Bytes a second of one epoch of micro-batches in training order."""
    count = len(store)
    steps, size = count // batch, 0
    begin = time.perf_counter()
    for step in range(epoch * steps, (epoch + 1) * steps):
        ahead = [sample_at(count, 0, p) for p in range(step * batch, (step + 2) * batch)]
        store.prefetch(index for _, index in ahead)
        samples = [(epoch, store.sample(index)) for epoch, index in ahead[:batch]]
        made = make_batch(samples, seed=0, anchors=64, block_size=16, packing=False)
        size += made.num_tokens
        if step % max(1, steps // 5) == 0:
            memory.append(resident())
    return size * (store.meta.bytes_per_token() - 5) / (time.perf_counter() - begin)


def measure(folder: Path, batch: int, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Rates of every way of reading, in turns; resident memory on the way."""
    rates: dict[str, list[float]] = {}
    memory: list[float] = []
    for _ in range(rounds):
        rates.setdefault("raw", []).append(read_raw(folder, 1))
        rates.setdefault(f"raw, {_READERS} threads", []).append(read_raw(folder, _READERS))
        drop_cache()
        store = FeatureStore(folder)
        memory.append(resident())
        rates.setdefault("batches, first epoch", []).append(read_epoch(store, batch, 0, memory))
        rates.setdefault("batches, second epoch", []).append(read_epoch(store, batch, 1, memory))
    return rates, memory


def main() -> None:
    """Write, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--geometry", choices=_GEOMETRIES, default="small")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder, geometry = arguments.folder / "loader-benchmark", _GEOMETRIES[arguments.geometry]
    shutil.rmtree(folder, ignore_errors=True)
    write_store(folder, geometry, arguments.codec)
    cold = "cold" if drop_cache() else "warm (not root)"
    rates, memory = measure(folder, geometry.batch, arguments.rounds)
    store = FeatureStore(folder)
    token = store.meta.bytes_per_token() - 5
    table = Table("reading", "GB/s", "of raw", "rounds", "tokens/s", "H200s fed")
    for name, found in rates.items():
        ratios = [rate / raw for rate, raw in zip(found, rates["raw"], strict=True)]
        middle = statistics.median(found)
        table.add_row(
            name,
            f"{middle / 1e9:.2f}",
            f"{statistics.median(ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            f"{middle / token:,.0f}",
            f"{middle / token / _H200_TOKENS_PER_S:.1f}" if arguments.geometry == "27b" else "",
        )
    _console.print(
        f"{arguments.geometry}, {arguments.codec}: {store.meta.num_shards} shards of"
        f" {store.num_tokens * token / store.meta.num_shards / 1e6:.0f} MB, first epoch {cold};"
        f" at the 27B geometry one H200 takes {_H200_TOKENS_PER_S:,.0f} tokens/s"
    )
    _console.print(table)
    _console.print("anonymous memory on the way, MB:", ", ".join(f"{m:.0f}" for m in memory))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
