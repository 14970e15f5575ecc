"""Proposers with known proposals, for decoding and for replay alike.

A rule maps (text, position of the anchor) to logits [B-1, V]; it is all there is to a proposer, so
the live one and the replayed one cannot disagree.

    oracle   proposes the text's own continuation: every draft token is right
    wrong    proposes another token at every slot: no draft token is right
    random   proposes by seed and position: right by chance
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from drafttrain.acceptance.decode import Proposer
from drafttrain.acceptance.evaluate import Drafting
from drafttrain.drafter.session import DrafterSession
from drafttrain.extract.target import Target

from .factory import make_drafter

Rule = Callable[[Sequence[int], int], Tensor]
_PEAK = 20.0


def oracle_rule(block_size: int, vocab: int) -> Rule:
    """All weight on the text's continuation; token 0 behind its end."""

    def rule(text: Sequence[int], position: int) -> Tensor:
        wanted = list(text[position + 1 : position + block_size])
        wanted += [0] * (block_size - 1 - len(wanted))
        logits = torch.zeros(block_size - 1, vocab)
        logits[torch.arange(block_size - 1), torch.tensor(wanted)] = _PEAK
        return logits

    return rule


def wrong_rule(block_size: int, vocab: int) -> Rule:
    """Neither the chain nor any tree of fewer than V-1 nodes holds the text's next token."""
    oracle = oracle_rule(block_size, vocab)
    return lambda text, position: -oracle(text, position)


def random_rule(block_size: int, vocab: int, seed: int = 0) -> Rule:
    """Standard normal logits, a function of the seed and the position alone."""

    def rule(text: Sequence[int], position: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
        return torch.randn(block_size - 1, vocab, generator=generator)

    return rule


RULES = {"oracle": oracle_rule, "wrong": wrong_rule, "random": random_rule}


class RuleProposer:
    """Follows a rule along one known text (prompt and response)."""

    def __init__(self, rule: Rule, block_size: int, text: Sequence[int]) -> None:
        self.block_size = block_size
        self._rule, self._text, self._position = rule, list(text), 0

    def reset(self) -> None:
        self._position = 0

    def append_context(self, taps: Tensor) -> None:
        self._position += len(taps)

    def draft(self, anchor_id: int) -> Tensor:
        return self._rule(self._text, self._position)


class Spine(DrafterSession):
    """A drafter so sure of its first choice that best-first order is the chain."""

    def draft(self, anchor_id: int) -> Tensor:
        return super().draft(anchor_id) * 1e4


def make_proposer(name: str, target: Target, block_size: int, text: Sequence[int]) -> Proposer:
    """A rule's proposer along ``text``, or the random ``drafter`` of the target."""
    if name == "drafter":
        return DrafterSession(*make_drafter(target, block_size))
    return RuleProposer(RULES[name](block_size, target.vocab_rows), block_size, text)


def drafting(name: str, block_size: int, vocab: int) -> Drafting:
    """A rule as ``evaluate.replay_store`` and ``live.decode_store`` take it."""
    rule = RULES[name](block_size, vocab)

    def anchors(sample):
        def draft(positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            text = sample.input_ids.tolist()
            for part in positions.split(16):
                yield part, torch.stack([rule(text, int(p)) for p in part])

        return draft

    return Drafting(
        block_size,
        anchors,
        lambda index: RuleProposer(rule, block_size, index.input_ids.tolist()),
    )
