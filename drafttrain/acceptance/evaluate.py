"""Measure a drafter on an evaluation store by replay: samples -> records of rounds.

``evaluate_replay`` needs the store and the target's head only. It works on any subset of samples
and returns values that merge, so ranks can share the work. ``Drafting``, ``replay_spans`` and
``tagged_records`` also serve live decoding (``live``).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from drafttrain.data.progress import tracked
from drafttrain.data.store_reader import FeatureStore, SampleIndex, StoredSample
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.parallel import draft_anchors
from drafttrain.drafter.session import DrafterSession
from drafttrain.extract.head import Head

from .config import EvalConfig
from .decode import Proposer
from .records import PromptRecord, ReplayResult, records_of
from .replay import DraftAnchors, replay_span, spans_of
from .tau import RoundLog
from .tree import Method, methods_of

_PROMPT_HEAD = 64


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter as the two evaluations use it; tests put known proposals in its place."""

    block_size: int
    anchors: Callable[[StoredSample], DraftAnchors]
    """Drafts of a stored sample's anchors, for replay."""
    proposer: Callable[[SampleIndex], Proposer]
    """An incremental proposer for one sample's prompt, for live decoding."""
    trained_length: int | None = None
    """Tokens of the longest training sample, if known."""


def drafting_of(drafter: Drafter, head: Head) -> Drafting:
    """The drafting of a trained drafter; one session serves all prompts."""
    session = DrafterSession(drafter, head)
    return Drafting(
        drafter.config.block_size,
        lambda sample: partial(draft_anchors, drafter, head, sample),
        lambda sample: session,
        drafter.config.trained_length,
    )


def evaluate_replay(
    drafter: Drafter,
    head: Head,
    store: FeatureStore,
    config: EvalConfig,
    indices: Sequence[int] | None = None,
    progress: bool = True,
) -> ReplayResult:
    """Replay every response of the samples whose text is the target's own greedy text.

    Args:
        drafter: in evaluation mode.
        head: on the drafter's device.
        store: with the taps the drafter was made for.
        config: budgets and buckets.
        indices: samples of this rank; unset means all.
        progress: draw a progress bar.
    """
    return replay_store(drafting_of(drafter, head), store, config, indices, progress)


def replay_store(
    drafting: Drafting,
    store: FeatureStore,
    config: EvalConfig,
    indices: Sequence[int] | None = None,
    progress: bool = True,
) -> ReplayResult:
    """``evaluate_replay`` for anything that drafts."""
    chosen = range(len(store)) if indices is None else indices
    result = ReplayResult(block_size=drafting.block_size)
    samples = skipped = 0
    for i in tracked(chosen, "replay", progress):
        index = store.index(i)
        spans = spans_of(index.loss_mask)
        if spans and index.source not in result.prompt_heads:
            result.prompt_heads[index.source] = _prompt_head(index, spans[0])
        if not index.greedy:
            skipped += 1
            continue
        samples += 1
        logs = replay_spans(drafting, store.sample(i), spans, config)
        result.records.extend(tagged_records(logs, drafting, config, index))
    return result.model_copy(update={"samples": samples, "skipped": skipped})


def replay_spans(
    drafting: Drafting,
    sample: StoredSample,
    spans: Sequence[tuple[int, int]],
    config: EvalConfig,
) -> dict[Method, RoundLog]:
    """Rounds of all given responses of a sample, per method."""
    methods = methods_of(config.tree_budgets)
    logs = {method: RoundLog() for method in methods}
    draft = drafting.anchors(sample)
    for span in spans:
        for method, log in replay_span(sample.input_ids, span, draft, methods).items():
            logs[method].rounds.extend(log.rounds)
    return logs


def tagged_records(
    logs: dict[Method, RoundLog],
    drafting: Drafting,
    config: EvalConfig,
    index: SampleIndex,
    temperature: float = 0.0,
) -> Iterable[PromptRecord]:
    """Rounds per method as records that name sample, source, mode and temperature."""
    for method, log in logs.items():
        names: dict[str, str | float] = {
            "sample_id": index.sample_id,
            "source": index.source,
            "mode": index.mode,
            "method": method.label,
            "temperature": temperature,
        }
        yield from records_of(
            log, drafting.block_size, config.context_buckets, drafting.trained_length, names
        )


def _prompt_head(index: SampleIndex, span: tuple[int, int]) -> list[int]:
    return index.input_ids[: min(span[0], _PROMPT_HEAD)].tolist()
