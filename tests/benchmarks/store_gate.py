"""What a shard costs on its way to the disk, at the Qwen3.6-27B geometry: gate, filling, sealing.

    python -m tests.benchmarks.store_gate [--tokens 8192] [--codec bf16]

Prints seconds a GB and GB/s of stored states for one process. The gate is timed inside ``add``;
sealing writes to a temporary folder (``TMPDIR``), fsync included.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from drafttrain.data import store_writer
from drafttrain.data.samples import make_sample
from drafttrain.data.store_format import Shard
from drafttrain.data.store_writer import ShardBuffer
from tests.data.store_factory import make_meta

TAPS, HIDDEN, LENGTH = [1, 16, 31, 46, 61], 5120, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--codec", default="bf16")
    options = parser.parse_args()
    count = options.tokens // LENGTH
    ids = np.random.default_rng(0).integers(0, 1000, (count, LENGTH))
    samples = [
        make_sample(row, row >= 0, source="random", mode="tool", greedy=False) for row in ids
    ]
    taps = torch.randn(LENGTH, len(TAPS), HIDDEN).bfloat16()
    final = torch.randn(LENGTH, HIDDEN).bfloat16()
    gate = 0.0

    def timed(function):
        def wrapper(*arguments):
            nonlocal gate
            started = time.perf_counter()
            result = function(*arguments)
            gate += time.perf_counter() - started
            return result

        return wrapper

    for name in ("row_norms", "find_bad_state", "find_bad_norm", "statistics"):
        setattr(store_writer, name, timed(getattr(store_writer, name)))
    with tempfile.TemporaryDirectory() as folder:
        meta = make_meta(
            Path(folder),
            [LENGTH] * count,
            taps=TAPS,
            num_target_layers=64,
            hidden_size=HIDDEN,
            codec=options.codec,
            shard_tokens=options.tokens,
            num_shards=1,
        )
        buffer = ShardBuffer(meta, Shard(0, 0, count, count * LENGTH), samples)
        for round_ in range(2):  # the first one touches the memory
            gate, started = 0.0, time.perf_counter()
            for i in range(count):
                buffer.add(i, taps, final)
            filled = time.perf_counter() - started
            if round_ == 0:
                continue
            started = time.perf_counter()
            buffer.seal(Path(folder))
            sealed = time.perf_counter() - started
    size = count * LENGTH * meta.bytes_per_token() / 1e9
    print(f"{count * LENGTH} tokens, {size:.2f} GB, codec {options.codec}")
    parts = {"gate": gate, "filling, gate included": filled, "sealing": sealed}
    for name, seconds in parts.items():
        print(f"{name:24} {seconds / size:6.3f} s/GB  {size / seconds:6.2f} GB/s")


if __name__ == "__main__":
    main()
