"""Does vLLM accept what our live evaluation accepts? An exported drafter, served and decoded.

In: a drafter folder, its target folder, token records with ``prompt_ids``, and the Python of an
environment that has vLLM (see README.md). The same prompts are decoded greedily in float32, one at
a time: by vLLM without a drafter, by vLLM with ``method: dflash``, and by our chain decoding.
Out: a table, ``result.json`` in the work folder, and the exit code: 0 when vLLM's ids with and
without the drafter are the same and the accepted draft tokens per draft and per position agree
within 2 %, 1 when they do not, 2 for a usage error.

Both sides count a round as ``drafttrain.acceptance.tau`` does: draft tokens behind the end of the
response do not count. vLLM's raw counters, which include them, are shown beside it.
Cost: two vLLM starts (about a minute each) and three decodings of the prompts.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from drafttrain.acceptance.decode import Limits, decode
from drafttrain.acceptance.sampling import greedy
from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tau import Round, Tally, emitted_by
from drafttrain.acceptance.tree import AUTOREGRESSIVE, CHAIN, Method
from drafttrain.data.config import SourceConfig
from drafttrain.data.drops import DropLog
from drafttrain.data.errors import DataError, DraftTrainError, TargetError
from drafttrain.data.files import write_json
from drafttrain.data.sources import TokenRecord, read_source
from drafttrain.drafter.model import Drafter
from drafttrain.drafter.session import DrafterSession
from drafttrain.export import load_drafter
from drafttrain.extract.config import TargetConfig
from drafttrain.extract.head import capture_head
from drafttrain.extract.target import Target, load_target

TOLERANCE = 0.02
# A position reached by few drafts cannot differ by less than one draft in that many.
MIN_EXPECTED = 50


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    id: str
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """What one engine made of all requests, in their order."""

    output_ids: list[list[int]]
    rounds: list[list[Round]]
    notes: dict[str, Any]
    """The engine's own counters and what was changed in it, where there is any."""


def read_requests(path: Path, limit: int) -> list[Request]:
    """The first ``limit`` token records of a file, as prompts."""
    drops = DropLog()
    records = read_source(SourceConfig(path=path, name="prompts", limit=limit), drops)
    requests = [
        Request(record.row_ref, record.prompt_ids.tolist())
        for record in records
        if isinstance(record, TokenRecord)
    ]
    if not requests:
        raise DataError(f"{path} holds no token records (prompt_ids and response_ids)")
    return requests


def cut_rounds(prompt: int, output: int, accepted: Sequence[int], drafted: int) -> list[Round]:
    """vLLM's accepted tokens per draft, as rounds that end where the response ends.

    Args:
        prompt: tokens of the prompt.
        output: emitted tokens, the first one from the prefill.
        accepted: draft tokens that matched, per round, uncut.
        drafted: draft tokens verified per round.
    """
    rounds, left = [], output - 1
    for matched in accepted:
        kept, emitted = emitted_by(matched, left)
        rounds.append(Round(prompt + output - 1 - left, drafted, kept, emitted))
        left -= emitted
    assert left == 0, f"{left} of {output} tokens are in no round of {list(accepted)}"
    return rounds


def run_vllm(
    args: argparse.Namespace, requests: Sequence[Request], stop_ids: Sequence[int], drafted: int
) -> Run:
    """Decode with vLLM in its own environment; ``drafted`` = 0 runs without the drafter.

    Raises:
        TargetError: vLLM failed; the log named in the message says why.
    """
    name = "dflash" if drafted else "plain"
    longest = max(len(request.prompt_ids) for request in requests)
    job = {
        "target": str(args.target.resolve()),
        "drafter": str(args.drafter.resolve()) if drafted else None,
        "num_speculative_tokens": drafted,
        "max_new_tokens": args.max_new_tokens,
        "stop_ids": list(stop_ids),
        # vLLM stops drafting where a block would pass the end of the context: leave room.
        "max_model_len": longest + args.max_new_tokens + 2 * (drafted + 1),
        "requests": [{"id": r.id, "prompt_ids": r.prompt_ids} for r in requests],
    }
    job_path, result_path, log_path = (args.work / f"{name}.{e}" for e in ("job", "json", "log"))
    job_path.write_text(json.dumps(job), encoding="utf-8")
    result_path.unlink(missing_ok=True)
    side = Path(__file__).with_name("vllm_side.py")
    with log_path.open("wb") as log:
        command = [str(args.vllm_python), str(side), str(job_path), str(result_path)]
        done = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT)
    # Workers that vLLM kills at its end may spoil the exit code; the result file does not lie.
    if not result_path.is_file():
        raise TargetError(f"vLLM gave no result (exit code {done.returncode}): read {log_path}")
    result = json.loads(result_path.read_text(encoding="utf-8"))
    outputs = [item["output_ids"] for item in result["requests"]]
    rounds = [
        cut_rounds(len(request.prompt_ids), len(item["output_ids"]), item["accepted"], drafted)
        for request, item in zip(requests, result["requests"], strict=True)
        if drafted
    ]
    return Run(outputs, rounds, {k: result[k] for k in ("counters", "replaced_norm")})


