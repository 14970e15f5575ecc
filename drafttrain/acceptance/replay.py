"""Acceptance without the target: stored greedy text and its context features -> exact rounds.

Every token that decoding commits lies on the target's greedy path, and causal states of committed
tokens depend on committed tokens only. So what a drafter would propose at an anchor is a function
of the stored sample, and decoding is a walk that jumps from anchor to anchor:

    s = first response token;  A = draft tokens that continue the text;  s += A + 1 (the bonus)

All anchors are drafted in parallel first, of which only the likeliest tokens per slot are kept
([anchors, B-1, k], never all logits); one walk per method follows. A draft token continues the text
if, for the chain, all slots up to it rank the text first; for a tree of budget N, if its node is
among the first N that best-first order pops, so one tree per visited anchor serves every budget.

The text is the reference here, fixed beforehand. That is exact for the target's own greedy text and
only for it: other samples are not replayed. A mean over anchors would weigh easy stretches by their
length and is not tau; it is not computed.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .tau import Round, RoundLog, emitted_by
from .tree import Method, TopSlots, grow_tree, top_slots

DraftAnchors = Callable[[Tensor], Iterable[tuple[Tensor, Tensor]]]
"""Anchors int64 [a] -> chunks of (anchors [c], logits [c, B-1, V]) in order."""
Match = Callable[[int], tuple[int, int]]
"""Anchor position -> (draft nodes verified, draft tokens that continue the text)."""


def spans_of(loss_mask: Tensor) -> list[tuple[int, int]]:
    """Responses of a sample: maximal supervised stretches [start, end) with a token before them.

    The first token of a document has no context to draft from; it counts as the prompt.
    """
    mask = np.concatenate([[False], loss_mask.cpu().numpy(), [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(mask))
    pairs = ((max(int(a), 1), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))
    return [(start, end) for start, end in pairs if start < end]


def replay_span(
    ids: Tensor, span: tuple[int, int], draft: DraftAnchors, methods: Sequence[Method]
) -> dict[Method, RoundLog]:
    """Decode one stored response with every method.

    Args:
        ids: int64 [n], the sample.
        span: [start, end) of the response; its tokens are the target's greedy choice.
        draft: the drafter's logits for given anchors of this sample.
        methods: chain and trees; the baseline's rounds are one token each.

    Returns:
        The rounds per method; none if the response is a single token.
    """
    start, end = span
    last = end - 1
    logs = {method: RoundLog() for method in methods}
    if start >= last:
        return logs
    budget = max([1, *(method.budget for method in methods if method.kind == "tree")])
    drafts = _Drafts(_draft_all(draft, start, last, budget), ids.cpu().numpy(), span, budget)
    for method in methods:
        logs[method].rounds.extend(_walk(drafts.matcher(method), start, last))
    return logs


def _draft_all(draft: DraftAnchors, start: int, last: int, k: int) -> TopSlots:
    """Likeliest tokens [anchors, B-1, k] of all anchors from ``start`` to before ``last``."""
    parts = [top_slots(logits, k) for _, logits in draft(torch.arange(start, last))]
    top = TopSlots(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ids for part in parts]),
    )
    assert len(top.ids) == last - start, "one draft per anchor"
    return top


def _walk(match: Match, start: int, last: int) -> Iterable[Round]:
    """Jump from anchor to anchor until the last token is emitted."""
    position = start
    while position < last:
        drafted, matched = match(position)
        accepted, emitted = emitted_by(matched, last - position)
        yield Round(position, drafted, accepted, emitted)
        position += emitted


class _Drafts:
    """The drafts of all anchors of one span, and how they match the text."""

    def __init__(self, top: TopSlots, text: np.ndarray, span: tuple[int, int], budget: int) -> None:
        self._top, self._text, self._budget = top, text, budget
        self._start, self._end = span
        self._trees: dict[int, tuple[int, list[int]]] = {}

    def matcher(self, method: Method) -> Match:
        """How one method's drafts at an anchor match."""
        if method.kind == "autoregressive":
            return lambda position: (0, 0)
        if method.kind == "chain":
            return self._chain
        return lambda position: self._tree(position, method.budget)

    def _chain(self, position: int) -> tuple[int, int]:
        drafted = self._top.ids[position - self._start, :, 0]
        text = self._text[position + 1 : self._end]
        length = min(len(drafted), len(text))
        misses = np.flatnonzero(drafted[:length] != text[:length])
        return len(drafted), int(misses[0]) if len(misses) else length

    def _tree(self, position: int, budget: int) -> tuple[int, int]:
        if position not in self._trees:
            row = position - self._start
            tree = grow_tree(TopSlots(self._top.logprobs[row], self._top.ids[row]), self._budget)
            nodes = tree.follow(self._text[position + 1 : self._end].tolist())
            self._trees[position] = len(tree), nodes
        size, nodes = self._trees[position]
        # A smaller tree is the beginning of the larger one.
        return min(size, budget), sum(node <= budget for node in nodes)
