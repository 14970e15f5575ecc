"""Measure a drafter on an evaluation store: samples -> records of rounds, times and outputs.

``evaluate_replay`` needs the store and the target's head only; ``evaluate_live`` decodes the same
prompts with the target (the tokens before a sample's first response). Where the stored text is the
target's own greedy text, greedy decoding runs over the same stretch of it, so that replay and live
can be compared round for round. Both work on any subset of samples and return values that merge, so
ranks can share the work.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from drafttrain.data.errors import TargetError
from drafttrain.data.progress import tracked
from drafttrain.data.store_reader import FeatureStore, SampleIndex, StoredSample
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.parallel import draft_anchors
from drafttrain.drafter.session import DrafterSession
from drafttrain.extract.head import Head
from drafttrain.extract.target import Target

from .config import EvalConfig
from .decode import Decoded, Limits, Proposer, decode
from .lossless import compare_outputs
from .records import LiveResult, PromptRecord, ReplayResult, SpeedRecord, records_of
from .replay import DraftAnchors, replay_span, spans_of
from .sampling import make_chooser
from .session import TargetSession
from .tau import RoundLog
from .tree import AUTOREGRESSIVE, Method, methods_of

_PROMPT_HEAD = 64
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter as the two evaluations use it; tests put known proposals in its place."""

    block_size: int
    anchors: Callable[[StoredSample], DraftAnchors]
    """Drafts of a stored sample's anchors, for replay."""
    proposer: Callable[[SampleIndex], Proposer]
    """An incremental proposer for one sample's prompt, for live decoding."""


