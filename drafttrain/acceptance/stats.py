"""Intervals over prompts: how far a measured acceptance length may be from another sample's.

Prompts differ by far more than repeats of one prompt do, so the prompt is what is resampled; the
statistic is the micro-averaged tau of the resampled prompts. Two drafters are compared on the same
prompts, resampled together: a difference counts only if its interval excludes 0.
Cost: resamples x prompts additions, in blocks of bounded memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

_BLOCK = 1 << 22
_TAILS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % percentile interval; no interval from fewer than two prompts."""

    value: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """For a difference: ``improved`` or ``worse`` only if the interval excludes 0."""
        if self.low is not None and self.low > 0:
            return "improved"
        if self.high is not None and self.high < 0:
            return "worse"
        return "no clear difference"


def tau_interval(tokens: np.ndarray, rounds: np.ndarray, resamples: int, seed: int = 0) -> Interval:
    """Micro-averaged tau with its interval.

    Args:
        tokens: int64 [prompts], emitted in rounds.
        rounds: int64 [prompts], at least one in total.
        resamples: how many.
        seed: of the resampling.
    """
    draws = [
        np.stack([tokens[picks].sum(1), rounds[picks].sum(1)])
        for picks in _picks(len(tokens), resamples, seed)
    ]
    return _interval(tokens.sum() / rounds.sum(), draws, lambda t, r: t / r)


def paired_interval(
    new: tuple[np.ndarray, np.ndarray],
    old: tuple[np.ndarray, np.ndarray],
    resamples: int,
    seed: int = 0,
) -> Interval:
    """Difference new - old of micro-averaged tau on the same prompts.

    Args:
        new: (tokens, rounds), each int64 [prompts].
        old: the same of the other drafter, prompts in the same order.
        resamples: how many.
        seed: of the resampling.
    """
    columns = np.stack([*new, *old])  # [4, prompts]
    assert columns.ndim == 2, "the same prompts on both sides"
    draws = [columns[:, picks].sum(2) for picks in _picks(columns.shape[1], resamples, seed)]
    total = columns.sum(1)
    return _interval(
        total[0] / total[1] - total[2] / total[3], draws, lambda a, b, c, d: a / b - c / d
    )


def _picks(prompts: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Blocks of resampled prompt indexes [rows, prompts]; none for fewer than two prompts."""
    if prompts < 2:
        return
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // prompts)
    for start in range(0, resamples, rows):
        yield generator.integers(0, prompts, (min(rows, resamples - start), prompts))


def _interval(
    value: float, draws: list[np.ndarray], statistic: Callable[..., np.ndarray]
) -> Interval:
    """Percentiles of the statistic over resampled sums, blocks of [columns, rows]."""
    if not draws:
        return Interval(float(value), None, None)
    sums = np.concatenate(draws, axis=1)
    # A resample of nothing but prompts without rounds has no tau.
    sums = sums[:, (sums[1] > 0) & (sums[-1] > 0)]
    if not sums.shape[1]:
        return Interval(float(value), None, None)
    low, high = np.percentile(statistic(*sums), _TAILS)
    return Interval(float(value), float(low), float(high))
