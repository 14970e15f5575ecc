"""A target spread over devices against the same target on one: states, fingerprint, tokens/s.

    python -m tests.benchmarks.spread_target [--kind qwen3_5_text] [--layers 12] [--share 0.5]

Saves a target with random weights (bf16 and half a GB on CUDA, float32 and twice that on a CPU),
and extracts the same samples from it loaded whole, and spread: on CUDA with ``share`` of its
weights on the GPU and the rest in memory, on several GPUs also over all of them, on a CPU with
``share`` in memory and the rest on disk. Prints tokens per second and the largest difference of any
value of taps or final state from the whole target. On CUDA this is done twice, with and without
compiled parts: layers whose weights are loaded for each call are not compiled and round elsewhere,
so that differences must be zero only without compiling. Cost: a minute or two.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.extract import packing
from drafttrain.extract.config import TargetConfig
from drafttrain.extract.engine import Engine
from drafttrain.extract.taps import resolve_taps
from drafttrain.extract.target import Target, load_target
from tests.extract.factory import make_tokenizer

_VOCAB, _WIDTH, _LENGTHS = 32000, 1024, (900, 300, 2000, 60)
_LINEAR = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5], "mrope_interleaved": True,
    },
}  # fmt: skip
_console = Console(width=130)


def save_target(folder: Path, kind: str, layers: int, dtype: torch.dtype) -> int:
    """Write a random target; bytes of its weights."""
    config = AutoConfig.for_model(
        kind, hidden_size=_WIDTH, intermediate_size=3 * _WIDTH, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=_VOCAB,
        max_position_embeddings=4096, eos_token_id=1, bos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False, **(_LINEAR if "qwen3_5" in kind else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def placements(share: int) -> dict[str, dict]:
    """What is compared: recipe keys by name; the whole target first."""
    rest = {"cpu": "100TB"}
    if not torch.cuda.is_available():
        return {"whole": {}, "memory and disk": {"max_memory": {"cpu": f"{share}B"}}}
    found: dict[str, dict] = {
        "whole": {},
        "GPU and memory": {"max_memory": {0: f"{share}B", **rest}},
    }
    if torch.cuda.device_count() > 1:
        found[f"{torch.cuda.device_count()} GPUs"] = {"max_memory": None}
    return found


def states(target: Target, samples: list[np.ndarray], batch: int) -> tuple[dict, float, bool]:
    """Taps and final state of each sample in float32, tokens per second, and whether in rows."""
    codec = "fp32" if target.dtype == torch.float32 else "bf16"
    found, total = {}, sum(len(ids) for ids in samples)
    with Engine(target, resolve_taps(4, target.num_layers), codec) as engine:
        for timed in (False, True):
            begin = time.perf_counter()
            for item in engine.features([samples], batch):
                if not timed:
                    both = (item.taps.decode().flatten(1), item.final.decode())
                    found[item.number] = torch.cat(both, dim=1).float()
            seconds = time.perf_counter() - begin
        return found, total / seconds, engine._rows


def measure(folder: Path, share: int, tokens: int, batch: int) -> Table:
    """One row for each way of loading."""
    rng = np.random.default_rng(0)
    lengths = [_LENGTHS[i % len(_LENGTHS)] for i in range(max(4, tokens // 815))]
    samples = [rng.integers(0, _VOCAB, n).astype(np.int32) for n in lengths]
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    table = Table(
        "target", "layers on", "in rows", "tokens/s", "largest difference", "largest value"
    )
    first: dict[int, torch.Tensor] = {}
    fingerprints = set()
    for name, keys in placements(share).items():
        device = "spread" if keys else "auto"
        config = TargetConfig(path=str(folder), dtype=dtype, device=device, **keys)
        target = load_target(config)
        found, rate, rows = states(target, samples, batch)
        first = first or found
        worst = max(float((found[i] - first[i]).abs().max()) for i in first)
        largest = max(float(part.abs().max()) for part in found.values())
        places = sorted(
            {str(v) for v in getattr(target.model, "hf_device_map", {"": "one"}).values()}
        )
        table.add_row(
            name, ", ".join(places), str(rows), f"{rate:,.0f}", f"{worst:.3g}", f"{largest:.3g}"
        )
        fingerprints.add(target.fingerprint)
        del target
        gc.collect()
        torch.cuda.empty_cache()
    table.caption = f"{len(samples)} samples, fingerprints: {len(fingerprints)} different"
    return table


def main() -> None:
    """Save, load in every way, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="qwen3", help="a Transformers model type")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=3260)
    parser.add_argument("--batch", type=int, default=4096, help="tokens a forward")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dtype = torch.bfloat16 if cuda else torch.float32
        size = save_target(folder, arguments.kind, arguments.layers, dtype)
        _console.print(f"{arguments.kind}, {arguments.layers} layers, {size / 1e6:.0f} MB, {dtype}")
        for compiled in (True, False) if cuda else (False,):
            if not compiled:
                packing._compiler = lambda target: lambda function: function
            _console.print("compiled parts" if compiled else "nothing compiled")
            share = int(arguments.share * size)
            _console.print(measure(folder, share, arguments.tokens, arguments.batch))


if __name__ == "__main__":
    main()
