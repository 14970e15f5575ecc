"""One vLLM run: a job file of prompts -> output ids and accepted draft tokens, round by round.

Runs in vLLM's own environment, which has no drafttrain: it imports vLLM and the standard library.
In: JSON ``{target, drafter | null, num_speculative_tokens, max_new_tokens, stop_ids,
max_model_len, requests: [{id, prompt_ids}]}``. Out: JSON ``{requests: [{id, output_ids,
accepted: [per round]}], counters: {drafts, draft_tokens, accepted_tokens, accepted_per_position}}``
with vLLM's own counts (a round's accepted tokens before the cut at a stop token or the limit).
``replaced_norm`` says whether the key norm below had to be replaced.
Guarantee: greedy, float32, one request at a time, in the order given.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_PREFIX = "vllm:spec_decode_num_"


def grouped_norm_is_right() -> bool:
    """Whether this build's RMS norm takes a weight per layer, as DFlash's context keys need it.

    vLLM normalises the context keys of all draft layers in one call, states [layers, ...] with
    weights [layers, head_dim]. The CPU kernel of 0.32.0 reads the first layer's weight for all.
    """
    import torch
    from vllm import _custom_ops as ops

    states, weights = torch.ones(2, 1, 1, 64), torch.stack((torch.ones(64), torch.full((64,), 2.0)))
    result = torch.empty_like(states)
    ops.rms_norm(result, states, weights, 0.0)
    return bool(torch.allclose(result, states * weights[:, None, None]))


def normalize_context_k(self: Any, keys: Any) -> Any:
    """Normalise context keys [layers, ...], one call per layer, which every build does right."""
    import torch
    from vllm import _custom_ops as ops

    result = torch.empty_like(keys)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(result[layer], keys[layer], weight, self._rms_norm_eps)
    return result


def replace_wrong_norm() -> bool:
    """Put ``normalize_context_k`` in place where the build needs it; True if it did."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    if grouped_norm_is_right():
        return False
    DFlashQwen3Model._normalize_context_k = normalize_context_k
    return True


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for one job."""
    arguments: dict[str, Any] = {
        "model": job["target"],
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": job["max_model_len"],
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if job["drafter"] is not None:
        arguments["per_request_spec_decode_metrics"] = "detailed"
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": job["drafter"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    return arguments


def read_counters(llm: Any) -> dict[str, Any]:
    """vLLM's speculative-decoding counters, by their names without the common prefix."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(_PREFIX):
            value = metric.values if hasattr(metric, "values") else metric.value
            found[metric.name.removeprefix(_PREFIX)] = value
    return found


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Decode every request of ``job``."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(job))
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["stop_ids"],
        detokenize=False,
    )
    results = []
    for request in job["requests"]:
        prompt = {"prompt_token_ids": request["prompt_ids"]}
        output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        metrics = output.spec_decode_metrics
        results.append(
            {
                "id": request["id"],
                "output_ids": list(output.token_ids),
                "accepted": list(metrics.per_step_accepted) if metrics is not None else [],
            }
        )
    return {"requests": results, "counters": read_counters(llm), "replaced_norm": REPLACED_NORM}


def main() -> None:
    """``vllm_side.py JOB.json RESULT.json``."""
    job_path, result_path = map(Path, sys.argv[1:3])
    # Nothing is fetched and nothing is reported from here; 1 GiB holds one short sequence.
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    result = run(json.loads(job_path.read_text(encoding="utf-8")))
    result_path.write_text(json.dumps(result), encoding="utf-8")


# At import, not in main: vLLM's worker processes import this file again, and they run the drafter.
REPLACED_NORM = replace_wrong_norm()

if __name__ == "__main__":
    main()
