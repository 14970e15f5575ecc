"""Which hidden states are refused: row norms ``[tokens, columns]`` -> what is wrong, in words.

A column is one tap, or the final hidden state (last). Refused are NaN, infinity, all-zero rows,
states that repeat from token to token, rows far off their tap's median, taps far off the others,
and shards far off the other shards. Guarantee: the limits are wide enough for every target known to
us and narrow enough for what memory holds by accident. Measured on SmolLM2-135M (30,000 tokens of
chat, mathematics and code, 6 taps): rows lie within 0.6 and 8 times their tap's median, attention
sinks at up to 190 times (published models: up to about 1,000); taps differ by up to 15 times; the
median of a single sample lies within 0.86 and 1.22 times that of all, that of one source within
0.97 and 1.07 times. Cost: one pass in float32, 0.1 s a GB of bfloat16 on one core.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .codec import CODECS
from .store_format import ShardRecord, StateStatistics, StoreMeta

# A row may have this many times its tap's median norm, or this fraction of it; a tap as many times
# the norm of the middle tap.
ROW_FACTOR = 1e4
TAP_FACTOR = 1e4
# A shard's median norm may be this many times that of the store, or this fraction.
SHARD_FACTOR = 3.0
# Below this the first tokens, which are attention sinks, can be the median.
_COMPARED_TOKENS = 32
# What a norm that was measured again may differ by: another order of adding up.
_SAME_NORM = 1e-3
# float32 values at a time: within the processor's last cache, but few calls, because each of them
# hands Python's lock from and to the thread that launches kernels.
_BLOCK_VALUES = 1 << 22


def columns(meta: StoreMeta) -> list[str]:
    """What the columns are called in messages."""
    taps = [f"tap {layer}" for layer in meta.taps]
    return [*taps, "the final hidden state"] if meta.final_hidden else taps


def row_norms(meta: StoreMeta, tensors: Mapping[str, Tensor]) -> Tensor:
    """Root mean square of every stored row, as a reader will see it.

    Args:
        meta: the store's settings.
        tensors: stored parts by name, each ``[tokens, ...]``.

    Returns:
        float32 ``[tokens, columns]``.
    """
    fields = ["taps", "final"] if meta.final_hidden else ["taps"]
    parts = []
    for field in fields:
        norms = _field_norms(meta, field, tensors)
        parts.append(norms.reshape(len(norms), -1))
    return torch.cat(parts, dim=1)


def _field_norms(meta: StoreMeta, field: str, tensors: Mapping[str, Tensor]) -> Tensor:
    tokens = len(next(iter(tensors.values())))
    per_token = meta.hidden_size * (len(meta.taps) if field == "taps" else 1)
    step = max(1, _BLOCK_VALUES // per_token)
    blocks = [
        torch.linalg.vector_norm(
            _decoded(meta, field, tensors, slice(start, start + step)).float(), dim=-1
        )
        for start in range(0, tokens, step)
    ]
    return torch.cat(blocks) * meta.hidden_size**-0.5


def _decoded(meta: StoreMeta, field: str, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
    codec = CODECS[meta.codec][field]
    return codec.decode({suffix: tensors[field + suffix][rows] for suffix in codec.parts}, None)


def _row(meta: StoreMeta, tensors: Mapping[str, Tensor], row: int, column: int) -> Tensor:
    """The values ``[hidden]`` behind one norm."""
    if column < len(meta.taps):
        return _decoded(meta, "taps", tensors, slice(row, row + 1))[0, column]
    return _decoded(meta, "final", tensors, slice(row, row + 1))[0]


def find_bad_state(
    meta: StoreMeta, tensors: Mapping[str, Tensor], norms: Tensor, ids: npt.NDArray[np.int32]
) -> str | None:
    """What one sample alone shows: not finite, all zero, or the same state for other tokens.

    Args:
        meta: the store's settings.
        tensors: the sample's stored parts, each ``[n, ...]``.
        norms: float32 ``[n, columns]`` from ``row_norms``.
        ids: its tokens ``[n]``.

    Returns:
        The first fault with its tap and token, or None.
    """
    names = columns(meta)
    odd = ~torch.isfinite(norms) | (norms == 0)
    if odd.any():
        # The lowest tap first: what goes wrong in one layer spreads to the later ones.
        column, token = (int(i) for i in odd.T.nonzero()[0])
        values = _row(meta, tensors, token, column)
        where = f"in {names[column]} at token {token}"
        if values.isnan().any():
            return f"NaN value {where}"
        if values.isinf().any():
            return f"infinite value {where}"
        if (values == 0).all():
            return f"all-zero row {where}"
        return f"absurd row {where} (largest value {float(values.abs().max()):.3g})"
    differ = torch.from_numpy(ids[1:] != ids[:-1])
    same = differ[:, None] & (norms[1:] == norms[:-1])
    # Equal norms happen by chance, equal rows do not.
    for column in (2 * same.sum(dim=0) > differ.sum()).nonzero().flatten().tolist():
        tokens = [
            token + 1
            for token in same[:, column].nonzero().flatten().tolist()
            if torch.equal(
                _row(meta, tensors, token, column), _row(meta, tensors, token + 1, column)
            )
        ]
        if 2 * len(tokens) > differ.sum():
            return (
                f"the same row again in {names[column]} at token {tokens[0]} (and at"
                f" {len(tokens) - 1} others), though the tokens differ"
            )
    return None


def find_bad_norm(
    meta: StoreMeta, norms: Tensor, offsets: npt.NDArray[np.int64], sample_ids: Sequence[str]
) -> str | None:
    """What a whole shard shows: a tap far off the others, or a row far off its tap's median.

    Args:
        meta: the store's settings.
        norms: float32 ``[tokens, columns]`` of the shard, finite and above 0.
        offsets: int64 ``[samples + 1]``, first row of each sample.
        sample_ids: their names.

    Returns:
        The first fault with its tap, and for a row its sample and token; or None.
    """
    names = columns(meta)
    medians = norms.median(dim=0).values
    middle = medians.median()
    for column in _outside(medians, middle, TAP_FACTOR).nonzero().flatten().tolist():
        return (
            f"{names[column]} has norm {medians[column]:.3g} in the median row, the middle tap"
            f" {middle:.3g}"
        )
    outside = _outside(norms, medians, ROW_FACTOR)
    if not outside.any():
        return None
    column, row = (int(i) for i in outside.T.nonzero()[0])
    sample = int(np.searchsorted(offsets, row, side="right")) - 1
    return (
        f"sample {sample_ids[sample]}: absurd norm {norms[row, column]:.3g} in {names[column]} at"
        f" token {row - offsets[sample]}, the median row has {medians[column]:.3g}"
    )


def _outside(values: Tensor, middle: Tensor, factor: float) -> Tensor:
    return (values > factor * middle) | (factor * values < middle)


def statistics(meta: StoreMeta, norms: Tensor) -> dict[str, StateStatistics]:
    """Robust statistics of each column of ``norms`` ``[tokens, columns]``, to 6 digits.

    Returns:
        Layer id as text, or "final", -> statistics.
    """
    names = [str(layer) for layer in meta.taps] + ["final"] * meta.final_hidden
    table = norms.double().numpy()
    # Quantiles that are values of rows, so that no interpolation can show.
    low, median, p99, high = np.quantile(table, [0, 0.5, 0.99, 1], axis=0, method="lower")
    total = np.sqrt(np.square(table).mean(axis=0))
    return {
        name: StateStatistics(
            rms=_digits(total[i]),
            min=_digits(low[i]),
            median=_digits(median[i]),
            p99=_digits(p99[i]),
            max=_digits(high[i]),
        )
        for i, name in enumerate(names)
    }


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def find_other_statistics(record: ShardRecord, found: Mapping[str, StateStatistics]) -> str | None:
    """Compare statistics that were measured again with those of the record."""
    for name, statistic in found.items():
        recorded = record.states[name].model_dump()
        for key, value in statistic.model_dump().items():
            if abs(value - recorded[key]) > _SAME_NORM * value:
                return f"{key} norm of {_called(name)} is {value:.4g}, recorded {recorded[key]:.4g}"
    return None


def _called(name: str) -> str:
    return "the final hidden state" if name == "final" else f"tap {name}"


def find_odd_shards(records: Iterable[ShardRecord]) -> dict[int, str]:
    """Shards whose median norms are far off those of the others.

    Returns:
        Shard number -> what is odd about it.
    """
    compared = [record for record in records if record.num_tokens >= _COMPARED_TOKENS]
    odd: dict[int, str] = {}
    for name in compared[0].states if compared else ():
        medians = {record.index: record.states[name].median for record in compared}
        # Geometric, so that of two shards both are odd: nobody knows which one is wrong.
        middle = float(np.exp(np.median(np.log(list(medians.values())))))
        for index, median in medians.items():
            if max(median / middle, middle / median) > SHARD_FACTOR:
                odd.setdefault(
                    index,
                    f"{_called(name)} has norm {median:.4g} in the median row, the other shards"
                    f" {middle:.4g}",
                )
    return odd
