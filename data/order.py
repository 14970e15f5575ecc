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


def sample_at(num_samples: int, seed: int, position: int) -> tuple[int, int]:
    """Which sample a position of the stream holds: (epoch, sample index)."""
    epoch, place = divmod(position, num_samples)
    return epoch, int(epoch_order(num_samples, seed, epoch)[place])


def stream_order(num_samples: int, seed: int, positions: int) -> NDArray[np.int64]:
    """Sample index of each of the first ``positions`` positions."""
    epochs = range(-(-positions // num_samples))
    return np.concatenate([epoch_order(num_samples, seed, e) for e in epochs])[:positions]
