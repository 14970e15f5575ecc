"""Position weights of the slots of a block.

``decay``: w_k = exp(-(k-1)/gamma) for slot k = 1..B-1 (DFlash, arXiv 2602.06036): an early slot
matters more, because a wrong draft token discards everything after it.
"""

import math

import torch
from torch import Tensor

from drafttrain.data.errors import RecipeError

# The values published with the block sizes they were tuned for.
_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def resolve_gamma(gamma: float | None, block_size: int) -> float:
    """The decay constant of a block size; unknown sizes must state it."""
    if gamma is not None:
        return gamma
    if block_size not in _GAMMA:
        raise RecipeError(
            f"train.gamma is unset and block size {block_size} has no published value "
            f"(known: {', '.join(map(str, sorted(_GAMMA)))}): set train.gamma"
        )
    return _GAMMA[block_size]


def decay_weights(supervised: Tensor, gamma: float) -> Tensor:
    """Weights of slots 1..B-1.

    Args:
        supervised: [..., B-1] bool.
        gamma: decay constant in slots.

    Returns:
        [..., B-1] float32, 0 where a slot is not supervised.
    """
    slots = supervised.shape[-1]
    decay = torch.tensor([math.exp(-k / gamma) for k in range(slots)], device=supervised.device)
    return supervised * decay
