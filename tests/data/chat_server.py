"""A real HTTP server on this machine that answers chat completions with token ids."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, Any]]


class ChatServer:
    """Context manager; counts the requests per prompt text.

    Args:
        answer: from a request body to status and reply.
        latency: longest random delay of an answer, seconds.
        die_after: drop every connection after so many answers.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Answer],
        *,
        latency: float = 0.0,
        die_after: int | None = None,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._answer = answer
        self._latency = latency
        self._left = die_after
        self._lock = threading.Lock()
        self._open = 0
        self._random = random.Random(0)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "ChatServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: dict[str, Any]) -> float | None:
        """Count a request; None if the server is dead, else how long to wait."""
        with self._lock:
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    return None
            self.calls[body["messages"][-1]["content"]] += 1
            self.bodies.append(body)
            return self._random.random() * self._latency

    def _handler(outer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                try:
                    delay = outer._take(body)
                    if delay is None:
                        self.close_connection = True
                        return
                    time.sleep(delay)
                    found = self.path == "/v1/chat/completions"
                    status, reply = outer._answer(body) if found else (404, {"error": "no route"})
                finally:
                    with outer._lock:
                        outer._open -= 1
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
