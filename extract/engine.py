"""Target forwards for extraction: samples' ids -> taps and final hidden state of each sample.

The states come as the store's codec keeps them, encoded on the target's device. Samples fill rows
of at most ``batch_tokens`` tokens, one after another, without padding (``packing``); targets that
cannot be run so get right-padded batches of as many padded tokens.
Guarantee: row t of a sample belongs to its token t, nothing is shifted; samples do not see each
other. The batches depend only on the samples and ``batch_tokens``, so a repeated shard gives the
same bytes. Cost: one forward without LM head and without cache, not past the last tapped layer if
the final state is not wanted; on CUDA states leave over a stream of their own into pinned memory
while the next forward runs.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafttrain.data.codec import CODECS, Encoded

from .packing import packed, run_plain, run_row
from .rows import Row
from .taps import ForwardStopped, TapRecorder
from .target import Target

# Forwards on their way on CUDA while an earlier one is consumed: the device has work when a short
# row, a new shard or a busy writer holds up the thread that launches. ``pipeline.SHARDS`` is one
# more: as many shards can be unfinished when the next one begins.
_AHEAD = 2
_PADDING_ID = 0  # never read: no earlier token can see it

Ids = npt.NDArray[np.int32]


def plan_rows(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Fill rows: longest sample first, each into the first row with room.

    Args:
        lengths: tokens per sample.
        batch_tokens: tokens a row may have; a longer sample is a row of its own.

    Returns:
        Sample numbers of each row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((k for k, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            rows.append([i])
            room.append(batch_tokens - lengths[i])
        else:
            rows[place].append(i)
            room[place] -= lengths[i]
    return rows


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group samples for right padding, longest first.

    Args:
        lengths: tokens per sample.
        batch_tokens: padded tokens a batch may have; a longer sample is a batch of its own.

    Returns:
        Sample numbers of each batch.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class Features(NamedTuple):
    """The states of one sample as the codec keeps them."""

    group: int
    """Which group of samples it belongs to, counted from 0."""
    number: int
    """Its place there."""
    taps: Encoded
    """[n, n_taps, hidden]"""
    final: Encoded | None
    """[n, hidden] after the final norm, if wanted."""


class _Launched(NamedTuple):
    """A forward whose states are on their way to the host."""

    group: int
    batch: list[int]
    lengths: list[int]
    spans: list[slice] | None
    """Of the samples in the row; None in a padded batch."""
    taps: Encoded
    final: Encoded | None
    arrived: torch.cuda.Event | None


class Engine:
    """A target prepared for extraction; use as a context manager, one at a time.

    Args:
        target: the frozen target.
        taps: ascending layer ids.
        codec: how the states are kept.
        final_hidden: also give the final hidden state.
        to_host: give them on the CPU; else they stay on the target's device.
    """

    def __init__(
        self,
        target: Target,
        taps: Sequence[int],
        codec: str,
        final_hidden: bool = True,
        to_host: bool = True,
    ) -> None:
        self._target, self._codecs = target, CODECS[codec]
        self._recorder = TapRecorder(target.layers, taps, stop=not final_hidden)
        self._open = ExitStack()
        self._rows = False
        leaves = to_host and target.device.type == "cuda"
        self._leaving = torch.cuda.Stream(target.device) if leaves else None

    def __enter__(self) -> "Engine":
        self._rows = self._open.enter_context(packed(self._target))
        self._open.enter_context(self._recorder)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def features(self, groups: Iterable[Sequence[Ids]], batch_tokens: int) -> Iterator[Features]:
        """Run the target over groups of samples; no batch holds samples of two groups.

        Args:
            groups: token ids int32 ``[n_i]`` of each sample of each group; a group is asked for
                when the last batch of the one before has been launched.
            batch_tokens: tokens per forward, padding included.

        Yields:
            The states of each sample, in the order of the batches. On CUDA the next ``_AHEAD``
            batches run while one is consumed, so that many more are in memory.
        """
        plan = plan_rows if self._rows else plan_batches
        ahead = 0 if self._leaving is None else _AHEAD
        waiting: deque[_Launched] = deque()
        for group, samples in enumerate(groups):
            for batch in plan([len(ids) for ids in samples], batch_tokens):
                samples_of = [samples[i] for i in batch]
                waiting.append(self._launch(group, batch, samples_of, batch_tokens))
                if len(waiting) > ahead:
                    yield from self._arrived(waiting.popleft())
        while waiting:
            yield from self._arrived(waiting.popleft())

    @torch.inference_mode()
    def _launch(
        self, group: int, batch: list[int], samples: Sequence[Ids], batch_tokens: int
    ) -> _Launched:
        target, spans, final = self._target, None, None
        lengths = [len(ids) for ids in samples]
        with suppress(ForwardStopped):
            if self._rows:
                row = Row.of(lengths, target.device)
                spans = row.spans
                ids = torch.from_numpy(np.concatenate(samples).astype(np.int64))
                final = run_row(target, ids.to(target.device, non_blocking=True), row)[None]
            else:
                ids = torch.full((len(batch), max(lengths)), _PADDING_ID, dtype=torch.int64)
                for place, sample in enumerate(samples):
                    ids[place, : len(sample)] = torch.from_numpy(sample.astype(np.int64))
                final = run_plain(target, ids.to(target.device, non_blocking=True))
        kept = self._codecs["taps"].encoded(self._recorder.collect().to(target.device))
        kept_final = None if final is None else self._codecs["final"].encoded(final)
        leaving = self._leaving
        if leaving is None:
            return _Launched(group, batch, lengths, spans, kept, kept_final, None)
        leaving.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(leaving):
            kept = kept.map(lambda part: _to_host(part, leaving, batch_tokens))
            if kept_final is not None:
                kept_final = kept_final.map(lambda part: _to_host(part, leaving, batch_tokens))
            arrived = torch.cuda.Event()
            arrived.record(leaving)
        return _Launched(group, batch, lengths, spans, kept, kept_final, arrived)

    @staticmethod
    def _arrived(launched: _Launched) -> Iterator[Features]:
        """Wait for a batch and cut it into samples."""
        if launched.arrived is not None:
            launched.arrived.synchronize()
        for place, i in enumerate(launched.batch):
            if launched.spans is None:
                where: tuple[int, slice] = (place, slice(0, launched.lengths[place]))
            else:
                where = (0, launched.spans[place])
            final = None if launched.final is None else launched.final.at(where)
            yield Features(launched.group, i, launched.taps.at(where), final)


def _to_host(states: Tensor, stream: torch.cuda.Stream, batch_tokens: int) -> Tensor:
    """Start copying ``[batch, tokens, ...]`` into pinned memory.

    The host allocator hands freed blocks out again where they fit; pinning a new one takes half a
    second a gigabyte. So all batches ask for as much as the largest one needs.
    """
    tokens = states.shape[0] * states.shape[1]
    room = states.numel() // tokens * max(tokens, batch_tokens)
    host = torch.empty(room, dtype=states.dtype, pin_memory=True)[: states.numel()]
    host = host.view(states.shape)
    host.copy_(states, non_blocking=True)
    states.record_stream(stream)
    return host
