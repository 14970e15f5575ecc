"""Runs extractions in forked children, so that a test of many kills imports torch once.

Reads JSON lines from stdin: ``{"start": {options of run}}`` forks a child that extracts, and is
answered by its process id; ``{"wait": pid}`` by the child's wait status, or HUNG if it had to be
killed. With an argument, does one such run in a fresh process instead.
"""

import functools
import importlib
import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from drafttrain.data.errors import DraftTrainError
from drafttrain.extract.config import ExtractConfig, TargetConfig
from drafttrain.extract.target import Target, load_target
from drafttrain.extract.worker import Share, extract, extract_share

CONFIG = ExtractConfig(taps=[1, 3], codec="fp32", shard_tokens=60, batch_tokens=64)
REFUSED, CRASHED, HUNG = 2, 1, -1
_PATIENCE_S = 120


@functools.cache
def _target(path: str) -> Target:
    return load_target(TargetConfig(path=path, dtype="float32", device="cpu"))


def run(
    target: str,
    table: str,
    out: str,
    *,
    at: float = 0,
    expiry_s: float = 120,
    share: tuple[int, int] | None = None,
    file_bytes: int | None = None,
    server_url: str | None = None,
) -> None:
    """Extract.

    Args:
        target: its folder.
        table: the sample table.
        out: the store.
        at: begin at this moment of the clock, so that several workers begin together.
        expiry_s: of claims.
        share: worker and number of workers of a static split.
        file_bytes: largest file that the system lets this process write.
        server_url: let this server compute the states.
    """
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    config = CONFIG.model_copy(update={"claim_expiry_s": expiry_s})
    if server_url is not None:
        config = config.model_copy(update={"engine": "vllm", "server_url": server_url})
    loaded = _target(target)
    time.sleep(max(0.0, at - time.time()))
    if share is None:
        extract(loaded, config, Path(table), Path(out))
    else:
        extract_share(loaded, config, Path(table), Path(out), Share(*share))


def _child(options: dict[str, str]) -> int:
    errors = options.pop("errors")
    try:
        run(**options)
    except BaseException as exc:
        Path(errors).write_text(f"{type(exc).__name__}: {exc}")
        return REFUSED if isinstance(exc, DraftTrainError) else CRASHED
    return 0


def _wait(child: int) -> int:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.003)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


def main() -> None:
    logging.disable()
    torch.set_num_threads(1)
    importlib.import_module("transformers.models.llama.modeling_llama")  # else lazily, per child
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(_wait(request["wait"]), flush=True)
            continue
        _target(request["start"]["target"])  # loaded once, inherited by all
        child = os.fork()
        if child == 0:
            os._exit(_child(request["start"]))
        print(child, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(**json.loads(sys.argv[1]))
    else:
        main()
