"""Extraction at the Qwen3.6-27B geometry: with and without writing, and where the time goes.

    python -m tests.benchmarks.extraction_speed --folder DIR [--tokens 262144] [--codec bf16 fp8]

Random bf16 weights on the GPU, five taps and the final state. Prints (1) where one forward's kernel
time goes; (2) tokens per second of the engine alone and of the whole stage with its store written
to DIR, from the first forward to the last seal, for samples of 2,048 tokens and for a realistic
mix, what the stages of writing were busy with, and how fast the disk alone is. "sustained" counts
from the first seal to the last, so it leaves out the last shard's writing, which a long run has
once. DIR needs up to 61 KB a token. Cost: minutes on one H200.
"""

import argparse
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.samples import make_sample, write_table
from drafttrain.data.store_format import plan_shards
from drafttrain.data.store_writer import ShardBuffer
from drafttrain.extract import engine
from drafttrain.extract.config import ExtractConfig
from drafttrain.extract.engine import Engine
from drafttrain.extract.pipeline import ShardWriter
from drafttrain.extract.target import Target
from drafttrain.extract.worker import extract

from .extraction_layouts import drain
from .geometry import TAPS, make_target, sample_ids, sample_lengths

_BATCH, _PEAK_FLOPS = 16384, 790e12
_FLOP_PER_TOKEN = 49.46e9  # 64 layers at 2,048 tokens, final norm, no LM head
_console = Console(width=150)


