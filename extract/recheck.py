"""Compute random tokens' states again: target and finished store -> do they agree?

For each chosen token the target reads its sample up to it; its taps and final hidden state are
compared with the stored row. Guarantee: a token agrees only if every tap has a cosine of at least
``COSINE`` and a relative error within the tolerance of the target's dtype and the store's codec.
It finds what no checksum can: states of another layer, of another text, or computed wrongly. Cost:
one forward of each chosen sample.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.errors import StoreError
from drafttrain.data.progress import tracked
from drafttrain.data.store_format import REPAIR, Shard, StoreMeta, plan_shards
from drafttrain.data.store_gate import columns
from drafttrain.data.store_parity import COSINE
from drafttrain.data.store_reader import FeatureStore

from .engine import Engine, Features
from .parity import agreement
from .target import Target

# Largest relative error of a row: what batches of other shapes do to the target, and rounding.
_TARGET_ERROR = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
_CODEC_ERROR = {"fp32": 0.0, "bf16": 5e-3}
_OTHER_CODEC_ERROR = 5e-2


@dataclass(slots=True)
class StateCheck:
    """How stored states compare with new ones.

    Attributes:
        tokens: how many were compared.
        tolerance: relative error that is allowed.
        cosine: lowest cosine of each column (taps, then the final hidden state).
        error: largest relative error of each column.
        bad: shard number -> the worst of its tokens, one line that names the file.
    """

    tokens: int
    tolerance: float
    cosine: dict[str, float]
    error: dict[str, float]
    bad: dict[int, str] = field(default_factory=dict)


def tolerance(meta: StoreMeta) -> float:
    """Relative error within which a state counts as the same."""
    codec = _CODEC_ERROR.get(meta.codec, _OTHER_CODEC_ERROR)
    return max(_TARGET_ERROR[meta.target_dtype], codec)


def check_states(target: Target, store: FeatureStore, count: int, seed: int = 0) -> StateCheck:
    """Compare ``count`` random tokens of a finished store with new forwards.

    Raises:
        StoreError: the store was made from another target.
    """
    meta = store.meta
    if target.fingerprint != meta.target_fingerprint:
        raise StoreError(
            f"{store.path} was made from target {meta.target} (fingerprint"
            f" {meta.target_fingerprint}), this is {target.name} ({target.fingerprint}): give the"
            " recipe it was made with"
        )
    starts = np.concatenate([[0], np.cumsum(store.lengths)])
    count = min(count, store.num_tokens)
    chosen: dict[int, list[int]] = {}
    for token in sorted(random.Random(seed).sample(range(store.num_tokens), count)):
        sample = int(np.searchsorted(starts, token, side="right")) - 1
        chosen.setdefault(sample, []).append(token - int(starts[sample]))
    names = columns(meta)
    check = StateCheck(count, tolerance(meta), dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.0))
    first = [shard.first for shard in plan_shards(store.lengths, meta.shard_tokens)]
    with Engine(target, meta.taps, "fp32", meta.final_hidden) as engine:
        # Exact in fp32: encoded like the store, a broken codec would agree with itself.
        # A group of its own for each sample, read up to its last chosen token.
        groups = (
            [store.index(sample).input_ids[: tokens[-1] + 1].numpy().astype(np.int32)]
            for sample, tokens in chosen.items()
        )
        found = engine.features(groups, batch_tokens=1)
        for sample, new in zip(tracked(list(chosen), "re-forward"), found, strict=True):
            shard = int(np.searchsorted(first, sample, side="right")) - 1
            _compare(store, (sample, chosen[sample]), new, shard, check)
    return check


def _compare(
    store: FeatureStore,
    chosen: tuple[int, list[int]],
    features: Features,
    shard: int,
    check: StateCheck,
) -> None:
    """Compare some tokens of one sample, and keep the worst."""
    number, tokens = chosen
    stored = store.sample(number)
    # Whatever the codec decodes to, compared in float32: [tokens, columns, hidden].
    final = None if features.final is None else features.final.decode()
    new = _rows(features.taps.decode(), final, tokens)
    old = _rows(stored.taps, stored.final, tokens)
    cosine, error = agreement(old, new)
    for column, name in enumerate(check.cosine):
        check.cosine[name] = min(check.cosine[name], float(cosine[:, column].min()))
        check.error[name] = max(check.error[name], float(error[:, column].max()))
    # Not "below the limit is bad": a NaN compares as neither.
    good = (cosine >= COSINE) & (error <= check.tolerance)
    if not good.all() and shard not in check.bad:
        row, column = (int(i) for i in (~good).nonzero()[0])
        files = Shard.named(shard)
        check.bad[shard] = (
            f"{store.path / files.states}: sample {stored.sample_id}, token {tokens[row]}:"
            f" {list(check.cosine)[column]} has cosine {cosine[row, column]:.4f} and relative error"
            f" {error[row, column]:.2g} against a new forward (allowed: {COSINE} and"
            f" {check.tolerance:g});"
            f" {REPAIR} and --tokens"
        )


def _rows(taps: Tensor, final: Tensor | None, tokens: list[int]) -> Tensor:
    parts = [taps[tokens].float()]
    if final is not None:
        parts.append(final[tokens].float()[:, None])
    return torch.cat(parts, dim=1)
