"""A real HTTP server on this machine that computes hidden states as vLLM does, in files."""

import fcntl
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.extract.taps import TapRecorder
from drafttrain.extract.target import Target

Files = dict[str, Tensor]


class StatesServer:
    """Context manager; serves a target's states by vLLM's layer ids and file protocol.

    Layer id 0 is the embedding, id L + 1 the output of layer L before any norm. As in vLLM the
    answer leaves before the file is written, which a lock file tells.

    Args:
        target: of its own, because recording is not for two threads.
        layers: auxiliary layer ids, in the order of the states.
        spool: folder of the files.
        change: what is wrong with a file's ``token_ids`` and ``hidden_states``.
        tells_layers: whether answers say which layers they are of.
    """

    def __init__(
        self,
        target: Target,
        layers: list[int],
        spool: Path,
        change: Callable[[Files], Files] = lambda files: files,
        tells_layers: bool = False,
    ) -> None:
        self.layers, self.change, self.tells_layers = layers, change, tells_layers
        self.requests: list[list[int]] = []
        self.most_tokens = 0
        self.drop: Callable[[int], bool] = lambda number: False
        """Whether to drop a request's connection, by its number from 0."""
        self.spoil: Callable[[int], str] = lambda number: ""
        """ "lost": the file is never written; "short": it is cut; "silent": there is no answer."""
        self.latency = 0.0
        self.answers: Callable[[Path], dict[str, Any]] = self._params
        """``kv_transfer_params`` of an answer."""
        self._target, self._spool = target, spool
        self._all = TapRecorder(target.layers, range(target.num_layers))
        self._lock = threading.Lock()
        self._underway = 0
        spool.mkdir(parents=True, exist_ok=True)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "StatesServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @torch.inference_mode()
    def _compute(self, ids: list[int]) -> Files:
        tokens = torch.tensor(ids)
        with self._lock, self._all:
            self._target.decoder(input_ids=tokens[None], use_cache=False)
            outputs = self._all.collect()[0]
        states = torch.cat([self._target.embed(tokens)[:, None], outputs], dim=1)
        return self.change({"token_ids": tokens, "hidden_states": states[:, self.layers]})

    def _done(self, ids: list[int]) -> None:
        with self._lock:
            self._underway -= len(ids)

    def _params(self, path: Path) -> dict[str, Any]:
        params: dict[str, Any] = {"hidden_states_path": str(path)}
        if self.tells_layers:
            params["layer_ids"] = self.layers
        return params

    def _answer(self, path: Path) -> dict[str, Any]:
        return {"choices": [{"text": ""}], "kv_transfer_params": self.answers(path)}

    def _handler(outer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self._send({"data": [{"id": "served"}]})
                else:
                    self._send({"detail": "not found"}, 404 if "v2" in self.path else 200)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (self.path, body["model"]) == ("/v1/completions", "served")
                ids = body["prompt"]
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append(ids)
                    outer._underway += len(ids)
                    outer.most_tokens = max(outer.most_tokens, outer._underway)
                if outer.drop(number):
                    self.close_connection = True
                    outer._done(ids)
                    return
                self._store(number, ids)

            def _store(self, number: int, ids: list[int]) -> None:
                name = f"cmpl-{self.headers['X-Request-Id']}-0-{number:08x}.safetensors"
                path, spoil = outer._spool / name, outer.spoil(number)
                with Path(f"{path}.lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    time.sleep(outer.latency)
                    if spoil == "silent":
                        self.close_connection = True
                    else:
                        with suppress(ConnectionError):  # of a client that was killed
                            self._send(outer._answer(path))
                    if spoil == "lost":
                        outer._done(ids)
                        return
                    save_file({k: v.contiguous() for k, v in outer._compute(ids).items()}, path)
                    if spoil == "short":
                        path.write_bytes(path.read_bytes()[:-100])
                    outer._done(ids)  # before the client can know

            def _send(self, reply: dict[str, Any], status: int = 200) -> None:
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
