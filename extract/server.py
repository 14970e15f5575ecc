"""An inference server that computes hidden states: token ids -> raw states, through a spool folder.

The server answers ``POST {url}/completions`` with the path of a safetensors file that holds
``token_ids [n]`` and ``hidden_states [n, layers, hidden]``; its file ``<path>.lock`` is locked
until the states are written whole. The folder must be at the same path on this machine.

Guarantee: states are handed out only if the file was written for this very request and holds its
ids and one row for each, so neither a reused prefix, nor a missing last row, nor another request's
states get in. Files are removed when read, and what dead workers or an interrupted request left is
swept. What can pass (connection lost, server restarting) is retried for ``_PATIENCE_S``. Cost: one
file written and read a sample.
"""

import fcntl
import itertools
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential_jitter,
)
from torch import Tensor

from drafttrain.data.errors import StoreError

from .owners import OWNER, has_ended

REQUESTS = 64  # at a time at most
_PATIENCE_S = 600.0  # a server takes minutes to load a large target
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_OURS = re.compile(rf"drafttrain-({OWNER})-\d+")
_LEFT_S = 3600.0  # a file is read within seconds; of another machine's worker only its age tells
_LOGGER = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]


class _Passing(Exception):
    """The server cannot answer now, or died over this request."""


class Reply(NamedTuple):
    """What the server computed for one sample."""

    states: Tensor
    """``[n, layers, hidden]``"""
    layers: list[int] | None
    """Auxiliary layer ids of the states, where the server tells them."""
    interrupted: bool
    """The request had to be repeated: the server may be another one now."""


