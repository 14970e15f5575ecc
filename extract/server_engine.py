"""A second engine: samples' ids -> taps and final hidden state, computed by an inference server.

It gives what ``engine.Engine`` gives, and keeps that engine beside it as the judge: the shortest
sample of every group, and every sample whose request had to be repeated (the server may have been
started anew, with other settings), goes through the target here too and must agree
(``parity``). The server's auxiliary layer L + 1 is tap L; its layer ``num_layers`` is the state
before the final norm, to which the target's own norm is applied. Guarantee: row t of a sample
belongs to its token t, or the sample is refused. Bytes are the server's: they equal Transformers'
within rounding, and may differ from run to run as its batches do. Cost: at most ``batch_tokens``
tokens on their way, in the spool folder and in memory, or one sample.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.data.codec import CODECS
from drafttrain.data.errors import StoreError
from drafttrain.data.store_format import StoreMeta

from .config import ExtractConfig
from .engine import Engine, Features, Ids
from .parity import refuse_disagreement
from .server import REQUESTS, Reply, StateServer
from .target import Target


class _Asked(NamedTuple):
    """A sample on its way."""

    group: int
    number: int
    ids: Ids
    judged: bool
    reply: "Future[Reply]"


class ServerEngine:
    """A server prepared for extraction; use as a context manager, one at a time.

    The server is first asked when states are wanted: a run that finds all shards sealed needs none.

    Args:
        target: the frozen target, which judges.
        meta: the store's settings.
        config: names the server.
        owner: of this worker.
    """

    def __init__(self, target: Target, meta: StoreMeta, config: ExtractConfig, owner: str) -> None:
        assert config.server_url is not None  # the recipe says so
        self._target, self._meta = target, meta
        self._layers = [layer + 1 for layer in meta.taps]
        self._layers += [target.num_layers] if meta.final_hidden else []
        self._url = config.server_url
        self._server = StateServer(config.server_url, owner)
        # Exact, so that a broken codec cannot agree with itself.
        self._judge = Engine(target, meta.taps, "fp32", meta.final_hidden)
        self._open = ExitStack()

    def __enter__(self) -> "ServerEngine":
        self._open.enter_context(self._judge)
        self._open.enter_context(self._server)
        self._pool = ThreadPoolExecutor(REQUESTS)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()
        self._pool.shutdown(cancel_futures=True)
        self._open.close()

    def features(self, groups: Iterable[Sequence[Ids]], batch_tokens: int) -> Iterator[Features]:
        """Have groups of samples computed; arguments and results as ``Engine.features``.

        Args:
            groups: token ids of each sample of each group; at most two groups are on their way when
                another is asked for.
            batch_tokens: tokens that may be on their way; a longer sample goes alone.

        Raises:
            StoreError: the server does not answer, or disagrees with the target.
        """
        asked: deque[_Asked] = deque()
        underway = 0
        for group, samples in enumerate(groups):
            judged = min(range(len(samples)), key=lambda i: len(samples[i]))
            for number, ids in enumerate(samples):
                while asked and underway + len(ids) > batch_tokens:
                    underway -= len(asked[0].ids)
                    yield self._arrived(asked.popleft())
                reply = self._pool.submit(self._server.states, ids)
                underway += len(ids)
                asked.append(_Asked(group, number, ids, number == judged, reply))
            while asked and asked[0].group < group:
                underway -= len(asked[0].ids)
                yield self._arrived(asked.popleft())
        while asked:
            yield self._arrived(asked.popleft())

    def both(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """One sample through the server and through the target.

        Args:
            ids: int32 ``[n]``.

        Returns:
            States float32 ``[n, columns, hidden]`` of either: taps, then the final hidden state.
        """
        return self._columns(self._server.states(ids)), self._reference(ids)

    def _arrived(self, asked: _Asked) -> Features:
        reply = asked.reply.result()
        states = self._columns(reply)
        if asked.judged or reply.interrupted:
            what = f"sample {asked.number} of a shard ({len(asked.ids)} tokens)"
            refuse_disagreement(self._meta, what, states, self._reference(asked.ids))
        taps = len(self._meta.taps)
        kept = {
            "taps": states[:, :taps],
            "final": states[:, taps] if self._meta.final_hidden else None,
        }
        codecs = CODECS[self._meta.codec]
        encoded = {k: None if v is None else codecs[k].encoded(v) for k, v in kept.items()}
        assert encoded["taps"] is not None
        return Features(asked.group, asked.number, encoded["taps"], encoded["final"])

    def _reference(self, ids: Ids) -> Tensor:
        (found,) = self._judge.features([[ids]], batch_tokens=1)
        parts = [found.taps.decode()]
        if found.final is not None:
            parts.append(found.final.decode()[:, None])
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def _columns(self, reply: Reply) -> Tensor:
        """The states that the store keeps: ``[n, layers, hidden]`` -> ``[n, columns, hidden]``."""
        states, layers = reply.states, reply.layers
        if layers is None:  # the server does not say which they are: the judge will
            layers = self._layers if states.shape[1] == len(self._layers) else []
        hidden, dtype = self._target.hidden_size, self._target.dtype
        missing = [layer for layer in self._layers if layer not in layers]
        if missing or states.shape[1:] != (len(layers), hidden) or states.dtype != dtype:
            raise StoreError(
                f"{self._url} gives {states.dtype} states of {states.shape[1]} layers"
                f" {layers or ''} and width {states.shape[2]}; start it with --dtype"
                f" {str(dtype).removeprefix('torch.')}, the model {self._target.name} (width"
                f" {hidden}) and eagle_aux_hidden_state_layer_ids {self._layers} (tap L is its"
                " layer L + 1)"
            )
        taken = states[:, [layers.index(layer) for layer in self._layers]]
        if not self._meta.final_hidden:
            return taken.float()
        final = self._target.norm(taken[:, -1:].to(self._target.device)).to(taken.device)
        return torch.cat([taken[:, :-1], final], dim=1).float()
