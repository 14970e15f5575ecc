"""A store's summary as tables for the screen: ``StoreSummary`` -> a rich renderable."""

from collections import Counter

import numpy as np
from rich import box
from rich.console import Group as Screen
from rich.console import RenderableType
from rich.table import Table

from drafttrain.data.consumers import read_consumers
from drafttrain.data.sizes import human_bytes
from drafttrain.data.store_check import name_shards
from drafttrain.data.store_info import StoreSummary

_QUANTILES = {"min": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
_BAR = 40  # characters of the longest bar


def show_summary(summary: StoreSummary) -> RenderableType:
    """Settings, progress, contents, lengths and norms of a store."""
    parts: list[RenderableType] = [_settings(summary)]
    if summary.records:
        parts += [_groups(summary), _lengths(summary), _norms(summary)]
    return Screen(*parts)


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def _settings(summary: StoreSummary) -> Table:
    meta, records = summary.meta, summary.records
    tokens = sum(record.num_tokens for record in records.values())
    revision = f" at {meta.target_revision}" if meta.target_revision else ""
    table = Table(box=None, show_header=False, title=str(summary.folder), title_justify="left")
    final = " and the final hidden state" if meta.final_hidden else ""
    rows = {
        "target": f"{meta.target}{revision}, {meta.target_dtype}, fingerprint"
        f" {meta.target_fingerprint[:12]}",
        "states": f"taps {', '.join(map(str, meta.taps))} of {meta.num_target_layers} layers"
        f"{final}, width {meta.hidden_size}, codec {meta.codec}",
        "shards": f"{len(records)} of {meta.num_shards} sealed",
        "samples": f"{len(summary.lengths):,} of {meta.num_samples:,}",
        "tokens": f"{tokens:,} of {meta.num_tokens:,}",
        "bytes": f"{human_bytes(summary.bytes)} of about"
        f" {human_bytes(meta.num_tokens * meta.bytes_per_token())}"
        f" ({human_bytes(meta.bytes_per_token())} a token), without the head",
        "sample table": meta.table_hash,
    }
    if records:
        engines = Counter(record.engine for record in records.values())
        rows["written by"] = ", ".join(f"{name} {n}" for name, n in sorted(engines.items()))
    if meta.order_seed is not None:
        rows["rolling"] = f"in the training order of seed {meta.order_seed}, shards come and go"
        for name, consumer in read_consumers(summary.folder).items():
            rows[f"read by {name}"] = f"{consumer.position:,} of {consumer.until:,} samples"
    elif summary.missing:
        rows["missing"] = name_shards(summary.missing)
    if not summary.head:
        rows["head"] = "head.safetensors is missing"
    for number, line in enumerate(summary.bad, start=1):
        rows[f"damaged {number}"] = line.replace(f"{summary.folder}/", "")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _groups(summary: StoreSummary) -> Table:
    table = _table("source", "mode", "samples", "greedy", "tokens")
    for group in summary.groups:
        counts = (group.samples, group.greedy, group.tokens)
        table.add_row(group.source, group.mode, *(f"{count:,}" for count in counts))
    return table


def _lengths(summary: StoreSummary) -> Screen:
    """Quantiles, and a histogram whose classes double."""
    lengths = summary.lengths
    quantiles = _table("tokens a sample", *_QUANTILES, "mean")
    values = np.quantile(lengths, list(_QUANTILES.values()))
    quantiles.add_row("", *(f"{value:,.0f}" for value in values), f"{lengths.mean():,.0f}")
    classes = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(classes)
    bars = _table("from", "to", "samples", "")
    bars.columns[3].justify = "left"
    for power in range(int(classes.min()), len(counts)):
        bar = "█" * round(_BAR * counts[power] / counts.max())
        bars.add_row(f"{2**power:,}", f"{2 ** (power + 1) - 1:,}", f"{counts[power]:,}", bar)
    return Screen(quantiles, bars)


def _norms(summary: StoreSummary) -> Table:
    """Row norms by tap: the typical one, its range over shards, and how far outliers lie."""
    table = _table("row RMS", "median", "of shards", "99 %", "largest", "largest / median")
    records = list(summary.records.values())
    for name in records[0].states:
        found = [record.states[name] for record in records]
        medians = [statistic.median for statistic in found]
        median, largest = float(np.median(medians)), max(statistic.max for statistic in found)
        table.add_row(
            name if name == "final" else f"tap {name}",
            f"{median:.4g}",
            f"{min(medians):.4g} to {max(medians):.4g}",
            f"{np.median([statistic.p99 for statistic in found]):.4g}",
            f"{largest:.4g}",
            f"{largest / median:.1f}",
        )
    return table
