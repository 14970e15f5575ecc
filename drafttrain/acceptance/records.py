"""What an evaluation measured, as plain values: rounds -> records that ranks can send and merge.

One record counts the rounds of one prompt, method and context bucket. Records need neither tensors
nor the drafter, add up in any order, and round-trip through JSON.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from pydantic import Field

from drafttrain.data.config import StrictModel

from .tau import Round, RoundLog, Tally


class PromptRecord(StrictModel):
    """Rounds of one prompt with one method whose anchors fall into one context bucket."""

    sample_id: str
    source: str
    mode: str
    bucket: str
    method: str
    temperature: float = 0.0
    beyond: bool = False
    """The anchors lie behind the end of the longest training sample."""
    accepted: list[int]
    """Rounds with 0..B-1 accepted draft tokens."""
    emitted: list[int]
    """Rounds that emitted 0..B tokens."""

    @property
    def tally(self) -> Tally:
        """The counts as arrays."""
        return Tally(np.array(self.accepted), np.array(self.emitted))


class SpeedRecord(StrictModel):
    """Time of one live response."""

    sample_id: str
    method: str
    temperature: float
    tokens: int
    """Emitted in rounds."""
    rounds: int
    prefill_seconds: float
    seconds: dict[str, float]
    """In rounds, by stage."""
    peak_bytes: int | None = None
    """Most GPU memory allocated meanwhile, weights included; unset on a CPU."""


class OutputRecord(StrictModel):
    """Whether a response equals the reference: the target's own, decoded in the same run."""

    sample_id: str
    method: str
    temperature: float
    position: int | None
    """First differing token; unset if there is none."""
    margin: float | None = None
    """There, the target's best logit minus its second best (greedy only)."""
    bound: float | None = None
    """Largest margin that rounding may bridge at this dtype; 0 in float32."""

    @property
    def identical(self) -> bool:
        """Token for token."""
        return self.position is None

    @property
    def near_tie(self) -> bool:
        """Differs, but only because rounding may order two equal candidates either way."""
        return self.margin is not None and self.bound is not None and self.margin < self.bound


class ReplayResult(StrictModel):
    """Replay of a set of samples; ``merge`` joins the parts of several ranks."""

    block_size: int
    records: list[PromptRecord] = Field(default=[])
    samples: int = 0
    """Replayed."""
    skipped: int = 0
    """Left out because their responses are not the target's own greedy text."""
    prompt_heads: dict[str, list[int]] = Field(default={})
    """Per data set, the first ids of its first prompt, to see how prompts were rendered."""


class LiveResult(StrictModel):
    """Live decoding of a set of prompts; ``merge`` joins the parts of several ranks."""

    block_size: int
    records: list[PromptRecord] = Field(default=[])
    replayed: list[PromptRecord] = Field(default=[])
    """Replay of the same stretch of the same prompts, for prompts whose stored text is greedy."""
    speed: list[SpeedRecord] = Field(default=[])
    outputs: list[OutputRecord] = Field(default=[])
    """Each drafting method against the autoregressive response."""
    stored: list[OutputRecord] = Field(default=[])
    """The autoregressive greedy response against the stored text."""


Result = TypeVar("Result", ReplayResult, LiveResult)


def merge(parts: Sequence[Result]) -> Result:
    """Join partial results of one evaluation; lists are concatenated, counts added."""
    assert parts and len({part.block_size for part in parts}) == 1, "parts of one evaluation"
    values = parts[0].model_dump()
    for part in parts[1:]:
        for name, value in part.model_dump().items():
            if isinstance(value, dict):
                values[name] = value | values[name]
            elif name != "block_size":
                values[name] += value
    return type(parts[0]).model_validate(values)


def bucket_label(position: int, ends: Sequence[int]) -> str:
    """Name of the context bucket of an anchor at this position."""
    return next((f"<={end}" for end in ends if position <= end), f">{ends[-1]}" if ends else "all")


def bucket_labels(ends: Sequence[int]) -> list[str]:
    """All bucket names, shortest context first."""
    return [*(f"<={end}" for end in ends), f">{ends[-1]}" if ends else "all"]


def records_of(
    log: RoundLog,
    block_size: int,
    ends: Sequence[int],
    trained_length: int | None,
    names: dict[str, str | float],
) -> Iterable[PromptRecord]:
    """Split one response's rounds by context bucket, and at the trained length.

    Args:
        log: its rounds.
        block_size: of the drafter.
        ends: upper ends of the buckets.
        trained_length: tokens of the drafter's longest training sample, if known.
        names: sample_id, source, mode, method and, if not greedy, temperature.
    """
    parts: dict[tuple[str, bool], list[Round]] = {}
    for item in log.rounds:
        beyond = trained_length is not None and item.anchor >= trained_length
        parts.setdefault((bucket_label(item.anchor, ends), beyond), []).append(item)
    for (bucket, beyond), rounds in parts.items():
        tally = Tally.of(rounds, block_size)
        values = {"accepted": tally.accepted.tolist(), "emitted": tally.emitted.tolist()}
        yield PromptRecord.model_validate({"bucket": bucket, "beyond": beyond, **names, **values})
