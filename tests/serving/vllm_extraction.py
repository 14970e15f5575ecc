"""Are the hidden states that vLLM extracts the target's? The same samples through both engines.

In: a recipe (the quickstart's by default), its target folder, and the Python of an environment that
has vLLM (see README.md). The first samples of the recipe's training set are extracted by
Transformers, by a vLLM server, and half by each; then a server whose layer ids are one too low is
tried. Out: a table, ``result.json`` in the work folder, and the exit code: 0 when the three stores
agree and the wrong server is refused, 1 when not, 2 when it could not run.
Cost: two vLLM starts (about a minute each), two and a half extractions, no more memory than both.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch
from rich.console import Console
from rich.table import Table

from drafttrain.data.errors import DraftTrainError, StoreError, TargetError
from drafttrain.data.files import write_json
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_format import Shard
from drafttrain.data.store_gate import columns
from drafttrain.data.store_parity import COSINE, parity_path
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract.config import ExtractConfig
from drafttrain.extract.parity import agreement
from drafttrain.extract.server import Reply, StateServer
from drafttrain.extract.target import Target, load_target
from drafttrain.extract.worker import extract
from drafttrain.recipe import load_recipe
from drafttrain.stages import prepare

ROOT = Path(__file__).parents[2]
# Both are exact in float32 but for the order of sums, through 30 layers.
ALLOWED_ERROR = 1e-3
_START_S = 600.0


def server_command(args: argparse.Namespace, layers: list[int], port: int) -> list[str]:
    """How to start vLLM so that it stores the states of these auxiliary layers."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    transfer = {
        "kv_connector": "HiddenStates",
        "kv_connector_module_path": "drafttrain.extract.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(args.work.resolve() / "spool")},
    }
    command = [str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(args.target.resolve()), "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "16", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative)]
    return [*command, "--kv-transfer-config", json.dumps(transfer)]


@contextlib.contextmanager
def serving(args: argparse.Namespace, layers: list[int], name: str) -> Iterator[str]:
    """A vLLM server; gives its URL once it answers.

    Raises:
        TargetError: it ended or did not begin; the log named in the message says why.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log_path = args.work / f"{name}.log"
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = {**os.environ, **quiet, "VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": str(ROOT)}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            server_command(args, layers, port),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TargetError(f"vLLM did not start: read {log_path}")
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def timed(target: Target, config: ExtractConfig, table: Path, folder: Path) -> tuple[Any, float]:
    """Extract; the store, and tokens per second with everything that belongs to it."""
    began = time.perf_counter()
    store = extract(target, config, table, folder)
    return store, store.num_tokens / (time.perf_counter() - began)


def compare(store: FeatureStore, reference: FeatureStore) -> dict[str, dict[str, float]]:
    """Worst and mean cosine and worst relative error of every column, over all tokens."""
    found = []
    for i in range(len(reference)):
        pair = [_rows(each, i) for each in (store, reference)]
        found.append(agreement(*pair))
    cosine, error = (torch.cat([part[k] for part in found]) for k in range(2))
    return {
        name: {
            "min_cosine": float(cosine[:, i].min()),
            "mean_cosine": float(cosine[:, i].mean()),
            "max_error": float(error[:, i].max()),
        }
        for i, name in enumerate(columns(reference.meta))
    }


def _rows(store: FeatureStore, i: int) -> torch.Tensor:
    sample = store.sample(i)
    assert sample.final is not None
    return torch.cat([sample.taps.float(), sample.final.float()[:, None]], dim=1)


def mixed(
    target: Target, config: ExtractConfig, table: Path, ours: FeatureStore, folder: Path
) -> tuple[FeatureStore, dict[str, Any]]:
    """Every other shard of our store done again by vLLM: accepted, and only with its proof?"""
    shutil.copytree(ours.path, folder)
    for index in range(0, ours.meta.num_shards, 2):
        (folder / Shard.named(index).record).unlink()
    store = extract(target, config, table, folder)
    engines = [record.engine for record in verify_store(folder).whole.values()]
    proof = parity_path(folder, "vllm")
    proof.rename(proof.with_suffix(".away"))
    refusal = _refusal(lambda: FeatureStore(folder))
    proof.with_suffix(".away").rename(proof)
    return store, {
        "shards": {name: engines.count(name) for name in sorted(set(engines))},
        "refused_without_proof": refusal,
    }


def unnamed(states: Callable[..., Reply]) -> Callable[..., Reply]:
    """As vLLM's own connector answers, which does not say which layers it gives."""
    return lambda *given: states(*given)._replace(layers=None)


def _refusal(attempt: Any) -> str | None:
    try:
        attempt()
    except StoreError as exc:
        return str(exc)
    return None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All extractions and comparisons; ``failures`` says what does not agree."""
    recipe = load_recipe(
        args.recipe,
        (f"output={args.work}", f"target.path={args.target}", f"data.train.0.limit={args.limit}"),
    )
    prepare(recipe)
    table = recipe.table("train")
    target = load_target(recipe.target)
    changes = {"final_hidden": True, "codec": "fp32", "shard_tokens": 1024}
    plain = recipe.extract.model_copy(update=changes)
    ours, speed = timed(target, plain, table, args.work / "ours")
    layers = [*(tap + 1 for tap in ours.meta.taps), target.num_layers]
    result: dict[str, Any] = {"samples": len(ours), "tokens": ours.num_tokens, "layers": layers}
    result["tokens_per_second"] = {"transformers": speed}
    with serving(args, layers, "vllm") as url:
        config = plain.model_copy(update={"engine": "vllm", "server_url": url})
        theirs, result["tokens_per_second"]["vllm"] = timed(
            target, config, table, args.work / "theirs"
        )
        result["columns"] = compare(theirs, ours)
        store, result["mixed"] = mixed(target, config, table, ours, args.work / "mixed")
        result["mixed"]["columns"] = compare(store, ours)
    wrong = [*ours.meta.taps, target.num_layers]
    with serving(args, wrong, "wrong") as url:
        config = plain.model_copy(update={"engine": "vllm", "server_url": url})
        attempt = functools.partial(extract, target, config, table, args.work / "wrong")
        result["wrong_layers_named"] = _refusal(attempt)
        # Without the server's word for its layers, the states themselves must tell.
        with mock.patch.object(StateServer, "states", unnamed(StateServer.states)):
            result["wrong_layers"] = _refusal(attempt)
        written = list((args.work / "wrong").glob("shard-*"))
    left = sorted(path.name for path in (args.work / "spool").iterdir())
    result["failures"] = [
        *_disagreements("vllm", result["columns"]),
        *_disagreements("mixed", result["mixed"]["columns"]),
        *([] if result["mixed"]["refused_without_proof"] else ["mixed store read without proof"]),
        *(
            f"layers one too low were accepted ({key})"
            for key in ("wrong_layers_named", "wrong_layers")
            if not result[key]
        ),
        *([f"written by the wrong server: {written}"] if written else []),
        *([f"left in the spool folder: {left}"] if left else []),
    ]
    return result


def _disagreements(name: str, found: dict[str, dict[str, float]]) -> list[str]:
    return [
        f"{name}, {column}: cosine {value['min_cosine']:.6f}, error {value['max_error']:.1e}"
        for column, value in found.items()
        if not (value["min_cosine"] >= COSINE and value["max_error"] <= ALLOWED_ERROR)
    ]


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    console = Console()
    table = Table("state", "lowest cosine", "mean cosine", "largest relative error")
    table.title = (
        f"vLLM against Transformers, {result['samples']} samples, {result['tokens']} tokens"
    )
    for name, value in result["columns"].items():
        cosines = (f"{value[key]:.9f}" for key in ("min_cosine", "mean_cosine"))
        table.add_row(name, *cosines, f"{value['max_error']:.1e}")
    console.print(table)
    for name, speed in result["tokens_per_second"].items():
        console.print(f"{name}: {speed:.0f} tokens/s")
    console.print(f"mixed store: {result['mixed']['shards']} shards, accepted with its proof")
    console.print(f"without: {result['mixed']['refused_without_proof']}")
    console.print(f"layer ids one too low: {result['wrong_layers_named']}")
    console.print(f"and when the server does not name them: {result['wrong_layers']}")
    for failure in result["failures"]:
        console.print(f"[red]differs[/red] {failure}")
    console.print("FAILED" if result["failures"] else "agrees")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="hidden states of vLLM against Transformers")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/quickstart.yaml")
    parser.add_argument("--limit", type=int, default=32, help="samples to extract [32]")
    parser.add_argument("--vllm-python", type=Path, required=True, help="python that has vLLM")
    parser.add_argument("--work", type=Path, required=True, help="new folder for all that is made")
    return parser.parse_args()


def main() -> int:
    """Run everything; see the module docstring for the exit code."""
    args = parse_arguments()
    if args.work.exists():
        sys.stderr.write(f"error: {args.work} exists; give a new folder\n")
        return 2
    args.work.mkdir(parents=True)
    try:
        result = run(args)
    except DraftTrainError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    write_json(args.work / "result.json", result)
    show(result)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
