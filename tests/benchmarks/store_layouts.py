"""The feature store against another way of keeping hidden states: files, bytes, writing, reading.

    python -m tests.benchmarks.store_layouts --folder DIR --peer FILE.py [--samples 64]

Both keep the same random states at the Qwen3.6-27B geometry (bf16, five taps and the final state,
600 to 1,200 tokens a sample) on one thread, in turns. FILE.py is the other way: ``NAME``;
``write(folder, number, sample)``, which gives the path it wrote; ``find(folder)``, all paths;
``read(path)``. A sample is a dict of ``input_ids [n]``, ``loss_mask [n]``, ``taps [n, 5, 5120]``
and ``final [n, 5120]``. Both ways are measured with fsync (the store as it is; of the other way
every file and its folder) and without any; "on disk" includes a ``sync`` of the system at the end.
Reading is an epoch in random order into padded batches of four, cold (which takes root, and where
the store checks its checksums) and warm. Opening is measured on ``--opened`` tiny samples: finding
all of them, and their lengths too, as a sampler of batches by size needs them. Both ways must give
back what was written. Cost: ten minutes and 8 GB of disk.
"""

import argparse
import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from drafttrain.data import files
from drafttrain.data.order import epoch_order
from drafttrain.data.samples import make_sample
from drafttrain.data.store_format import plan_shards, write_meta
from drafttrain.data.store_reader import FeatureStore
from drafttrain.data.store_writer import ShardBuffer
from tests.data.store_factory import make_meta

from .geometry import HIDDEN, TAPS
from .loader import drop_cache

_SHARD_TOKENS, _BATCH, _TINY = 16384, 4, 8
_SHORTEST, _LONGEST = 600, 1200
_console = Console(width=180)

Tensors = dict[str, Tensor]


class Ours:
    """The feature store."""

    def __init__(self, codec: str, width: int = HIDDEN, shard_tokens: int = _SHARD_TOKENS) -> None:
        self.name = f"feature store, {codec}"
        self._codec, self._width, self._shard_tokens = codec, width, shard_tokens

    def write(self, folder: Path, samples: Sequence[Tensors], sync: bool) -> None:
        """Fill and seal shard after shard."""
        rows = [
            make_sample(
                s["input_ids"].numpy(), s["loss_mask"].numpy(),
                source="random", mode="no_think", greedy=False,
            )
            for s in samples
        ]  # fmt: skip
        lengths = [len(row.input_ids) for row in rows]
        shards = plan_shards(lengths, self._shard_tokens)
        meta = make_meta(
            folder, lengths, hidden_size=self._width, taps=TAPS, num_target_layers=64,
            codec=self._codec, shard_tokens=self._shard_tokens, num_shards=len(shards),
        )  # fmt: skip
        with without_fsync(not sync):
            write_meta(folder, meta)
            for shard in shards:
                buffer = ShardBuffer(meta, shard, rows[shard.first : shard.stop])
                for place, sample in enumerate(samples[shard.first : shard.stop]):
                    buffer.add(place, sample["taps"], sample["final"])
                buffer.seal(folder)

    def open(self, folder: Path) -> tuple[int, Callable[[int], Tensors]]:
        """Number of samples, and what reads one, as training does: encoded."""
        store = FeatureStore(folder)

        def read(i: int) -> Tensors:
            s = store.sample(i)
            assert s.final is not None
            taps = {f"taps{suffix}": part for suffix, part in s.encoded_taps.parts.items()}
            return {"input_ids": s.input_ids, "loss_mask": s.loss_mask, "final": s.final, **taps}

        return len(store), read

    def lengths(self, folder: Path) -> list[int]:
        """Tokens of all samples."""
        return FeatureStore(folder).lengths.tolist()


class Peer:
    """The way of a file outside this repository."""

    def __init__(self, path: Path) -> None:
        spec = importlib.util.spec_from_file_location("peer_layout", path)
        assert spec is not None and spec.loader is not None
        self._way: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._way)
        self.name: str = self._way.NAME

    def write(self, folder: Path, samples: Sequence[Tensors], sync: bool) -> None:
        """A file a sample, or what the other way makes of it."""
        for number, sample in enumerate(samples):
            path = self._way.write(folder, number, sample)
            if sync:
                files.fsync_path(path)
                files.fsync_path(path.parent)

    def open(self, folder: Path) -> tuple[int, Callable[[int], Tensors]]:
        """Number of samples, and what reads one."""
        paths = self._way.find(folder)
        return len(paths), lambda i: self._way.read(paths[i])

    def lengths(self, folder: Path) -> list[int]:
        """Tokens of all samples."""
        return [len(self._way.read(path)["input_ids"]) for path in self._way.find(folder)]


@contextmanager
def without_fsync(switch: bool) -> Iterator[None]:
    """The store's own files are not flushed in the body."""
    own = files.fsync_path
    if switch:
        files.fsync_path = lambda path: None
    try:
        yield
    finally:
        files.fsync_path = own