class StateServer:
    """A server's address, asked from many threads; use as a context manager.

    Args:
        url: of its OpenAI-compatible interface, with ``/v1``.
        owner: name of this worker; its files carry it.
    """

    def __init__(self, url: str, owner: str) -> None:
        self._url, self._owner = url.rstrip("/"), owner
        self._numbers = itertools.count()
        self._stop, self._once = threading.Event(), threading.Lock()
        self._model: str | None = None
        self._spool: Path | None = None
        self._told = False

    def __enter__(self) -> "StateServer":
        limits = httpx.Limits(max_connections=REQUESTS)
        self._client = httpx.Client(timeout=_TIMEOUT, limits=limits)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._client.close()
        if self._spool is not None:
            self._sweep(self._spool)

    def stop(self) -> None:
        """Let no request be repeated any more."""
        self._stop.set()

    def states(self, ids: Ids) -> Reply:
        """Have one sample computed.

        Args:
            ids: int32 ``[n]``.

        Raises:
            StoreError: the server does not answer, refuses, or gives other than what was asked for.
        """
        attempts = itertools.count()
        retrying = Retrying(
            retry=retry_if_exception_type((httpx.TransportError, _Passing)),
            stop=stop_after_delay(_PATIENCE_S) | stop_when_event_set(self._stop),
            wait=wait_exponential_jitter(
                initial=_FIRST_WAIT_S, max=_LONGEST_WAIT_S, jitter=_FIRST_WAIT_S
            ),
            sleep=self._pause,
            before_sleep=self._say,
            reraise=True,
        )
        try:
            return retrying(self._ask, ids, attempts)
        except (httpx.TransportError, _Passing) as exc:
            raise StoreError(
                f"{self._url} does not answer ({type(exc).__name__}: {exc}): start the server"
                " again, then rerun the same command; sealed shards are kept"
            ) from exc

    def _pause(self, seconds: float) -> None:
        """Sleep, but wake up at once when another request has failed for good."""
        self._stop.wait(seconds)

    def _say(self, state: RetryCallState) -> None:
        if not self._told and state.outcome is not None:
            self._told = True  # once an outage, not once a request
            _LOGGER.warning("%s: %s; trying again", self._url, state.outcome.exception())

    def _ask(self, ids: Ids, attempts: "itertools.count[int]") -> Reply:
        interrupted = next(attempts) > 0
        # A file of its own for each attempt: a dead server's may still be written.
        name = f"drafttrain-{self._owner}-{next(self._numbers)}"
        body = {
            "model": self._served_model(),
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
        }
        answer = self._call("POST", "completions", json=body, headers={"X-Request-Id": name})
        params = answer.get("kv_transfer_params") or {}
        path = params.get("hidden_states_path")
        if not isinstance(path, str):
            raise StoreError(
                f"{self._url} computes no hidden states (no hidden_states_path in its answer):"
                " start it with the speculative method extract_hidden_states and a connector that"
                " stores them (docs/formats.md, A second engine)"
            )
        if name not in Path(path).name:
            raise StoreError(
                f"{self._url}: {path} is not a file of request {name}: the server must name files"
                " after the request (X-Request-Id)"
            )
        states = self._read(Path(path), ids)
        self._told = False
        return Reply(states, params.get("layer_ids"), interrupted)

    def _served_model(self) -> str:
        with self._once:
            if self._model is None:
                served = self._call("GET", "models")
                try:
                    self._model = str(served["data"][0]["id"])
                except (LookupError, TypeError):
                    raise StoreError(
                        f"{self._url}/models names no model ({str(served)[:200]}): check that"
                        " extract.server_url is an OpenAI-compatible server's, with /v1"
                    ) from None
            return self._model

    def _call(self, method: str, route: str, **what: Any) -> dict[str, Any]:
        reply = self._client.request(method, f"{self._url}/{route}", **what)
        if reply.status_code in _BUSY:
            raise _Passing(f"status {reply.status_code}: {reply.text[:200]}")
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        if reply.status_code != httpx.codes.OK or not isinstance(answer, dict):
            raise StoreError(
                f"{self._url}/{route} answered with status {reply.status_code}:"
                f" {reply.text[:300]}; check extract.server_url, and that the server's longest"
                " context (--max-model-len) is more than the longest sample"
            )
        return answer

    def _read(self, path: Path, ids: Ids) -> Tensor:
        """Wait until a file is whole, read, check and remove it."""
        lock = Path(f"{path}.lock")
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                found = load_file(path)
        except FileNotFoundError as exc:
            if lock.exists():  # the server died between its answer and the file
                raise _Passing(f"{path} was never written") from exc
            raise StoreError(
                f"{exc.filename} does not exist: the server's shared_storage_path must be a folder"
                " of this machine too, under the same path, and its use_synchronization_lock on"
            ) from exc
        except SafetensorError as exc:
            raise _Passing(f"{path} is cut short ({exc})") from exc
        finally:
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            self._found(path.parent)
        return _checked(found, ids, path)

    def _found(self, spool: Path) -> None:
        """The spool folder is known from the first answer on; remove what dead workers left."""
        with self._once:
            if self._spool is None:
                self._spool = spool
                self._sweep(spool)

    def _sweep(self, spool: Path) -> None:
        """Remove files of dead workers, and when this one ends its own."""
        for path in spool.glob("*drafttrain-*"):
            match = _OURS.search(path.name)
            if match is None:
                continue
            owner = match.group(1)
            ours = owner == self._owner and self._stop.is_set()
            if ours or has_ended(owner) or _age(path) > _LEFT_S:
                path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _checked(found: dict[str, Tensor], ids: Ids, path: Path) -> Tensor:
    tokens, states = found.get("token_ids"), found.get("hidden_states")
    if tokens is None or states is None or states.dim() != 3:
        raise StoreError(
            f"{path}: holds {sorted(found)}, not token_ids [n] and hidden_states [n, layers, width]"
        )
    if not torch.equal(tokens.long(), torch.from_numpy(ids.astype(np.int64))):
        raise StoreError(
            f"{path}: the server computed {len(tokens)} other token ids than the {len(ids)} it was"
            " given (another request's rows?): serve the target alone, without a drafter"
        )
    if len(states) != len(ids):
        raise StoreError(
            f"{path}: {len(states)} rows of states for {len(ids)} tokens: switch prefix caching off"
            " (--no-enable-prefix-caching) and serve without a drafter"
        )
    return states
