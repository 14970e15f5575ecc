"""Decode an evaluation store's prompts with the target: baseline, chain and trees -> records.

The prompt is what stands before a sample's first response. Where the stored text is the target's
own greedy text, greedy decoding runs over the same stretch of it, so that replay and live can be
compared round for round. Any subset of samples gives values that merge, so ranks can share work.
"""

import logging
from collections.abc import Sequence

import torch

from drafttrain.data.errors import TargetError
from drafttrain.data.progress import tracked
from drafttrain.data.store_reader import FeatureStore, SampleIndex
from drafttrain.drafter.model import Drafter
from drafttrain.extract.head import Head
from drafttrain.extract.target import Target

from .config import EvalConfig
from .decode import Decoded, Limits, decode
from .evaluate import Drafting, drafting_of, replay_spans, tagged_records
from .lossless import compare_outputs
from .records import LiveResult, SpeedRecord
from .replay import spans_of
from .sampling import make_chooser
from .session import TargetSession
from .tau import RoundLog
from .tree import AUTOREGRESSIVE, Method, methods_of

_LOGGER = logging.getLogger(__name__)
_WARM_UP_TOKENS = 8


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
    live.warn_beyond_training(chosen)
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

    def warn_beyond_training(self, indices: Sequence[int]) -> None:
        """Say before the work how many responses may leave the lengths the drafter has seen."""
        trained = self._drafting.trained_length
        if trained is None:
            return
        starts = [spans_of(self._store.index(i).loss_mask)[0][0] for i in indices]
        long = sum(start + self._config.max_new_tokens > trained for start in starts)
        if long:
            _LOGGER.warning(
                "%d of %d live prompts with eval.max_new_tokens %d reach past the %d tokens of the "
                "drafter's longest training sample: expect fewer accepted tokens there (the report "
                "counts them apart); train on longer samples if you serve such lengths",
                long,
                len(starts),
                self._config.max_new_tokens,
                trained,
            )

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
            _reset_peak(self._session.device)
            decoded = self._decode(index, method, temperature, limit)
            peak = _peak_bytes(self._session.device)
            logs[method] = decoded.log
            result.speed.append(_speed(index, method, temperature, decoded, peak))
            if baseline is None:
                baseline = decoded
            else:
                names = {"sample_id": index.sample_id, "method": method.label}
                result.outputs.append(
                    compare_outputs(names, temperature, baseline, decoded.tokens, self._dtype)
                )
        drafting = self._drafting
        result.records.extend(tagged_records(logs, drafting, self._config, index, temperature))
        if compared and baseline is not None:
            text = index.input_ids[start : start + limit].tolist()
            names = {"sample_id": index.sample_id, "method": AUTOREGRESSIVE.label}
            result.stored.append(compare_outputs(names, temperature, baseline, text, self._dtype))
            span = (start, start + limit)
            replayed = replay_spans(self._drafting, self._store.sample(i), [span], self._config)
            result.replayed.extend(tagged_records(replayed, drafting, self._config, index))

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


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _speed(
    index: SampleIndex,
    method: Method,
    temperature: float,
    decoded: Decoded,
    peak_bytes: int | None,
) -> SpeedRecord:
    return SpeedRecord(
        sample_id=index.sample_id,
        method=method.label,
        temperature=temperature,
        tokens=decoded.log.tokens,
        rounds=len(decoded.log.rounds),
        prefill_seconds=decoded.prefill_seconds,
        seconds=decoded.seconds,
        peak_bytes=peak_bytes,
    )