def make_samples(count: int, width: int, shortest: int, longest: int) -> list[Tensors]:
    """Random samples, cut at random places out of one block of random states."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    block = torch.randn(2 * longest, len(TAPS) + 1, width, generator=generator).bfloat16()
    made = []
    for _ in range(count):
        n, start = int(rng.integers(shortest, longest + 1)), int(rng.integers(0, longest))
        ids = torch.from_numpy(rng.integers(0, 32, n).astype(np.int64))
        part = block[start : start + n]
        mask = torch.arange(n) >= n // 3
        made.append(
            {"input_ids": ids, "loss_mask": mask, "taps": part[:, :-1], "final": part[:, -1]}
        )
    return made


def epoch(read: Callable[[int], Tensors], count: int, number: int) -> float:
    """Seconds of reading all samples in random order into padded batches."""
    order = epoch_order(count, 0, number)
    begin = time.perf_counter()
    for first in range(0, count, _BATCH):
        chosen = [read(int(i)) for i in order[first : first + _BATCH]]
        longest = max(len(sample["input_ids"]) for sample in chosen)
        for name, part in chosen[0].items():
            batch = part.new_zeros(len(chosen), longest, *part.shape[1:])
            for row, sample in enumerate(chosen):
                batch[row, : len(sample[name])] = sample[name]
    return time.perf_counter() - begin


def size_of(folder: Path) -> tuple[int, int]:
    """Files and their bytes."""
    found = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(found), sum(found)


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(way: Ours | Peer, folder: Path, samples: list[Tensors], sync: bool) -> dict[str, float]:
    """Write once, then read twice; rates by name."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    drop_cache()
    returned = timed(lambda: way.write(folder, samples, sync))
    on_disk = returned + timed(os.sync)
    number, size = size_of(folder)
    drop_cache()
    found, read = way.open(folder)
    assert found == len(samples)
    cold, warm = (epoch(read, found, number) for number in range(2))
    check(read(0), samples[0])
    shutil.rmtree(folder)
    found_rates = {"files": number, "GB": size / 1e9, "bytes/token": size / tokens_of(samples)}
    for name, seconds in (
        ("write", returned),
        ("on disk", on_disk),
        ("cold", cold),
        ("warm", warm),
    ):
        found_rates[f"{name}, GB/s"] = size / 1e9 / seconds
        found_rates[f"{name}, samples/s"] = found / seconds
    return found_rates


def tokens_of(samples: list[Tensors]) -> int:
    """Of all samples together."""
    return sum(len(sample["input_ids"]) for sample in samples)


def compare(
    ways: Sequence[Ours | Peer], folder: Path, samples: list[Tensors], repeats: int
) -> Table:
    """Medians of every way, which take turns."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for way in ways:
            for sync in (True, False):
                name = f"{way.name}, {'fsync' if sync else 'none'}"
                found.setdefault(name, []).append(measure(way, folder, samples, sync))
                rates = (f"{key} {value:.2f}" for key, value in found[name][-1].items())
                _console.print(f"{name}: {', '.join(rates)}")
    columns = [key for key in next(iter(found.values()))[0] if key != "on disk, samples/s"]
    table = Table("way", *columns)
    for name, runs in found.items():
        table.add_row(name, *(shown(key, [run[key] for run in runs]) for key in columns))
    return table


def shown(key: str, values: list[float]) -> str:
    """What is counted as it is; of a rate the median, with the range of those in bytes."""
    if "/s" not in key:
        return f"{values[0]:.2f}" if key == "GB" else f"{values[0]:,.0f}"
    median = f"{statistics.median(values):.2f}"
    return f"{median} ({min(values):.2f}-{max(values):.2f})" if "GB" in key else median


def check(found: Tensors, wanted: Tensors) -> None:
    """What was read is what was written."""
    exact = "taps_scale" not in found
    for name in ("input_ids", "loss_mask", "final", *(["taps"] if exact else [])):
        same = torch.equal(found[name].reshape(wanted[name].shape), wanted[name])
        assert same, f"{name} came back changed"


def measure_opening(ways: Sequence[Ours | Peer], folder: Path, count: int, table: Table) -> None:
    """Find many samples, cold: alone and with their lengths."""
    samples = make_samples(count, _TINY, 8, 16)
    for way in ways:
        way.write(folder, samples, False)
        os.sync()
        drop_cache()
        finding = timed(lambda w=way: w.open(folder))
        drop_cache()
        lengths = timed(lambda w=way: w.lengths(folder))
        table.add_row(way.name, str(size_of(folder)[0]), f"{finding:.2f}", f"{lengths:.2f}")
        shutil.rmtree(folder)


def main() -> None:
    """Write, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--opened", type=int, default=20000)
    arguments = parser.parse_args()
    folder = arguments.folder / "layouts-benchmark"
    peer = Peer(arguments.peer)
    cold = "cold" if drop_cache() else "warm"
    samples = make_samples(arguments.samples, HIDDEN, _SHORTEST, _LONGEST)
    table = compare((Ours("bf16"), peer, Ours("fp8")), folder, samples, arguments.repeats)
    table.title = f"medians (ranges) of {arguments.repeats}; 'cold' is {cold} here"
    _console.print(table)
    opening = Table("way", "files", f"find {arguments.opened} samples, {cold}, s", "and lengths, s")
    # As many samples a shard as 65,536 tokens have in samples of 900.
    measure_opening([Ours("bf16", _TINY, 73 * 12), peer], folder, arguments.opened, opening)
    _console.print(opening)


if __name__ == "__main__":
    main()
