"""A short timed extraction: tokens per second of this machine, the writing of the store included.

    samples of the table's own length mix -> a real store in a given folder -> tokens/s

The store is extracted twice: the first time pays for everything that happens once (head, kernels),
the second is timed. What a call costs that finds all done is measured too, and taken off, because
it does not grow with the corpus. Cost: about 2.5 times the seconds asked for, and the head's bytes.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from drafttrain.data.samples import SampleTable, write_table

from .config import ExtractConfig
from .target import Target
from .worker import extract


def probe_extraction(
    target: Target,
    config: ExtractConfig,
    table: SampleTable,
    folders: tuple[Path, Path],
    seconds: float,
) -> float:
    """Time the extraction of as many samples as take about ``seconds``.

    Args:
        target: the frozen target.
        config: of the real extraction.
        table: the samples to come.
        folders: new folders on the disk that the store will lie on: for a table, for its store.
        seconds: how long to measure; the whole table if that is shorter.

    Returns:
        Tokens per second.
    """
    with _quiet():
        tables, store = folders
        first = tables / "first.parquet", store.with_name(f"{store.name}-first")
        rate = _timed(target, config, _part(table, config.batch_tokens, first[0]), first[1])
        part = _part(table, int(rate * seconds), tables / "train.parquet")
        return _timed(target, config, part, store)


def spread_samples(lengths: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int64]:
    """Ascending numbers of about ``tokens`` tokens of samples, evenly spread over all lengths."""
    count = min(len(lengths), max(1, round(tokens / float(lengths.mean()))))
    places = ((np.arange(count) + 0.5) * len(lengths) / count).astype(np.int64)
    return np.sort(np.argsort(lengths, kind="stable")[places])


def _part(table: SampleTable, tokens: int, path: Path) -> Path:
    picked = spread_samples(table.lengths, tokens)
    write_table(path, (table[int(i)] for i in picked), table.manifest)
    return path


def _timed(target: Target, config: ExtractConfig, table: Path, store: Path) -> float:
    tokens = extract(target, config, table, store).num_tokens
    for record in store.glob("shard-*.json"):
        record.unlink()
    times = [time.perf_counter()]
    for _ in range(2):
        extract(target, config, table, store)
        times.append(time.perf_counter())
    worked, idle = np.diff(times)
    # Never faster than the clock can tell.
    return float(tokens / (worked - idle if worked > idle else worked))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the worker's lines about stores that nobody will see."""
    logger = logging.getLogger("drafttrain.extract")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
