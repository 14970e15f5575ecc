"""Do two engines compute the same states? A few samples through both -> record, or refusal.

The samples are the table's shortest, longest and two between by length, and the longest once more:
a server that reuses prefixes answers it from its cache the second time. Guarantee: nothing of a
second engine is written before every token of these has agreed in every column. Cost: five requests
and as many forwards.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.errors import StoreError
from drafttrain.data.samples import SampleTable
from drafttrain.data.store_format import StoreMeta
from drafttrain.data.store_gate import columns
from drafttrain.data.store_parity import COSINE, ERROR, ColumnParity, ParityRecord
from drafttrain.data.stream import Stream

from .engine import Ids

_SPREAD = 4  # samples by length, the shortest and the longest among them
_LOGGER = logging.getLogger(__name__)


class Agreement(NamedTuple):
    """How two engines' states of the same tokens compare."""

    cosine: Tensor
    """``[n, columns]``"""
    error: Tensor
    """``[n, columns]``, L2 of the difference over L2 of the second."""


def agreement(states: Tensor, reference: Tensor) -> Agreement:
    """Compare rows ``[n, columns, hidden]`` in float32."""
    states, reference = states.float(), reference.float()
    cosine = torch.nn.functional.cosine_similarity(states, reference, dim=-1)
    error = (states - reference).norm(dim=-1) / reference.norm(dim=-1)
    return Agreement(cosine, error)


def refuse_disagreement(meta: StoreMeta, what: str, states: Tensor, reference: Tensor) -> Agreement:
    """Compare one sample's states with the target's.

    Args:
        meta: the store's settings.
        what: the sample, in words.
        states: float32 ``[n, columns, hidden]`` of the second engine.
        reference: the same of Transformers.

    Raises:
        StoreError: a token disagrees; names the worst column and token, and the likely cause.
    """
    found = agreement(states, reference)
    good = (found.cosine >= COSINE) & (found.error <= ERROR)  # false for NaN
    if good.all():
        return found
    bad = torch.where(good, torch.inf, found.cosine.nan_to_num(-1.0))
    token, column = divmod(int(bad.argmin()), bad.shape[1])
    raise StoreError(
        f"{what}: {columns(meta)[column]} of the second engine is not the target's: token {token}"
        f" has cosine {found.cosine[token, column]:.6f} and relative error"
        f" {found.error[token, column]:.2g} (at least {COSINE} and at most {ERROR} are asked for);"
        f" {_cause(meta, column, states, reference)}"
    )


def _cause(meta: StoreMeta, column: int, states: Tensor, reference: Tensor) -> str:
    """What the states look like instead."""
    for shift, words in ((1, "one position late"), (-1, "one position early")):
        cut = slice(max(shift, 0), len(states) + min(shift, 0))
        back = slice(max(-shift, 0), len(states) + min(-shift, 0))
        if len(states) > 2 and (agreement(states[cut], reference[back]).cosine >= COSINE).all():
            return f"the server's rows come {words}: row t must be token t"
    if column == len(meta.taps):
        return (
            "check that the server gives the state before the final norm (auxiliary layer"
            f" {meta.num_target_layers}, the number of layers), and that weights and dtype are the"
            " target's"
        )
    return (
        f"check that the server's eagle_aux_hidden_state_layer_ids are the taps {meta.taps} plus"
        " one (an id taken over unchanged is the layer before), that weights and dtype are the"
        " target's, and that prefix caching is off"
    )


def prove_parity(
    engine: str,
    both: Callable[[Ids], tuple[Tensor, Tensor]],
    meta: StoreMeta,
    table: SampleTable | Stream,
) -> ParityRecord:
    """Compare a second engine with the target on a few samples.

    Args:
        engine: its name.
        both: ids -> states float32 ``[n, columns, hidden]`` of the engine and of the target.
        meta: the store's settings.
        table: the samples.

    Returns:
        What to keep with the store.

    Raises:
        StoreError: they disagree; names sample, column, token and what to check.
    """
    order = np.argsort(table.lengths, kind="stable")
    spread = np.linspace(0, len(order) - 1, _SPREAD).round().astype(int)
    picked = list(dict.fromkeys(int(i) for i in order[spread]))
    found: list[Agreement] = []
    for place in [*picked, picked[-1]]:
        sample = table[place]
        what = f"sample {sample.sample_id} ({len(sample.input_ids)} tokens)"
        found.append(refuse_disagreement(meta, what, *both(sample.input_ids)))
    cosine = torch.cat([part.cosine for part in found])
    error = torch.cat([part.error for part in found])
    record = ParityRecord(
        engine=engine,
        store=meta.identity(),
        samples={table[i].sample_id: len(table[i].input_ids) for i in picked},
        columns={
            name: ColumnParity(
                min_cosine=float(cosine[:, i].min()),
                mean_cosine=float(cosine[:, i].mean()),
                max_error=float(error[:, i].max()),
            )
            for i, name in enumerate(columns(meta))
        },
    )
    for name, column in record.columns.items():
        _LOGGER.info(
            "parity of %s, %s: cosine at least %.6f, %.6f on average; relative error at most %.1e",
            engine,
            name,
            column.min_cosine,
            column.mean_cosine,
            column.max_error,
        )
    return record
