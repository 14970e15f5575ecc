"""The acceptance report of one checkpoint: typed values, written as JSON and as Markdown.

``tau`` counts the bonus token everywhere (at least 1) and ``accepted = tau - 1`` stands beside it.
Guarantee: a report is complete in itself (settings, counts, intervals, per-prompt sums for paired
comparison) and is replaced as a whole or not at all.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from drafttrain.data.config import StrictModel
from drafttrain.data.errors import DraftTrainError
from drafttrain.data.files import read_json, write_json

from .records import OutputRecord
from .settings import EvalSettings

SCHEMA_VERSION = 1
ALL = "all"
_NAME = re.compile(r"step-(\d{6,})\.json")


class TauRow(StrictModel):
    """Acceptance length of one method on one slice of the prompts."""

    source: str
    mode: str
    bucket: str
    """Context tokens before the anchor."""
    method: str
    prompts: int
    rounds: int
    tokens: int
    """Emitted in rounds."""
    tau: float
    low: float | None
    """95 % interval over prompts; unset with fewer than two."""
    high: float | None
    accepted: float
    """tau - 1."""


class SlotRates(StrictModel):
    """Acceptance of the draft tokens of slots 1..B-1."""

    unconditional: list[float]
    """Share of all rounds whose draft token k was accepted."""
    conditional: list[float | None]
    """Share of the rounds that accepted draft token k-1; unset where none did."""


class LengthRow(StrictModel):
    """Acceptance length within and behind the length of the longest training sample."""

    method: str
    rounds_within: int
    tau_within: float | None
    rounds_beyond: int
    tau_beyond: float


class Section(StrictModel):
    """One evaluation: replay, or live decoding at one temperature."""

    name: str
    rows: list[TauRow]
    """Every data set x mode x bucket x method, then their sums."""
    slots: dict[str, SlotRates]
    emitted: dict[str, list[int]]
    """Per method: rounds that emitted 0, 1, .. B tokens."""
    per_prompt: dict[str, dict[str, tuple[int, int]]]
    """Per method and sample: (tokens, rounds), for paired comparison."""
    beyond: list[LengthRow] = Field(default=[])
    """One per drafting method, if any round lies behind the trained length."""

    def overall(self, method: str) -> TauRow | None:
        """The sum over all prompts."""
        return next((row for row in self.rows if row.method == method and row.source == ALL), None)


class SpeedRow(StrictModel):
    """Decoding speed of one method, all prompts together; prefill is not part of it."""

    method: str
    tokens: int
    seconds: float
    tokens_per_second: float
    ratio: float
    """To autoregressive decoding in the same run."""
    prefill_ms: float
    """Per prompt, the drafter's pass over the prompt included."""
    stage_ms: dict[str, float]
    """Per round."""
    peak_gb: float | None = None
    """Most GPU memory allocated in any response, weights included; unset on a CPU."""


class LosslessRow(StrictModel):
    """Whether a method's responses are the reference's."""

    method: str
    identical: int
    responses: int
    tokens: int = 0
    """Emitted in rounds, all responses together."""
    near_ties: int
    """Differing responses that rounding at a near-tie explains."""
    differences: list[OutputRecord]

    @property
    def unexplained(self) -> int:
        """Differing responses that nothing explains: a defect."""
        return self.responses - self.identical - self.near_ties


class GapRow(StrictModel):
    """Replay against live decoding on the same stretch of the same prompts."""

    method: str
    prompts: int
    live: float
    replay: float
    gap: float
    """|replay - live| / live."""


class LiveSection(Section):
    """Live decoding at one temperature."""

    temperature: float
    speed: list[SpeedRow]
    lossless: list[LosslessRow]
    stored: LosslessRow | None
    """The baseline against the stored greedy text."""
    gaps: list[GapRow]


class Comparison(StrictModel):
    """Change of tau against another checkpoint on the same prompts."""

    against: str
    """``previous`` or ``best``."""
    step: int
    section: str
    method: str
    prompts: int
    change: float
    low: float | None
    high: float | None
    verdict: str


class CurvePoint(StrictModel):
    """Overall tau of one checkpoint."""

    step: int
    section: str
    tau: dict[str, float]


class Report(StrictModel):
    """Everything measured on one checkpoint."""

    schema_version: int = SCHEMA_VERSION
    step: int
    settings: EvalSettings
    drafter: dict[str, Any]
    """The resolved drafter configuration."""
    replay: Section | None
    replay_samples: int
    replay_skipped: int
    """Samples whose responses are not the target's greedy text."""
    prompt_heads: dict[str, list[int]]
    live: list[LiveSection]
    comparisons: list[Comparison] = Field(default=[])
    curve: list[CurvePoint] = Field(default=[])
    notes: list[str] = Field(default=[])

    @property
    def sections(self) -> list[Section]:
        """Replay first."""
        return [*([self.replay] if self.replay else []), *self.live]

    def judged(self) -> Iterator[tuple[LiveSection, LosslessRow]]:
        """Rows in which an unexplained difference is a defect.

        Sampling in a 16-bit type is not judged: rounding can move any draw, near-tie or not.
        """
        for section in self.live:
            if section.temperature == 0 or self.settings.dtype == "float32":
                yield from ((section, row) for row in section.lossless)

    @property
    def lossless(self) -> bool:
        """No method's output differs from the target's own for want of an explanation."""
        return not any(row.unexplained for _, row in self.judged())


def report_path(folder: Path, step: int) -> Path:
    """Where a checkpoint's JSON report is; the Markdown lies beside it."""
    return folder / f"step-{step:06d}.json"


def write_report(folder: Path, report: Report) -> Path:
    """Write the JSON report atomically and return its path."""
    path = report_path(folder, report.step)
    write_json(path, report.model_dump(mode="json"))
    return path


def read_report(path: Path) -> Report:
    """Read a report.

    Raises:
        DraftTrainError: missing, malformed, or written by another version of the schema.
    """
    remedy = "run `drafttrain eval` on that checkpoint again"
    value = read_json(path, DraftTrainError, remedy)
    if value.get("schema_version") != SCHEMA_VERSION:
        raise DraftTrainError(
            f"{path} has schema version {value.get('schema_version')}, this version reads "
            f"{SCHEMA_VERSION}: {remedy}"
        )
    try:
        return Report.model_validate(value)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DraftTrainError(f"{path}: field '{field}': {first['msg']}; {remedy}") from None


def report_steps(folder: Path) -> Iterator[int]:
    """Steps of the reports in a folder, ascending."""
    names = (_NAME.fullmatch(path.name) for path in folder.glob("step-*.json"))
    yield from sorted(int(name[1]) for name in names if name)
