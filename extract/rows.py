"""Samples one after another in one row of tokens, and attention that keeps them apart.

    Row.of([n_1, n_2, ..]) -> spans of the samples, positions restarting in each, ends for kernels
    attend_row             -> an attention function for Transformers: every sample attends to itself

No token of a row is padding. The row of the forward that is running is set by ``using``. Cost: one
attention call per sample and layer, each on its own tokens; nothing quadratic in the row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION_NAME = "drafttrain_row"
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# cuDNN takes half the time, but plans every new length anew: it gets multiples of a step only.
_LENGTH_STEP = 128
_STEPPED_KERNELS = [SDPBackend.CUDNN_ATTENTION, *_KERNELS]
# Extra arguments of attention functions that change what is computed and are not implemented.
_CHANGING = ("softcap", "s_aux", "attention_sink", "head_mask")


@dataclass(frozen=True, slots=True)
class Row:
    """Where the samples of a row stand.

    Attributes:
        spans: the tokens of each sample.
        positions: int64 [t], the place of each token in its sample.
        ends: int64 [samples + 1], 0 and the end of each sample.
    """

    spans: list[slice]
    positions: Tensor
    ends: Tensor
    _elsewhere: dict[torch.device, "Row"] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Row":
        """The row of samples with these lengths."""
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
        return cls(
            [slice(int(a), int(b)) for a, b in pairwise(ends)],
            torch.from_numpy(positions).to(device, non_blocking=True),
            torch.from_numpy(ends).to(device, non_blocking=True),
        )

    def on(self, device: torch.device) -> "Row":
        """The row on the device of a layer; copied once, as kernels recognise ``ends`` again."""
        if device == self.positions.device:
            return self
        if device not in self._elsewhere:
            parts = (self.positions.to(device), self.ends.to(device))
            self._elsewhere[device] = Row(self.spans, *parts)
        return self._elsewhere[device]


_CURRENT: ContextVar[Row] = ContextVar("row")


@contextmanager
def using(row: Row) -> Iterator[None]:
    """Forwards in the body run over this row."""
    token = _CURRENT.set(row)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_row() -> Row:
    """The row of the forward that is running."""
    return _CURRENT.get()


def attend_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of the current row.

    Args:
        module: the attention layer.
        query: [1, H, t, D].
        key: [1, H_kv, t, D].
        value: [1, H_kv, t, D_v].
        attention_mask: none is made for this function.
        scaling: of the scores.
        sliding_window: tokens a token sees, itself included.
        others: what other attention functions take.

    Returns:
        Output [1, t, H, D_v] and no weights.
    """
    for name in _CHANGING:
        if others.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    parts = []
    for span in current_row().spans:
        length = span.stop - span.start
        mask, stop, kernels = None, span.stop, _KERNELS
        stepped = span.start - (-length // _LENGTH_STEP) * _LENGTH_STEP
        if sliding_window is not None and length > sliding_window:
            place = torch.arange(length, device=query.device)
            behind = place[:, None] - place
            mask = (behind >= 0) & (behind < sliding_window)
        elif query.is_cuda and stepped <= query.shape[2]:
            # What follows the sample is others' and seen by none of its tokens.
            stop, kernels = stepped, _STEPPED_KERNELS
        # Taken out of the batch and put back: their strides, by which plans are kept too, do not
        # depend on the row then.
        q, k, v = (x[0, :, span.start : stop][None] for x in (query, key, value))
        with sdpa_kernel(kernels, set_priority=True):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        parts.append(out.transpose(1, 2)[:, :length])
    return torch.cat(parts, dim=1), None