def speed(target: Target, tokens: int, folder: Path, codec: str) -> None:
    """Table 2."""
    table = Table("samples", "engine alone, tokens/s", "MFU", "whole stage", "sustained", "MFU",
                  "lost to writing", "peak GB")  # fmt: skip
    for name, lengths in (
        ("8 x 2,048", [2048] * (tokens // 2048)),
        ("mix", sample_lengths(tokens)),
    ):
        samples = sample_ids(lengths)
        real = sum(lengths)
        shard = 4 * _BATCH
        ends = np.cumsum(lengths) // shard
        groups = [[s for s, e in zip(samples, ends, strict=True) if e == k] for k in set(ends)]
        torch.cuda.reset_peak_memory_stats()
        with Engine(target, TAPS, codec) as engine:
            drain(engine, groups[:1], _BATCH)
            bare = real / drain(engine, groups, _BATCH)
        whole, sustained = with_writing(target, samples, folder, codec)
        peak = torch.cuda.max_memory_allocated() / 1e9
        mfu = [f"{rate * _FLOP_PER_TOKEN / _PEAK_FLOPS:.1%}" for rate in (bare, sustained)]
        _console.print(f"{name}: {bare:,.0f} tokens/s alone, {sustained:,.0f} sustained")
        table.add_row(name, f"{bare:,.0f}", mfu[0], f"{whole:,.0f}", f"{sustained:,.0f}", mfu[1],
                      f"{1 - sustained / bare:.1%}", f"{peak:.1f}")  # fmt: skip
    _console.print(f"codec {codec}")
    _console.print(table)


def with_writing(
    target: Target, samples: list[np.ndarray], folder: Path, codec: str
) -> tuple[float, float]:
    """Tokens per second of the whole stage, and from the first seal to the last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table = folder / "table.parquet"
    rows = [
        make_sample(ids, np.ones(len(ids), bool), source="random", mode="no_think", greedy=False)
        for ids in samples
    ]
    manifest = {"tokenizer_hash": tokenizer_hash(target.tokenizer), "template_hash": None}
    write_table(table, rows, manifest)
    config = ExtractConfig(taps=TAPS, codec=codec, shard_tokens=4 * _BATCH, batch_tokens=_BATCH)
    rates, stages = Rates(), Stages()
    logger = logging.getLogger(extract.__module__)
    logger.addHandler(rates)
    with stages:
        store = extract(target, config, table, folder / "store")
    logger.removeHandler(rates)
    shards = np.add.reduceat(
        store.lengths, [s.first for s in plan_shards(store.lengths, config.shard_tokens)]
    )
    spent = rates.sealed[-1] - rates.sealed[0]
    stored = sum(path.stat().st_size for path in (folder / "store").iterdir())
    _console.print(
        f"{stored / 1e9:.1f} GB written; seconds:",
        stages.shown(),
        f"; disk alone {disk(folder):.2f} GB/s",
    )
    shutil.rmtree(folder)
    return rates.found[-1], float(shards[1:].sum()) / spent


def disk(folder: Path) -> float:
    """GB/s of writing and flushing one large file."""
    data, path = np.random.default_rng(0).bytes(1 << 28), folder / "disk"
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(12):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return 12 * len(data) / 1e9 / (time.perf_counter() - begin)


class Rates(logging.Handler):
    """What the stage itself logs: tokens per second when it is done, and each sealed shard."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []
        self.sealed: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last argument of the closing line, and the time of each seal."""
        if "tokens/s" in record.msg:
            self.found.append(record.args[-1])
        elif "sealed" in record.msg:
            self.sealed.append(time.perf_counter())


class Stages:
    """Seconds spent in the steps of writing, and by the engine waiting for them."""

    _STEPS = (
        ("engine launches", Engine, "_launch"),
        ("states are pinned", engine, "_to_host"),
        ("engine waits for a shard", ShardWriter, "begin"),
        ("engine waits for room", ShardWriter, "put"),
        ("copy and gate", ShardBuffer, "add"),
        ("write, hash, flush", ShardBuffer, "seal"),
    )

    def __enter__(self) -> "Stages":
        self._spent: Counter[str] = Counter()
        self._own = [(home, name, getattr(home, name)) for _, home, name in self._STEPS]
        for step, home, name in self._STEPS:
            setattr(home, name, self._timed(step, getattr(home, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for home, name, own in self._own:
            setattr(home, name, own)

    def _timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._spent[step] += time.perf_counter() - begin

        return timed

    def shown(self) -> str:
        """All of them in one line."""
        return ", ".join(f"{step} {self._spent[step]:.1f}" for step, _, _ in self._STEPS)


def breakdown(target: Target) -> None:
    """Table 1."""
    samples = sample_ids([2048] * 8)
    with Engine(target, TAPS, "bf16") as engine:
        drain(engine, [samples], _BATCH)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            seconds = drain(engine, [samples], _BATCH)
    kinds: Counter[str] = Counter()
    for event in profile.key_averages():
        kinds[kind_of(event.key)] += event.self_device_time_total / 1000
    table = Table("kernels", "ms", "share of the forward")
    for name, taken in kinds.most_common():
        table.add_row(name, f"{taken:.1f}", f"{taken / seconds / 1000:.1%}")
    table.add_row("wall", f"{1000 * seconds:.1f}", "")
    _console.print(table)
    top = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:24]
    for event in top:
        taken = event.self_device_time_total / 1000
        _console.print(f"{taken:8.1f} ms {event.count:5d} x {event.key[:110]}")


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    low = name.lower()
    for kind, parts in {
        "copies to the host": ("memcpy dtoh",),
        "attention": ("fmha", "flash", "sdpa", "cudnn"),
        "delta rule": ("chunk_", "recompute_w_u", "solve_tril", "l2norm", "merge_16", "kkt"),
        "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
        "compiled pointwise": ("triton_",),
        "kernels of ours": ("_convolve_kernel", "_gated_kernel", "_turn_kernel"),
    }.items():
        if any(part in low for part in parts):
            return kind
    return "other"


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--codec", nargs="+", default=["bf16"])
    parser.add_argument("--parts", nargs="+", default=["breakdown", "speed"])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target = make_target(arguments.layers, "cuda")
    begin = time.perf_counter()
    with Engine(target, TAPS, "bf16"):
        _console.print(f"prepared in {time.perf_counter() - begin:.0f} s")
    if "breakdown" in arguments.parts:
        breakdown(target)
    if "speed" in arguments.parts:
        for codec in arguments.codec:
            speed(target, arguments.tokens, arguments.folder, codec)


if __name__ == "__main__":
    main()
