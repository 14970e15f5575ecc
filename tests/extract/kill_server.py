"""Runs extractions in forked children, so that a kill test need not import torch each time.

Reads lines ``<target> <table> <out>`` from stdin; for each forks a child that loads the target and
extracts, and answers with the child's process id, then (when it has ended) its exit status.
"""

import importlib
import os
import sys
from pathlib import Path

import torch

from drafttrain.extract.config import ExtractConfig, TargetConfig
from drafttrain.extract.target import load_target
from drafttrain.extract.worker import extract

CONFIG = ExtractConfig(taps=[1, 3], codec="fp32", shard_tokens=60, batch_tokens=64)


def run(target: str, table: str, out: str) -> None:
    extract(
        load_target(TargetConfig(path=target, dtype="float32", device="cpu")),
        CONFIG,
        Path(table),
        Path(out),
    )


def main() -> None:
    torch.set_num_threads(1)
    importlib.import_module("transformers.models.llama.modeling_llama")  # else lazily, per child
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                run(*line.split())
            except BaseException:
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(*sys.argv[1:])
    else:
        main()
