"""Tree verification of a Gated DeltaNet hybrid at the Qwen3.6-27B geometry: time, memory, flips.

    python -m tests.benchmarks.hybrid_verify [--layers 64] [--context 2048] [--nodes 1 16 32 ...]

Builds the target with random weights on the GPU (bf16, about 54 GB at 64 layers) and prints three
tables. (1) Per number of nodes, with the root: a plain forward of as many tokens, the tree pass,
their ratio, the commit, the memory each needs above the weights and the committed prefix, and the
same for the way that stores one state per node. (2) The fused kernels against plain torch on one
layer. (3) bf16: how often the best token of a chain pass differs from decoding token by token, and
the margin at each difference. Times are medians, wall clock with the device awaited.
Cost: minutes on one H200, most of it the kernels' first use.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from drafttrain.acceptance import gated_delta
from drafttrain.acceptance.gated_delta import Committed, NodeMemory, TreeShape
from drafttrain.acceptance.lossless import near_tie_bound
from drafttrain.acceptance.session import TargetSession
from drafttrain.acceptance.tree import DraftTree
from drafttrain.extract.target import Target
from tests.drafttrain.acceptance.trees import path_to

from .geometry import make_target
from .near_ties import in_chains

_REPEATS, _WARM_UPS, _BLOCK = 7, 2, 16
_console = Console(width=150)


def random_tree(nodes: int, rng: np.random.Generator, vocab: int) -> DraftTree:
    """``nodes`` with the root, at most a block deep, as wide as best-first trees are."""
    parents: list[int] = []
    depths = [0]
    while len(parents) < nodes - 1:
        parent = int(rng.integers(max(0, len(parents) - 24), len(parents) + 1))
        parent = parent if depths[parent] < _BLOCK - 1 else 0
        parents.append(parent)
        depths.append(depths[parent] + 1)
    tokens = rng.integers(0, vocab, nodes - 1)
    return DraftTree(tokens, np.array(parents, np.int64), np.array(depths[1:], np.int64))


def per_node_states(
    layer: Any, projected: tuple, shape: TreeShape, committed: Committed, memory: NodeMemory
) -> Tensor:
    """The usual way: level by level, every node's whole state is made and kept."""
    saved: dict[str, Tensor] = {}
    with replaced("tree_delta_rule", lambda *parts: (saved.update(parts=parts), zeros)[1]):
        zeros = (memory.corrections, memory.corrections)
        gated_delta.mix_nodes(layer, projected, shape, committed, memory)
    query, key, value, decay, beta, seen, state = saved["parts"]
    repeat = layer.num_v_heads // layer.num_k_heads
    q, k = (x.float().repeat_interleave(repeat, 1) for x in (query, key))
    depth = seen.sum(1) - 1
    # The parent is the deepest ancestor but the node itself.
    strict = seen & ~torch.eye(len(seen), dtype=torch.bool, device=seen.device)
    parent = (strict * (depth + 1)).argmax(1)
    states = torch.empty(len(q), *state.shape, device=state.device)
    out = torch.empty_like(memory.corrections)
    for level in range(shape.levels):
        at = (depth == level).nonzero()[:, 0]
        before = state.expand(len(at), -1, -1, -1) if level == 0 else states[parent[at]]
        step = decay[at] - (0 if level == 0 else decay[parent[at]])
        grown = before * step.float().exp()[..., None, None]
        known = (grown * k[at].unsqueeze(-1)).sum(-2)
        change = beta[at].float().unsqueeze(-1) * (value[at].float() - known)
        states[at] = grown + k[at].unsqueeze(-1) * change.unsqueeze(-2)
        out[at] = (states[at] * q[at].unsqueeze(-1)).sum(-2)
    _kept_states.append(states)
    return out


_kept_states: list[Tensor] = []


@contextmanager
def replaced(name: str, value: Any):
    """Another function under a name of ``gated_delta``."""
    own = getattr(gated_delta, name)
    setattr(gated_delta, name, value)
    try:
        yield
    finally:
        setattr(gated_delta, name, own)


