"""Anchors, labels and supervision of blocks: pure functions of one sample.

An anchor is a position a whose token and whose next token were both produced by the target, as in
decoding, where the first anchor is the first response token. Slot k (1..B-1) of its block predicts
token a+k. A slot is supervised while every token from a+1 to a+k is supervised: labels stop at the
end of the turn or document. Anchors near the end are allowed; they just have fewer labels.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def anchor_candidates(loss_mask: BoolArray) -> IntArray:
    """Positions a with loss_mask[a] and loss_mask[a+1], ascending."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:]).astype(np.int64)


def draw_anchors(
    loss_mask: BoolArray, count: int, *, seed: int, epoch: int, sample_id: str
) -> IntArray:
    """Uniform draw without replacement of at most ``count`` anchors, ascending.

    The generator is keyed by (seed, epoch, sample id) alone: neither the process, nor the rank,
    nor what was drawn before changes the result.
    """
    candidates = anchor_candidates(loss_mask)
    if len(candidates) <= count:
        return candidates
    key = hashlib.blake2b(f"{seed}/{epoch}/{sample_id}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
    return np.sort(generator.choice(candidates, size=count, replace=False))


def block_labels(
    input_ids: IntArray, loss_mask: BoolArray, anchors: IntArray, block_size: int
) -> tuple[IntArray, BoolArray]:
    """Labels and supervision of slots 1..B-1.

    Args:
        input_ids: [n]. loss_mask: [n]. anchors: [A]. block_size: B.

    Returns:
        labels [A, B-1] int64 (token a+k, 0 where there is none) and supervised [A, B-1] bool.
    """
    where = anchors[:, None] + np.arange(1, block_size)
    inside = where < len(input_ids)
    where = np.minimum(where, len(input_ids) - 1)
    supervised = np.logical_and.accumulate(inside & loss_mask[where], axis=1)
    return np.where(supervised, input_ids[where], 0), supervised
