"""An OpenAI-compatible server as a generation engine: many requests in flight, ids in the answers.

Prompts in, response ids [r] out, in the order in which they finish. Guarantee: what can pass
(connection lost, server busy) is retried; what is wrong with one prompt (status 400) discards that
prompt; what is wrong with the set-up (wrong address, no token ids in the answer) stops with one
sentence, after every answer that still arrives has been handed on. Cost: ``concurrency`` threads.
"""

import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import httpx
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential_jitter,
)

from .config import RegenerateConfig
from .errors import DataError
from .generation import Generation, Prompt, discard

# A response may take minutes; a connection may not.
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_ATTEMPTS = 6
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_BAD_PROMPT = frozenset({400, 413, 422})


class _Busy(Exception):
    """The server cannot answer now."""


def generate_on_server(
    prompts: Iterable[Prompt], config: RegenerateConfig, template_kwargs: dict[str, Any]
) -> Iterator[Generation]:
    """Answer prompts through ``POST {server_url}/chat/completions``.

    Args:
        prompts: read as requests become free.
        config: address, model name, concurrency, length limit, temperature.
        template_kwargs: variables for the server's chat template.

    Raises:
        DataError: the server stopped answering, refused the request as such, or does not return
            token ids.
    """
    stop = threading.Event()
    limits = httpx.Limits(max_connections=config.concurrency)
    with (
        httpx.Client(timeout=_TIMEOUT, limits=limits) as client,
        ThreadPoolExecutor(config.concurrency) as pool,
    ):
        request = _Request(client, config, template_kwargs, stop)
        queue = iter(prompts)
        pending: set[Future[Generation]] = set()
        failure: BaseException | None = None
        try:
            while True:
                if failure is None:
                    free = config.concurrency - len(pending)
                    pending |= {pool.submit(request, prompt) for prompt in islice(queue, free)}
                if not pending:
                    break
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    if error := future.exception():
                        failure = failure or error
                        stop.set()
                    else:
                        yield future.result()
        finally:
            stop.set()
    if failure is not None:
        raise failure


class _Request:
    """One request with retries; called from worker threads."""

    def __init__(
        self,
        client: httpx.Client,
        config: RegenerateConfig,
        template_kwargs: dict[str, Any],
        stop: threading.Event,
    ) -> None:
        self._client = client
        self._url = f"{str(config.server_url).rstrip('/')}/chat/completions"
        self._body: dict[str, Any] = {
            "model": config.server_model,
            "temperature": config.temperature,
            "max_tokens": config.max_new_tokens,
            "return_token_ids": True,
        }
        if config.temperature > 0:
            # The target's own distribution, whatever defaults the server took from the model.
            self._body |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        self._body["repetition_penalty"] = 1.0
        if template_kwargs:
            self._body["chat_template_kwargs"] = template_kwargs
        self._stop = stop

    def __call__(self, prompt: Prompt) -> Generation:
        retrying = Retrying(
            retry=retry_if_exception_type((httpx.TransportError, _Busy)),
            stop=stop_after_attempt(_ATTEMPTS) | stop_when_event_set(self._stop),
            wait=wait_exponential_jitter(
                initial=_FIRST_WAIT_SECONDS, max=_LONGEST_WAIT_SECONDS, jitter=_FIRST_WAIT_SECONDS
            ),
            sleep=self._pause,
            reraise=True,
        )
        try:
            return retrying(self._once, prompt)
        except (httpx.TransportError, _Busy) as exc:
            raise DataError(
                f"{self._url} does not answer ({type(exc).__name__}: {exc}): check the server, "
                "then run the same command again; finished responses are kept"
            ) from exc

    def _pause(self, seconds: float) -> None:
        """Sleep, but wake up at once when another request has failed for good."""
        self._stop.wait(seconds)

    def _once(self, prompt: Prompt) -> Generation:
        body = {**self._body, "messages": _wire_messages(prompt)}
        if prompt.tools:
            body["tools"] = prompt.tools
        reply = self._client.post(self._url, json=body)
        if reply.status_code in _BUSY:
            raise _Busy(f"status {reply.status_code}: {reply.text[:200]}")
        if reply.status_code in _BAD_PROMPT:
            return discard(prompt, f"rejected_by_server: {reply.text[:200]}")
        if reply.status_code != httpx.codes.OK:
            raise DataError(
                f"{self._url} answered with status {reply.status_code}: {reply.text[:200]}; check "
                "server_url and server_model"
            )
        return self._parse(prompt, reply)

    def _parse(self, prompt: Prompt, reply: httpx.Response) -> Generation:
        try:
            answer = reply.json()
            prompt_ids = answer["prompt_token_ids"]
            response_ids = answer["choices"][0]["token_ids"]
        except (ValueError, LookupError, TypeError):
            prompt_ids = response_ids = None
        if not isinstance(prompt_ids, list) or not isinstance(response_ids, list):
            raise DataError(
                f"{self._url} returned no token ids ({reply.text[:120]}): the server must support "
                "return_token_ids (vLLM does), because text alone does not give the ids back"
            )
        return Generation(prompt, prompt_ids, response_ids)


def _wire_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Messages as the API has them: tool-call arguments are JSON text there."""
    return [_wire_message(message) for message in prompt.messages]


def _wire_message(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({"id": f"call-{number}", **call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}
