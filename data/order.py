"""The order in which training sees samples: one endless stream, addressable at any point.

Epoch e is a permutation keyed by (seed, e). Step s of a run with global batch N takes positions
[s*N, (s+1)*N) of the concatenated epochs, so resuming at a step needs no state and the number of
ranks changes nothing. Cost: one permutation per epoch touched (8 bytes per sample).
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=2)
def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of one epoch."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(num_samples).astype(np.int64)


def global_batch(num_samples: int, seed: int, step: int, size: int) -> list[tuple[int, int]]:
    """The (epoch, sample index) pairs of optimizer step ``step`` (counted from 0)."""
    pairs = []
    for position in range(step * size, (step + 1) * size):
        epoch, place = divmod(position, num_samples)
        pairs.append((epoch, int(epoch_order(num_samples, seed, epoch)[place])))
    return pairs
