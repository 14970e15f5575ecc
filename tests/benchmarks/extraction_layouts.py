"""Layouts of a batch in extraction: how fast, how much padding, and whether they stay exact.

    python -m tests.benchmarks.extraction_layouts [--target FOLDER] [--layers 16] [--tokens 32768]

The same samples of mixed lengths go through a target one per forward, right-padded and sorted by
length, and in rows (one after another, attention and recurrent layers told where samples end).
Prints tokens per second, the share of padding, how far the final states are from those of a sample
alone, and how many samples move, by any bit, when another one is changed. Without a folder the
target has the Qwen3.6-27B geometry with random bf16 weights, on the GPU. Cost: a minute or two.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from drafttrain.extract import packing
from drafttrain.extract.config import TargetConfig
from drafttrain.extract.engine import Engine, plan_batches
from drafttrain.extract.taps import resolve_taps
from drafttrain.extract.target import Target, load_target

from .geometry import make_target, sample_lengths

_LENGTHS = (256, 512, 1024, 2048, 4096)
_console = Console(width=150)


class PaddedEngine(Engine):
    """The same engine with right padding, as for targets that cannot be run in rows."""

    def __enter__(self) -> Engine:
        known, packing._replaceable = packing._replaceable, lambda target: False
        try:
            return super().__enter__()
        finally:
            packing._replaceable = known


def drain(engine: Engine, groups: Sequence[Sequence[np.ndarray]], batch: int) -> float:
    """Seconds to run all groups and receive their states on the host."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in engine.features(groups, batch):
        pass
    return time.perf_counter() - begin


def layouts(target: Target, tokens: int, batch_tokens: int) -> None:
    """Measure and print the table."""
    # Few different lengths: kernels are tuned anew for every shape of a padded batch.
    choices = [n for n in _LENGTHS if n <= target.max_positions]
    lengths = [min(choices, key=lambda k: abs(k - n)) for n in sample_lengths(tokens)]
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, target.vocab_rows, n).astype(np.int32) for n in lengths]
    real, taps = sum(lengths), resolve_taps(4, target.num_layers)
    changed = [(samples[0] + 1) % target.vocab_rows, *samples[1:]]
    codec = "fp32" if target.dtype == torch.float32 else "bf16"
    table = Table("layout", "tokens/s", "padding", "distance from alone", "others moved")
    alone: dict[int, torch.Tensor] = {}
    for name, kind, batch in (
        ("one sample a forward", PaddedEngine, 1),
        ("right-padded, sorted", PaddedEngine, batch_tokens),
        ("rows", Engine, batch_tokens),
    ):
        with kind(target, taps, codec) as engine:
            drain(engine, [samples], batch)
            seconds = drain(engine, [samples], batch)
            found = {i.number: i.final.decode().clone() for i in engine.features([samples], batch)}
            other = {i.number: i.final.decode().clone() for i in engine.features([changed], batch)}
            plan = plan_batches([len(ids) for ids in samples], batch)
            padded = sum(len(part) * max(len(samples[i]) for i in part) for part in plan)
        alone = alone or found
        far = [distance(found[i], alone[i]) for i in alone]
        moved = sum(not torch.equal(found[i], other[i]) for i in found if i)
        share = 0.0 if name == "rows" else 1 - real / padded
        row = (name, f"{real / seconds:,.0f}", f"{share:.1%}", f"{max(far):.4f}", str(moved))
        _console.print(row)
        table.add_row(*row)
    _console.print(
        f"{target.num_layers} layers, {len(samples)} samples, {real:,} tokens, longest"
        f" {max(lengths):,}"
    )
    _console.print(table)


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Root mean square difference over that of the states."""
    left, right = left.float(), right.float()
    return float((left - right).square().mean().sqrt() / right.square().mean().sqrt())


def main() -> None:
    """Load or build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="a folder; float32  [random weights on the GPU]")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=16384, help="tokens a forward")
    arguments = parser.parse_args()
    if arguments.target is None:
        target = make_target(arguments.layers, "cuda")
    else:
        target = load_target(TargetConfig(path=arguments.target, dtype="float32"))
    layouts(target, arguments.tokens, arguments.batch)


if __name__ == "__main__":
    main()
