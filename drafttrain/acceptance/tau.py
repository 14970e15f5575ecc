"""The one home of the acceptance-length convention: rounds of drafting and verifying -> tau.

A *round* is one target forward over the anchor and the drafted nodes. It emits the draft tokens
the target agreed with and then one *bonus token*, the target's own: ``accepted + 1`` tokens, so at
least 1 and at most ``block_size`` (block_size - 1 draft tokens and the bonus). The first response
token comes from the prefill; it is the first anchor and belongs to no round.

    tau = emitted tokens / rounds      micro-averaged: long responses weigh more, as in serving
    accepted = tau - 1                 what tools that leave out the bonus token print

The last round of a response is cut where the response ends, at a stop token or the length limit;
tokens behind the cut were not emitted and do not count. If the cut falls on a draft token, that
round emits no bonus token. Autoregressive decoding has tau = 1 exactly.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """One target forward during decoding."""

    anchor: int
    """Position of the anchor, which is also the number of context tokens before it."""
    drafted: int
    """Draft nodes verified."""
    accepted: int
    """Emitted tokens that were draft tokens."""
    emitted: int
    """Emitted tokens: ``accepted + 1``, or ``accepted`` if the response ended on a draft token."""


def emitted_by(matched: int, room: int) -> tuple[int, int]:
    """The bonus-token rule.

    Args:
        matched: draft tokens that equal the target's own tokens, counted from the anchor.
        room: tokens that may still be emitted before the response ends, at least 1.

    Returns:
        (accepted, emitted) of the round.
    """
    assert matched >= 0 and room >= 1, (matched, room)
    emitted = min(matched + 1, room)
    return min(matched, emitted), emitted


def most_emitted(block_size: int) -> int:
    """The most tokens one chain round can emit: block_size - 1 draft tokens and the bonus."""
    return emitted_by(block_size - 1, block_size)[1]


def cut_round(
    anchor: int, drafted: int, tokens: Sequence[int], room: int, stop_ids: Collection[int]
) -> tuple[Round, bool]:
    """Close a decoding round.

    Args:
        anchor: position of the anchor.
        drafted: number of draft nodes verified.
        tokens: the accepted draft tokens followed by the bonus token.
        room: tokens left before the length limit, at least 1.
        stop_ids: ids that end a response.

    Returns:
        (the round, whether the response ended on a stop token).
    """
    stop = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
    accepted, emitted = emitted_by(len(tokens) - 1, room if stop is None else min(room, stop))
    return Round(anchor, drafted, accepted, emitted), stop is not None and emitted == stop


def tau(emitted: float, rounds: float) -> float:
    """Acceptance length, bonus token included; NaN without rounds."""
    return emitted / rounds if rounds else float("nan")


def accepted(tau_value: float) -> float:
    """The same measurement without the bonus token."""
    return tau_value - 1.0


@dataclass(slots=True)
class RoundLog:
    """The rounds of one response, in order."""

    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens emitted in rounds; the response has one more, from the prefill."""
        return sum(item.emitted for item in self.rounds)

    @property
    def tau(self) -> float:
        """Acceptance length of this response alone."""
        return tau(self.tokens, len(self.rounds))


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of rounds that suffice for every number of a report; tallies add up."""

    accepted: np.ndarray
    """int64 [B]: rounds with 0..B-1 accepted draft tokens."""
    emitted: np.ndarray
    """int64 [B+1]: rounds that emitted 0..B tokens."""

    @classmethod
    def of(cls, rounds: Sequence[Round], block_size: int) -> "Tally":
        """Count rounds of a drafter with this block size."""
        return cls(
            np.bincount([item.accepted for item in rounds], minlength=block_size),
            np.bincount([item.emitted for item in rounds], minlength=block_size + 1),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.accepted + other.accepted, self.emitted + other.emitted)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(self.emitted.sum())

    @property
    def tokens(self) -> int:
        """Number of emitted tokens."""
        return int(self.emitted @ np.arange(len(self.emitted)))

    @property
    def tau(self) -> float:
        """Acceptance length over all counted rounds."""
        return tau(self.tokens, self.rounds)

    def slot_acceptance(self) -> tuple[np.ndarray, np.ndarray]:
        """How often the draft token of each slot was accepted.

        Returns:
            (unconditional float [B-1]: share of all rounds whose draft token k was accepted,
            conditional float [B-1]: share of the rounds that accepted draft token k-1; NaN where
            none did). Both count rounds that the end of the response cut.
        """
        reached = self.accepted[::-1].cumsum()[::-1].astype(np.float64)  # rounds with A >= k
        with np.errstate(invalid="ignore", divide="ignore"):
            return reached[1:] / reached[0], reached[1:] / reached[:-1]
