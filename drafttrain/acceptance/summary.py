"""Evaluation records -> the sections of a report: tau tables, slots, speed, losslessness, gaps.

Every table has one row per data set, mode and context bucket before it has sums, because a grand
mean hides the slice that fails. Intervals resample prompts within the slice of their row.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .config import EvalConfig
from .records import (
    LiveResult,
    OutputRecord,
    PromptRecord,
    ReplayResult,
    SpeedRecord,
    bucket_labels,
)
from .report import (
    ALL,
    GapRow,
    LengthRow,
    LiveSection,
    LosslessRow,
    Section,
    SlotRates,
    SpeedRow,
    TauRow,
)
from .stats import tau_interval
from .tau import Tally, accepted, tau
from .tree import AUTOREGRESSIVE, methods_of

Slice = tuple[str, str, str]
"""Data set, mode, bucket; ``all`` sums over one."""


def replay_section(result: ReplayResult, config: EvalConfig) -> Section:
    """The report section of a replay."""
    return Section(name="replay", **_tables(result.records, config))


def live_sections(result: LiveResult, config: EvalConfig) -> list[LiveSection]:
    """One report section per temperature."""
    return [_live_section(result, config, value) for value in config.temperatures]


def _live_section(result: LiveResult, config: EvalConfig, temperature: float) -> LiveSection:
    records = [item for item in result.records if item.temperature == temperature]
    outputs = [item for item in result.outputs if item.temperature == temperature]
    stored = [item for item in result.stored if item.temperature == temperature]
    speed = [item for item in result.speed if item.temperature == temperature]
    drafting = [method.label for method in methods_of(config.tree_budgets)[1:]]
    return LiveSection(
        name=f"live, temperature {temperature:g}",
        temperature=temperature,
        speed=_speed_rows(speed, config),
        lossless=[_lossless_row(label, outputs, speed) for label in drafting],
        stored=_lossless_row(AUTOREGRESSIVE.label, stored, speed) if stored else None,
        gaps=_gap_rows(records, result.replayed, drafting) if temperature == 0 else [],
        **_tables(records, config),
    )


def _tables(records: Sequence[PromptRecord], config: EvalConfig) -> dict:
    """Fields that replay and live sections share."""
    labels = [method.label for method in methods_of(config.tree_budgets)]
    groups: dict[Slice, dict[str, dict[str, Tally]]] = {}
    for item in records:
        for where in _slices(item):
            prompts = groups.setdefault(where, {}).setdefault(item.method, {})
            earlier = prompts.get(item.sample_id)
            prompts[item.sample_id] = item.tally if earlier is None else earlier + item.tally
    rows = [
        _tau_row(where, label, groups[where][label], config)
        for where in sorted(groups, key=_slice_order(config))
        for label in labels
        if label in groups[where]
    ]
    whole = groups.get((ALL, ALL, ALL), {})
    totals = {label: _total(whole[label].values()) for label in labels if label in whole}
    return {
        "rows": rows,
        "slots": {
            label: _slot_rates(total)
            for label, total in totals.items()
            if label != AUTOREGRESSIVE.label
        },
        "beyond": _length_rows(records, list(totals)),
        "emitted": {label: total.emitted.tolist() for label, total in totals.items()},
        "per_prompt": {
            label: {name: (tally.tokens, tally.rounds) for name, tally in whole[label].items()}
            for label in totals
        },
    }


def _length_rows(records: Sequence[PromptRecord], methods: Sequence[str]) -> list[LengthRow]:
    """Both sides of the trained length, for methods that drafted behind it."""
    rows = []
    for method in methods:
        sides = [
            [r.tally for r in records if r.method == method and r.beyond == beyond]
            for beyond in (False, True)
        ]
        if method == AUTOREGRESSIVE.label or not sides[1]:
            continue
        within = _total(sides[0]) if sides[0] else None
        beyond = _total(sides[1])
        rows.append(
            LengthRow(
                method=method,
                rounds_within=within.rounds if within else 0,
                tau_within=within.tau if within else None,
                rounds_beyond=beyond.rounds,
                tau_beyond=beyond.tau,
            )
        )
    return rows


def _slices(item: PromptRecord) -> list[Slice]:
    return [(item.source, item.mode, item.bucket), (item.source, item.mode, ALL), (ALL, ALL, ALL)]


def _slice_order(config: EvalConfig) -> Callable[[Slice], tuple]:
    """Data sets by name, buckets by length, sums after their parts."""
    order = [*bucket_labels(config.context_buckets), ALL]
    return lambda where: (where == (ALL, ALL, ALL), *where[:2], order.index(where[2]))


def _total(tallies: Iterable[Tally]) -> Tally:
    first, *rest = tallies
    for tally in rest:
        first += tally
    return first


def _tau_row(where: Slice, method: str, prompts: dict[str, Tally], config: EvalConfig) -> TauRow:
    # In order of id, so that the interval does not depend on how ranks shared the prompts.
    tallies = [prompts[name] for name in sorted(prompts)]
    total = _total(tallies)
    interval = tau_interval(
        np.array([tally.tokens for tally in tallies]),
        np.array([tally.rounds for tally in tallies]),
        config.bootstrap_resamples,
        config.seed,
    )
    return TauRow(
        source=where[0],
        mode=where[1],
        bucket=where[2],
        method=method,
        prompts=len(tallies),
        rounds=total.rounds,
        tokens=total.tokens,
        tau=total.tau,
        low=interval.low,
        high=interval.high,
        accepted=accepted(total.tau),
    )


def _slot_rates(total: Tally) -> SlotRates:
    unconditional, conditional = total.slot_acceptance()
    return SlotRates(
        unconditional=unconditional.tolist(),
        conditional=[None if np.isnan(rate) else float(rate) for rate in conditional],
    )


def _speed_rows(records: Sequence[SpeedRecord], config: EvalConfig) -> list[SpeedRow]:
    rows: list[SpeedRow] = []
    for method in methods_of(config.tree_budgets):
        mine = [item for item in records if item.method == method.label]
        tokens, rounds = sum(item.tokens for item in mine), sum(item.rounds for item in mine)
        if not rounds:
            continue
        stages = {name: sum(item.seconds[name] for item in mine) for name in mine[0].seconds}
        seconds = sum(stages.values())
        speed = tokens / seconds
        peaks = [item.peak_bytes for item in mine if item.peak_bytes is not None]
        rows.append(
            SpeedRow(
                method=method.label,
                tokens=tokens,
                seconds=seconds,
                tokens_per_second=speed,
                ratio=speed / rows[0].tokens_per_second if rows else 1.0,
                prefill_ms=1000 * sum(item.prefill_seconds for item in mine) / len(mine),
                stage_ms={name: 1000 * value / rounds for name, value in stages.items()},
                peak_gb=max(peaks) / 1e9 if peaks else None,
            )
        )
    return rows


def _lossless_row(
    method: str, records: Sequence[OutputRecord], speed: Sequence[SpeedRecord]
) -> LosslessRow:
    mine = [item for item in records if item.method == method]
    names = {item.sample_id for item in mine}
    return LosslessRow(
        method=method,
        identical=sum(item.identical for item in mine),
        responses=len(mine),
        tokens=sum(s.tokens for s in speed if s.method == method and s.sample_id in names),
        near_ties=sum(item.near_tie for item in mine),
        differences=[item for item in mine if not item.identical],
    )


def _gap_rows(
    live: Sequence[PromptRecord], replayed: Sequence[PromptRecord], methods: Sequence[str]
) -> list[GapRow]:
    """Both sides on the prompts that were replayed."""
    rows = []
    for method in methods:
        names = {item.sample_id for item in replayed if item.method == method}
        sides = [
            [item for item in side if item.method == method and item.sample_id in names]
            for side in (live, replayed)
        ]
        if not names or not all(sides):
            continue
        totals = [_total(item.tally for item in side) for side in sides]
        values = [tau(total.tokens, total.rounds) for total in totals]
        gap = abs(values[1] - values[0]) / values[0]
        rows.append(
            GapRow(method=method, prompts=len(names), live=values[0], replay=values[1], gap=gap)
        )
    return rows