def run_ours(
    target: Target, drafter: Drafter, requests: Sequence[Request], method: Method, most: int
) -> Run:
    """Decode at most ``most`` tokens per request with the loop of our live evaluation."""
    proposer = DrafterSession(drafter, capture_head(target))
    session = TargetSession(target, drafter.config.target_layer_ids)
    limits = Limits(most, frozenset(target.stop_ids))
    responses = [
        decode(session, proposer, torch.tensor(request.prompt_ids), method, limits, greedy)
        for request in track(requests, f"ours, {method.label}", transient=True)
    ]
    return Run([r.tokens for r in responses], [r.log.rounds for r in responses], {})


def agree(ours: float, theirs: float, drafts: int) -> bool:
    """Whether two acceptance rates per draft are the same within ``TOLERANCE``, relatively."""
    allowed = TOLERANCE * max(ours, theirs)
    if max(ours, theirs) * drafts < MIN_EXPECTED:
        allowed = 1.0 / drafts
    return abs(ours - theirs) <= allowed + 1e-12


def compare(plain: Run, dflash: Run, baseline: Run, chain: Run, block_size: int) -> dict[str, Any]:
    """All numbers of the table, and ``failures``: what does not agree, in words."""
    theirs = Tally.of([r for rounds in dflash.rounds for r in rounds], block_size)
    ours = Tally.of([r for rounds in chain.rounds for r in rounds], block_size)
    positions = [tally.slot_acceptance()[0].tolist() for tally in (ours, theirs)]
    accepted = [
        float(tally.accepted @ range(block_size)) / tally.rounds for tally in (ours, theirs)
    ]
    same = {
        "vllm_dflash_equals_vllm_plain": _count_equal(dflash.output_ids, plain.output_ids),
        "vllm_plain_equals_ours": _count_equal(plain.output_ids, baseline.output_ids),
        "our_chain_equals_our_baseline": _count_equal(chain.output_ids, baseline.output_ids),
        "accepted_round_by_round": _count_equal(dflash.rounds, chain.rounds),
    }
    total = len(plain.output_ids)
    failures = [
        f"{name}: only {n} of {total} prompts"
        for name, n in same.items()
        if n != total and name != "accepted_round_by_round"
    ]
    drafts = min(ours.rounds, theirs.rounds)
    rates = {"accepted per draft": tuple(accepted)}
    rates |= {f"position {k}": pair for k, pair in enumerate(zip(*positions, strict=True), 1)}
    for name, (mine, other) in rates.items():
        if not agree(mine, other, drafts):
            failures.append(f"{name}: ours {mine:.4f}, vLLM {other:.4f}")
    return {
        "prompts": total,
        "identical": same,
        "drafts": [ours.rounds, theirs.rounds],
        "accepted_per_draft": accepted,
        "tau": [ours.tau, theirs.tau],
        "per_position": positions,
        "vllm": dflash.notes,
        "accepted": {
            name: [[r.accepted for r in rounds] for rounds in run.rounds]
            for name, run in (("ours", chain), ("vllm", dflash))
        },
        "failures": failures,
    }


def _count_equal(left: Sequence[Any], right: Sequence[Any]) -> int:
    return sum(a == b for a, b in zip(left, right, strict=True))


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    console = Console()
    table = Table(title=f"{result['prompts']} prompts, greedy, float32")
    for column in ("", "ours", "vLLM"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("drafts (rounds)", *map(str, result["drafts"]))
    table.add_row("accepted per draft", *(f"{v:.4f}" for v in result["accepted_per_draft"]))
    table.add_row("acceptance length (with bonus)", *(f"{v:.4f}" for v in result["tau"]))
    for k, pair in enumerate(zip(*result["per_position"], strict=True), start=1):
        table.add_row(f"accepted at position {k}", *(f"{v:.4f}" for v in pair))
    console.print(table)
    for name, count in result["identical"].items():
        console.print(f"{name.replace('_', ' ')}: {count}/{result['prompts']}")
    console.print(f"vLLM's own counters, not cut at the end: {result['vllm']['counters']}")
    if result["vllm"]["replaced_norm"]:
        console.print("vLLM's norm of the context keys is wrong in this build and was replaced")
    for failure in result["failures"]:
        console.print(f"[red]differs[/red] {failure}")
    console.print("FAILED" if result["failures"] else "agrees")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="acceptance in vLLM against live evaluation")
    parser.add_argument("--drafter", type=Path, required=True, help="an exported drafter folder")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="token records")
    parser.add_argument("--limit", type=int, default=32, help="prompts to decode [32]")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--vllm-python", type=Path, required=True, help="python that has vLLM")
    parser.add_argument("--work", type=Path, required=True, help="folder for logs and results")
    return parser.parse_args()


def main() -> int:
    """Run everything; see the module docstring for the exit code."""
    args = parse_arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    try:
        requests = read_requests(args.prompts, args.limit)
        drafter = load_drafter(args.drafter, torch.device("cpu"), torch.float32)
        target = load_target(TargetConfig(path=str(args.target), dtype="float32", device="cpu"))
        block_size = drafter.config.block_size
        plain = run_vllm(args, requests, target.stop_ids, 0)
        dflash = run_vllm(args, requests, target.stop_ids, block_size - 1)
        baseline = run_ours(target, drafter, requests, AUTOREGRESSIVE, args.max_new_tokens)
        chain = run_ours(target, drafter, requests, CHAIN, args.max_new_tokens)
    except DraftTrainError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    result = compare(plain, dflash, baseline, chain, block_size)
    write_json(args.work / "result.json", result)
    show(result)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
