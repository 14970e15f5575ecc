"""One decoding loop for the baseline, the chain and the tree: prompt -> response, rounds, times.

    prefill -> first token (the first anchor)
    round:  draft B-1 slots -> tree of nodes -> one target forward -> walk -> commit the path

The walk asks for the target's own token at the root, moves to the child that carries it, and ends
where no child does; that last token is the bonus and the next anchor. The baseline drafts nothing,
so its walk is one token long: it is the same code. What is compared with a draft token is always
the target's token after the accepted path itself, never a reference computed beforehand.

Guarantee: greedy output equals greedy decoding of the target (float32: exactly), sampled output has
the target's distribution, whatever the proposer does.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .sampling import Chooser, NodeToken
from .session import TargetSession
from .tau import RoundLog, cut_round
from .tree import EMPTY_TREE, DraftTree, Method

STAGES = ("draft", "tree", "verify", "commit")


class Proposer(Protocol):
    """Drafts a block after the tokens appended so far; ``DrafterSession`` is one."""

    @property
    def block_size(self) -> int:
        """B, the anchor included."""

    def reset(self) -> None:
        """Forget the sequence."""

    def append_context(self, taps: Tensor) -> None:
        """Context features [t, n_taps, d] of the next t committed tokens."""

    def draft(self, anchor_id: int) -> Tensor:
        """Logits [B-1, V] of the slots after the anchor, which stands right after the context."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a response ends."""

    max_new_tokens: int
    stop_ids: frozenset[int]


@dataclass(slots=True)
class Decoded:
    """One response."""

    tokens: list[int]
    """Emitted tokens, the one from the prefill first, a stop token last if there was one."""
    log: RoundLog
    stopped: bool
    """Ended on a stop token rather than at the length limit."""
    margins: list[float]
    """Per token: the target's best logit minus its second best."""
    peaks: list[float]
    """Per token: the size of the target's best logit, the scale of rounding errors."""
    prefill_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Time in rounds by stage; ``prefill_seconds`` includes the drafter's pass over the prompt."""


def walk(tree: DraftTree, token_at: NodeToken) -> tuple[list[int], list[int]]:
    """Follow the target's own tokens through the tree.

    Returns:
        (path: nodes that are accepted, the root 0 first; tokens: the target's token at each of
        them, i.e. the accepted draft tokens and the bonus token).
    """
    children = tree.children()
    path, tokens = [0], [token_at(0)]
    while (child := children[path[-1]].get(tokens[-1])) is not None:
        path.append(child)
        tokens.append(token_at(child))
    return path, tokens


def decode(
    session: TargetSession,
    proposer: Proposer | None,
    prompt: Tensor,
    method: Method,
    limits: Limits,
    choose: Chooser,
) -> Decoded:
    """Decode one response.

    Args:
        session: of the target.
        proposer: what drafts; unused by the autoregressive method.
        prompt: int64 [n], n >= 1.
        method: what a round drafts.
        limits: stop ids and the most tokens to emit, at least 1.
        choose: greedy, or a sampler.
    """
    if method.kind == "autoregressive":
        proposer = None
    times = _Stopwatch(session.device)
    with times.stage("prefill"):
        prefilled = session.prefill(prompt)
        anchor = choose(prefilled.logits)(0)
        if proposer is not None:
            proposer.reset()
            proposer.append_context(prefilled.taps)
    result = Decoded([anchor], RoundLog(), anchor in limits.stop_ids, [], [])
    _note_margins(result, prefilled.logits)
    while not result.stopped and len(result.tokens) < limits.max_new_tokens:
        tree = EMPTY_TREE
        if proposer is not None:
            with times.stage("draft"):
                logits = proposer.draft(anchor)
            with times.stage("tree"):
                tree = method.draft(logits)
        with times.stage("verify"):
            verified = session.verify(anchor, tree)
            path, tokens = walk(tree, choose(verified.logits))
        with times.stage("commit"):
            position = session.length
            session.commit(path)
            if proposer is not None:
                proposer.append_context(verified.taps[path])
        room = limits.max_new_tokens - len(result.tokens)
        done, result.stopped = cut_round(position, len(tree), tokens, room, limits.stop_ids)
        result.log.rounds.append(done)
        result.tokens += tokens[: done.emitted]
        _note_margins(result, verified.logits[path[: done.emitted]])
        anchor = tokens[-1]
    result.prefill_seconds = times.seconds.pop("prefill")
    result.seconds |= times.seconds
    return result


def _note_margins(result: Decoded, logits: Tensor) -> None:
    """Record how close the second-best token was, for every emitted token."""
    best = logits.topk(2, dim=-1).values
    result.margins += (best[:, 0] - best[:, 1]).tolist()
    result.peaks += best[:, 0].abs().tolist()


class _Stopwatch:
    """Wall time by stage; waits for the device so that each stage pays for its own kernels."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._wait: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the body to a stage."""
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
