"""How the target's own next token is drawn from verified logits.

Proposals are never sampled: the drafter's slots are marginals, and a token is accepted exactly when
the target's own draw at that node equals it. The emitted text therefore has the target's
distribution whatever was drafted, for chains and trees alike; no acceptance ratio is involved.

Draws are lazy, one per node that the walk reaches, by inverting the cumulative distribution with
one uniform number each. Emitted tokens and draws thus correspond one to one, and with the same seed
every method emits the same text (in float32).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drafttrain.data.files import content_hash

NodeToken = Callable[[int], int]
"""The target's token at a node of the verified tree."""
Chooser = Callable[[Tensor], NodeToken]
"""Verified logits float32 [N+1, V] -> the target's token at each node, drawn when asked for."""


def greedy(logits: Tensor) -> NodeToken:
    """The likeliest token; the smallest id among equals. One transfer for all nodes."""
    best = logits.argmax(-1).tolist()
    return best.__getitem__


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), float64 [..., V]; stable for temperatures close to 0."""
    scores = logits.double()
    return ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)


class Sampler:
    """A chooser that samples at a temperature.

    Args:
        temperature: above 0.
        draw: gives the next uniform number in [0, 1).
    """

    def __init__(self, temperature: float, draw: Callable[[], float]) -> None:
        assert temperature > 0, temperature
        self._temperature, self._draw = temperature, draw

    def __call__(self, logits: Tensor) -> NodeToken:
        """See ``Chooser``."""
        return lambda node: self._pick(probabilities(logits[node], self._temperature))

    def _pick(self, weights: Tensor) -> int:
        """The first token whose cumulative probability exceeds the draw."""
        cumulative = weights.cumsum(-1)
        # Rounding may leave the total below 1; scaling keeps every draw inside the table.
        point = cumulative.new_tensor(self._draw()) * cumulative[-1]
        index = int(torch.searchsorted(cumulative, point, right=True))
        return min(index, len(weights) - 1)


def make_chooser(temperature: float, seed: int, sample_id: str) -> Chooser:
    """Greedy at temperature 0, else a sampler seeded by (seed, sample), not by process state."""
    if temperature == 0:
        return greedy
    state = int(content_hash([seed, sample_id]), 16) & (2**63 - 1)
    generator = torch.Generator().manual_seed(state)
    return Sampler(
        temperature, lambda: torch.rand((), generator=generator, dtype=torch.float64).item()
    )