def measure(run: Callable[[], Any], after: Callable[[], Any]) -> tuple[float, float, float]:
    """Median milliseconds of ``run`` and of ``after``, and the peak GB that ``run`` added."""
    first, second, peak = [], [], 0.0
    for _ in range(_WARM_UPS + _REPEATS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        after()
        torch.cuda.synchronize()
        first.append(middle - begin)
        second.append(time.perf_counter() - middle)
    medians = (1000 * statistics.median(part[_WARM_UPS:]) for part in (first, second))
    return (*medians, peak)


def verify_table(target: Target, context: int, sizes: list[int]) -> None:
    """Table 1."""
    rng = np.random.default_rng(0)
    session = TargetSession(target, [1])
    prompt = torch.from_numpy(rng.integers(0, target.vocab_rows, context))
    table = Table("nodes", "plain, ms", "tree, ms", "ratio", "commit, ms", "of tree", "plain +GB",
                  "tree +GB", "kept GB", "state per node, ms", "+GB")  # fmt: skip
    for nodes in sizes:
        tree = random_tree(nodes, rng, target.vocab_rows)
        chain = torch.arange(nodes - 1).numpy()
        spine = DraftTree(rng.integers(0, target.vocab_rows, nodes - 1), chain, chain + 1)
        deepest = int(tree.depths.argmax()) + 1 if nodes > 1 else 0
        path = path_to(tree, deepest)
        session.prefill(prompt)
        plain = measure(lambda t=spine: plain_pass(session, t), lambda: session.prefill(prompt))
        session._recurrent._memory = None
        cold = torch.cuda.memory_allocated()
        ours = measure(lambda t=tree: session.verify(7, t), lambda p=path: session.commit(p))
        session.prefill(prompt)
        kept = (torch.cuda.memory_allocated() - cold) / 1e9
        row = [str(nodes), f"{plain[0]:.1f}", f"{ours[0]:.1f}", f"{ours[0] / plain[0]:.2f}",
               f"{ours[1]:.2f}", f"{100 * ours[1] / ours[0]:.1f} %", f"{plain[2]:.2f}",
               f"{ours[2] + kept:.2f}", f"{kept:.2f}"]  # fmt: skip
        row += state_per_node(session, tree) if nodes > 1 else ["-", "-"]
        table.add_row(*row)
        _console.print(row)
    _console.print(table)


def state_per_node(session: TargetSession, tree: DraftTree) -> list[str]:
    """Time and memory of the usual way on the same tree."""

    def clear() -> None:
        _kept_states.clear()
        session._verified = None
        for layer in session._cache.layers:
            if hasattr(layer, "keys") and layer.keys is not None:
                layer.keys = layer.keys[:, :, : session.length]
                layer.values = layer.values[:, :, : session.length]

    try:
        with replaced("mix_fused", per_node_states):
            taken = measure(lambda: session.verify(7, tree), clear)
    except torch.OutOfMemoryError:
        clear()
        torch.cuda.empty_cache()
        return ["-", "out of memory"]
    return [f"{taken[0]:.1f}", f"{taken[2]:.2f}"]


@torch.inference_mode()
def plain_pass(session: TargetSession, chain: DraftTree) -> None:
    """What Transformers does with as many tokens behind the same prefix."""
    tokens = torch.tensor([7, *chain.tokens.tolist()], device=session.device)
    positions = session.length + torch.arange(len(tokens), device=session.device)
    session._forward(tokens, position_ids=positions[None])


def kernel_table(target: Target) -> None:
    """Table 2: one layer's mixing, fused and in plain torch, on the same random inputs."""
    layer: Any = target.layers[0].linear_attn
    rng, device = np.random.default_rng(1), target.device
    table = Table("nodes", "torch, ms", "fused, ms", "largest difference", "largest output")
    for nodes in (16, 64, 256, 512):
        tree = random_tree(nodes, rng, 100)
        shape = TreeShape.of(tree, torch.from_numpy(tree.ancestors()).to(device), 4)
        bf16: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        channels = layer.conv_dim
        committed = Committed(
            0.1 * torch.randn(48, 128, 128, device=device), torch.randn(channels, 4, **bf16)
        )
        projected = (torch.randn(nodes, channels, **bf16), torch.randn(nodes, 48, **bf16),
                     torch.randn(nodes, 48, **bf16))  # fmt: skip
        memory = NodeMemory(
            torch.empty(nodes, channels, **bf16), torch.empty(nodes, 16, 128, **bf16),
            torch.empty(nodes, 48, 128, device=device),
            torch.empty(nodes, 48, device=device, dtype=torch.float64),
        )  # fmt: skip
        call = (layer, projected, shape, committed, memory)
        slow = measure(lambda c=call: gated_delta.mix_nodes(*c), lambda: None)
        wanted, corrections = gated_delta.mix_nodes(*call), memory.corrections.clone()
        fast = measure(lambda c=call: gated_delta.mix_fused(*c), lambda: None)
        got = gated_delta.mix_fused(*call).float()
        worst = max((got - wanted).abs().max(), (memory.corrections - corrections).abs().max())
        table.add_row(str(nodes), f"{slow[0]:.3f}", f"{fast[0]:.3f}", f"{worst:.2e}",
                      f"{wanted.abs().max():.2e}")  # fmt: skip
    _console.print(table)


def flips(target: Target, rounds: int) -> None:
    """Table 3."""
    rng = np.random.default_rng(2)
    session = TargetSession(target, [1])
    prompt = torch.from_numpy(rng.integers(0, target.vocab_rows, 100))
    seen, worst = [], 0.0
    blocks = [rng.integers(0, target.vocab_rows, _BLOCK) for _ in range(rounds)]
    ids = [*np.concatenate(blocks).tolist(), 0]  # the last one is never run
    single, chained = (in_chains(session, prompt, ids, size)[1:] for size in (1, _BLOCK))
    for alone, inside in zip(single, chained, strict=True):
        best = alone.topk(2).values
        worst = max(worst, float((alone - inside).abs().max()))
        if int(alone.argmax()) != int(inside.argmax()):
            bound = near_tie_bound(torch.bfloat16, float(best[0].abs()))
            seen.append((float(best[0] - best[1]), bound))
    inside_bound = sum(margin < bound for margin, bound in seen)
    spread = float(single.std())
    _console.print(
        f"bf16, chain of {_BLOCK} against token by token: {len(seen)} of {len(single)} best tokens"
        f" differ, {inside_bound} of them below the near-tie bound; largest logit difference"
        f" {worst:.3f}, spread of the logits {spread:.3f}"
    )
    _console.print("margin (bound):", ", ".join(f"{m:.3f} ({b:.3f})" for m, b in seen))


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    target = make_target(arguments.layers, "cuda")
    weights = torch.cuda.memory_allocated() / 1e9
    _console.print(f"{weights:.1f} GB of weights in {time.perf_counter() - begin:.0f} s")
    kernel_table(target)
    flips(target, arguments.rounds)
    verify_table(target, arguments.context, arguments.nodes)
    _console.print(f"peak {torch.cuda.max_memory_reserved() / 1e9:.1f} GB reserved")


if __name__ == "__main__":
    main()