def drafting_of(drafter: Drafter, head: Head) -> Drafting:
    """The drafting of a trained drafter; one session serves all prompts."""
    session = DrafterSession(drafter, head)
    return Drafting(
        drafter.config.block_size,
        lambda sample: partial(draft_anchors, drafter, head, sample),
        lambda sample: session,
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
        logs = _replay(drafting, store.sample(i), spans, config)
        result.records.extend(_records(logs, drafting.block_size, config, index))
    return result.model_copy(update={"samples": samples, "skipped": skipped})


def live_indices(store: FeatureStore, per_source: int) -> list[int]:
    """The first samples of every data set that have a response, in store order."""
    taken: dict[str, int] = {}
    chosen = []
    for i in range(len(store)):
        index = store.index(i)
        if taken.get(index.source, 0) < per_source and spans_of(index.loss_mask):
            taken[index.source] = taken.get(index.source, 0) + 1
            chosen.append(i)
    return chosen


def evaluate_live(
    target: Target,
    drafter: Drafter,
    head: Head,
    store: FeatureStore,
    config: EvalConfig,
    indices: Sequence[int] | None = None,
    progress: bool = True,
) -> LiveResult:
    """Decode prompts of the store with the target: baseline, chain and trees, every temperature.

    Args:
        target: the model the store was made from.
        drafter: in evaluation mode.
        head: on the drafter's device.
        store: supplies prompts, and the reference for the comparison with replay.
        config: budgets, temperatures, limits.
        indices: samples of this rank; unset means ``config.live_prompts`` of every data set.
        progress: draw a progress bar.

    Raises:
        TargetError: the target cannot verify a tree exactly, or a response would not fit.
    """
    return decode_store(target, drafting_of(drafter, head), store, config, indices, progress)


def decode_store(
    target: Target,
    drafting: Drafting,
    store: FeatureStore,
    config: EvalConfig,
    indices: Sequence[int] | None = None,
    progress: bool = True,
) -> LiveResult:
    """``evaluate_live`` for anything that drafts."""
    chosen = live_indices(store, config.live_prompts) if indices is None else indices
    live = _Live(target, drafting, store, config)
    result = LiveResult(block_size=drafting.block_size)
    for number, i in enumerate(tracked(chosen, "live", progress)):
        if number == 0:
            live.warm_up(i)
        for temperature in config.temperatures:
            live.prompt(i, temperature, result)
    return result


class _Live:
    """Decodes prompts of one store with every method and notes what happened."""

    def __init__(
        self, target: Target, drafting: Drafting, store: FeatureStore, config: EvalConfig
    ) -> None:
        self._session = TargetSession(target, store.meta.taps)
        self._target, self._drafting = target, drafting
        self._store, self._config = store, config
        self._methods = methods_of(config.tree_budgets)
        self._dtype = target.dtype

    def warm_up(self, i: int) -> None:
        """Decode a few tokens with every method, so that no timed one pays for first use."""
        for method in self._methods:
            self._decode(self._store.index(i), method, 0.0, _WARM_UP_TOKENS)

    def prompt(self, i: int, temperature: float, result: LiveResult) -> None:
        """Decode sample ``i``'s prompt with every method and add to ``result``."""
        index = self._store.index(i)
        start, end = spans_of(index.loss_mask)[0]
        limit = self._config.max_new_tokens
        compared = index.greedy and temperature == 0
        if compared:
            limit = min(limit, end - start)
        baseline: Decoded | None = None
        logs: dict[Method, RoundLog] = {}
        for method in self._methods:
            decoded = self._decode(index, method, temperature, limit)
            logs[method] = decoded.log
            result.speed.append(_speed(index, method, temperature, decoded))
            if baseline is None:
                baseline = decoded
            else:
                names = {"sample_id": index.sample_id, "method": method.label}
                result.outputs.append(
                    compare_outputs(names, temperature, baseline, decoded.tokens, self._dtype)
                )
        size = self._drafting.block_size
        result.records.extend(_records(logs, size, self._config, index, temperature))
        if compared and baseline is not None:
            text = index.input_ids[start : start + limit].tolist()
            names = {"sample_id": index.sample_id, "method": AUTOREGRESSIVE.label}
            result.stored.append(compare_outputs(names, temperature, baseline, text, self._dtype))
            span = (start, start + limit)
            replayed = _replay(self._drafting, self._store.sample(i), [span], self._config)
            result.replayed.extend(_records(replayed, size, self._config, index))

    def _decode(
        self, index: SampleIndex, method: Method, temperature: float, limit: int
    ) -> Decoded:
        start, _ = spans_of(index.loss_mask)[0]
        longest = start + limit + self._drafting.block_size
        if longest > self._target.max_positions:
            raise TargetError(
                f"sample {index.sample_id} has a prompt of {start} tokens; with {limit} new tokens "
                f"and a block it needs {longest} positions, the target has "
                f"{self._target.max_positions}: lower eval.max_new_tokens or data.max_length"
            )
        return decode(
            self._session,
            self._drafting.proposer(index),
            index.input_ids[:start],
            method,
            Limits(limit, frozenset(self._target.stop_ids)),
            make_chooser(temperature, self._config.seed, index.sample_id),
        )


def _replay(
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


def _records(
    logs: dict[Method, RoundLog],
    block_size: int,
    config: EvalConfig,
    index: SampleIndex,
    temperature: float = 0.0,
) -> Iterable[PromptRecord]:
    for method, log in logs.items():
        names: dict[str, str | float] = {
            "sample_id": index.sample_id,
            "source": index.source,
            "mode": index.mode,
            "method": method.label,
            "temperature": temperature,
        }
        yield from records_of(log, block_size, config.context_buckets, names)


def _speed(index: SampleIndex, method: Method, temperature: float, decoded: Decoded) -> SpeedRecord:
    return SpeedRecord(
        sample_id=index.sample_id,
        method=method.label,
        temperature=temperature,
        tokens=decoded.log.tokens,
        rounds=len(decoded.log.rounds),
        prefill_seconds=decoded.prefill_seconds,
        seconds=decoded.seconds,
    )


def _prompt_head(index: SampleIndex, span: tuple[int, int]) -> list[int]:
    return index.input_ids[: min(span[0], _PROMPT_HEAD)].tolist()
