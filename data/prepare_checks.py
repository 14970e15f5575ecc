"""What a sample must satisfy to enter a table, and the counts kept per source.

In: marked ids [n] of one record. Out: int64 ids [m] and bool mask [m], m <= max_length, or
``RowDropped`` with a reason; ids that contradict the target raise ``DataError``, because they mean
that the whole source was made for another target. Cost: linear in the ids.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import SourceConfig
from .drops import TEMPLATE_REASONS, DropLog, RowDropped
from .errors import DataError, TemplateError
from .loss_mask import Marked
from .messages import Message
from .samples import ID_DTYPE, MODES, Mask, Sample


@dataclass(frozen=True, slots=True)
class CorpusRules:
    """The limits that target and drafter set for every sample."""

    max_length: int
    vocab_rows: int
    mask_token_id: int
    stop_ids: frozenset[int]

    def check(self) -> None:
        """Refuse limits that contradict each other.

        Raises:
            DataError: ids do not fit int32, or the mask token cannot be one.
        """
        if self.vocab_rows - 1 > np.iinfo(ID_DTYPE).max:
            raise DataError(f"the target has {self.vocab_rows} embedding rows, more than int32 ids")
        if not 0 <= self.mask_token_id < self.vocab_rows:
            raise DataError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding "
                f"(0..{self.vocab_rows - 1}): name an existing id that the corpus never uses"
            )
        if self.mask_token_id in self.stop_ids:
            raise DataError(
                f"mask_token_id {self.mask_token_id} is a stop token of the target, which ends "
                "every response: name an id that the corpus never uses"
            )

    def apply(self, marked: Marked, row_ref: str) -> tuple[npt.NDArray[np.int64], Mask]:
        """Check and truncate one marked text.

        The check for supervised tokens comes after truncation: a cut can remove the whole answer.

        Raises:
            RowDropped: less than an anchor and its next token is left to learn from.
            DataError: an id is not a row of the target's embedding, or is the mask token.
        """
        ids = np.array(marked.input_ids, dtype=np.int64)
        mask = np.array(marked.loss_mask, dtype=np.bool_)
        outside = ids[(ids < 0) | (ids >= self.vocab_rows)]
        if outside.size:
            raise DataError(
                f"{row_ref} holds token id {outside[0]}, the target has embedding rows "
                f"0..{self.vocab_rows - 1}: the source was made with another tokenizer"
            )
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not (mask[:-1] & mask[1:]).any():
            if len(ids) < len(marked.input_ids):
                raise RowDropped(
                    "nothing_left_after_truncation",
                    f"{len(marked.input_ids)} tokens cut to {self.max_length}",
                )
            raise RowDropped("too_few_supervised_tokens", f"{mask.sum()} of {len(ids)} tokens")
        if (ids == self.mask_token_id).any():
            raise DataError(
                f"{row_ref} holds the mask token id {self.mask_token_id} at position "
                f"{int(np.argmax(ids == self.mask_token_id))}: set drafter.mask_token_id to an id "
                "that the corpus never uses"
            )
        return ids, mask


@dataclass(slots=True)
class SourceStats:
    """Counts of one source."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    greedy: int = 0
    truncated: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    drops: DropLog = field(default_factory=DropLog)

    def add(self, sample: Sample) -> None:
        """Count a sample that enters the table."""
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.supervised += int(sample.loss_mask.sum())
        self.greedy += sample.greedy
        self.modes[sample.mode] += 1

    def entries(self) -> dict[str, Any]:
        """The source's part of the manifest."""
        return {
            "records": self.records,
            "samples": self.samples,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "supervised_share": round(self.supervised / self.tokens, 4),
            "greedy_samples": self.greedy,
            "truncated": self.truncated,
            "modes": {mode: self.modes[mode] for mode in MODES},
            "drops": dict(self.drops.counts.most_common()),
            "drop_examples": self.drops.examples,
        }

    def describe(self) -> str:
        """One line for the log."""
        modes = ", ".join(f"{mode} {self.modes[mode]}" for mode in MODES if self.modes[mode])
        line = (
            f"{self.samples} samples, {self.tokens} tokens, "
            f"{100 * self.supervised / self.tokens:.1f} % supervised, {self.greedy} greedy, "
            f"{self.truncated} truncated, modes: {modes}"
        )
        return f"{line}; dropped {self.drops.describe()}" if self.drops.total else line


def no_samples_error(split: str, source: SourceConfig, stats: SourceStats) -> DataError:
    """The error for a source of which nothing is left."""
    failed = sum(stats.drops.counts[reason] for reason in TEMPLATE_REASONS)
    if failed == stats.records:
        return TemplateError(
            f"{split} source '{source.name}' ({source.path}): the target's chat template cannot be "
            f"trusted to mark what the target produced, on none of {stats.records} conversations: "
            f"{stats.drops.describe()}; regenerate the responses with 'drafttrain data regenerate' "
            "(its ids need no rendering) or set data.template_kwargs"
        )
    return DataError(
        f"{split} source '{source.name}' ({source.path}) gives no sample: "
        f"dropped {stats.drops.describe()}"
    )


def prompt_keys(sample: Sample) -> set[bytes]:
    """Hashes of every prompt of a sample: the ids before each run of supervised tokens."""
    mask = sample.loss_mask
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    digest, done, keys = hashlib.sha256(), 0, set()
    for start in starts.tolist():
        digest.update(sample.input_ids[done:start].tobytes())
        done = start
        keys.add(digest.copy().digest()[:16])
    return keys


def text_keys(messages: list[Message] | None) -> set[bytes]:
    """Hash of the first user message, so that another system prompt or spacing does not hide it."""
    first = next((m["content"] for m in messages or [] if m["role"] == "user"), "")
    text = " ".join(first.split()).casefold()
    return {hashlib.sha256(text.encode()).digest()[:16]} if text else set()
